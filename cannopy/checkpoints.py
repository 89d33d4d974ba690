"""Under which names a checkpoint has the parameters of a model: the zoo's, those of `transformers`, or the user's own.

`transformers` renames and stacks tensors when it loads (``experts.3.gate_proj.weight`` becomes a part of
``experts.gate_up_proj``); its own table of conversions says how, and is followed here without reading the tensors.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from cannopy.backend.weights.checkpoint import Checkpoint, CheckpointError, Stored
from cannopy.models import published
from cannopy.models.serving import ServingModel

Rename = Callable[[str], "str | None"]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def stored(model: nn.Module, checkpoint: Checkpoint, rename: Rename | None = None) -> dict[str, Stored]:
    """Where ``checkpoint`` has the parameters and buffers of ``model``, by their names in the model.

    ``rename`` maps a name of the checkpoint to the model's, None where the model has no such tensor; without it a zoo
    model follows the folder's ``config.json``, a model of `transformers` that library's table, and any other model
    has the names of the checkpoint. Raises `CheckpointError`.
    """
    if rename is None and isinstance(model, ServingModel):
        rename = _published(checkpoint.folder)
    if rename is None and _of_transformers(model):
        return _converted(model, checkpoint)
    own = {n for n, _ in itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers())}
    return _renamed(own, checkpoint, rename or (lambda name: name))


def _published(folder: Path) -> Rename:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return published.read(config).rename
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{folder / 'config.json'} cannot be used: {e}") from e


def _renamed(own: set[str], checkpoint: Checkpoint, rename: Rename) -> dict[str, Stored]:
    """Tensors by name; those of single experts as parts of the zoo's stacks ``[experts, …]``, gate above up."""
    found: dict[str, Stored] = {}
    experts: dict[str, dict[str, dict[int, str]]] = {}
    for tensor in checkpoint.names:
        name = rename(tensor)
        if name is None:
            continue
        expert = None if name in own else _EXPERT.match(name)
        if expert is None:
            found[name] = Stored(tensor)
        else:
            experts.setdefault(expert[1], {}).setdefault(expert[3], {})[int(expert[2])] = tensor
    for prefix, kinds in experts.items():
        stacks = {kind: _stack(prefix, kind, tensors, checkpoint) for kind, tensors in kinds.items()}
        if "gate" in stacks and "up" in stacks:
            found[f"{prefix}.gate_up_proj"] = Stored(parts=(stacks["gate"], stacks["up"]), dim=1)
        if "down" in stacks:
            found[f"{prefix}.down_proj"] = stacks["down"]
    return found


def _stack(prefix: str, kind: str, tensors: Mapping[int, str], checkpoint: Checkpoint) -> Stored:
    for expert in range(len(tensors)):
        if expert not in tensors:
            raise CheckpointError(f"{checkpoint.folder} has no tensor for expert {expert} of {prefix} ({kind}_proj), "
                                  f"but one for expert {max(tensors)}")
    return Stored(parts=tuple(Stored(tensors[e]) for e in range(len(tensors))), stack=True)


def _of_transformers(model: nn.Module) -> bool:
    return any(c.__module__ == "transformers.modeling_utils" for c in type(model).__mro__)


def _converted(model: Any, checkpoint: Checkpoint) -> dict[str, Stored]:
    """As ``from_pretrained`` finds the tensors of ``model``."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    table = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in table if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in table if isinstance(t, loading.WeightConverter)]
    own = model.state_dict()
    found: dict[str, Stored] = {}
    collected: dict[str, dict[str, list[str]]] = {}
    for tensor in sorted(checkpoint.names, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(tensor, renamings, converters, model.base_model_prefix, own)
        if name not in own and tensor in own:
            name, pattern = tensor, None
        if pattern is None:
            found[name] = Stored(tensor)
        elif name in own:
            collected.setdefault(name, {}).setdefault(pattern, []).append(tensor)
    for name, patterns in collected.items():
        converter = next(c for c in converters if set(patterns) <= set(c.source_patterns))
        found[name] = _operations(name, converter, patterns)
    return found


def _operations(name: str, converter: Any, patterns: Mapping[str, list[str]]) -> Stored:
    """What the operations of ``converter`` make of the tensors at each of its patterns."""
    groups = [[Stored(t) for t in patterns[p]] for p in converter.source_patterns if p in patterns]
    for operation in converter.operations:
        kind, dim = type(operation).__name__, getattr(operation, "dim", 0)
        if kind == "MergeModulelist":
            groups = [[Stored(parts=tuple(group), dim=dim, stack=True)] for group in groups]
        elif kind == "Concatenate":
            groups = [[Stored(parts=tuple(part for group in groups for part in group), dim=dim)]]
        else:
            raise CheckpointError(f"{name}: transformers makes it by {kind}, which is not read in parts; load the "
                                  "model with from_pretrained and compile that")
    (made,), = groups
    return made
