"""Loads published checkpoints (Hugging Face safetensors) into the zoo's models.

The zoo keeps the published names. Two things differ: a checkpoint has a tensor per expert and projection, the zoo
stacks them; and MTP modules are layers of their own numbers in the checkpoint, modules of their own here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

Rename = Callable[[str], "str | None"]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


class WeightError(ValueError):
    """A checkpoint that does not fit the model: names the parameter."""


def load(
    model: nn.Module, folder: Path, rename: Rename = lambda name: name, given: tuple[str, ...] = ()
) -> None:
    """Copy the tensors of ``folder``'s safetensors files into ``model``, one at a time.

    Args:
        model: receives the values in its own dtypes.
        folder: has ``*.safetensors`` and, if there are several, ``model.safetensors.index.json``.
        rename: maps a name of the checkpoint to the model's, or to None to leave the tensor out.
        given: prefixes of the model's names that need not be in the checkpoint (a draft's shared embedding).

    Raises:
        WeightError: a parameter is missing, unknown or of another shape. The model is then partly loaded.
    """
    fill(model, _tensors(folder), rename, given)


def fill(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    rename: Rename = lambda name: name,
    given: tuple[str, ...] = (),
) -> None:
    """As `load`, from pairs of name and tensor (a ``state_dict().items()``, for example)."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    seen: Counter[str] = Counter()
    with torch.no_grad():
        for source, tensor in tensors:
            name = rename(source)
            if name is None:
                continue
            stack, place = _target(own, name, source)
            if place.shape != tensor.shape:
                raise WeightError(f"{source}: expected shape {list(place.shape)}, found {list(tensor.shape)}")
            place.copy_(tensor)
            seen[stack] += place.numel()
    loaded = {id(own[n]) for n, count in seen.items() if count == own[n].numel()}  # a tied parameter has two names
    missing = [
        n for n, t in own.items() if id(t) not in loaded and not n.startswith(given) and not _computed(model, n)
    ]
    if missing:
        raise WeightError(f"the checkpoint has no (or not all of) {', '.join(missing[:4])}{' …'[: len(missing) > 4]}")


def _computed(model: nn.Module, name: str) -> bool:
    """Whether ``name`` is a buffer that the model computes itself."""
    module, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(module)._non_persistent_buffers_set


def _target(own: Mapping[str, Tensor], name: str, source: str) -> tuple[str, Tensor]:
    """The parameter that a tensor belongs to, and the part of it that it fills."""
    if name in own:
        return name, own[name]
    found = _EXPERT.match(name)
    stack = f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}" if found else ""
    if found is None or stack not in own:
        raise WeightError(f"the model has no parameter for {source}")
    if int(found[2]) >= own[stack].shape[0]:
        raise WeightError(f"{source}: the model has {own[stack].shape[0]} experts")
    rows = own[stack][int(found[2])]
    half = rows.shape[0] // 2
    return stack, {"gate": rows[:half], "up": rows[half:], "down": rows}[found[3]]


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise WeightError(f"{folder} has no safetensors files")
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 safe_open is no mapping
                yield key, file.get_tensor(key)


def deepseek_target(name: str, layers: int) -> str | None:
    """Names of the language model in a DeepSeek checkpoint: all but the MTP layers and the quantisation scales."""
    number = re.match(r"model\.layers\.(\d+)\.", name)
    if number and int(number[1]) >= layers:
        return None
    return name


def deepseek_draft(name: str, layers: int) -> str | None:
    """Names of `deepseek.DeepseekDraft`: layer ``layers`` of the checkpoint; embedding and head are the target's."""
    found = re.match(rf"model\.layers\.{layers}\.(.*)", name)
    if found is None or found[1].startswith(("embed_tokens.", "shared_head.head.")):
        return None
    own = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
    return found[1] if found[1].startswith(own) else f"block.{found[1]}"


def longcat_target(name: str, routed: int | None = None) -> str | None:
    """Names of the language model in a LongCat checkpoint.

    ``routed``: number of experts with weights; `transformers` writes some for zero experts as well, which have none.
    """
    expert = _EXPERT.match(name)
    unused = expert is not None and routed is not None and int(expert[2]) >= routed
    return None if unused or name.startswith("model.mtp.") else name


def longcat_draft(name: str) -> str | None:
    """Names of `longcat.LongcatDraft` in a LongCat checkpoint."""
    if not name.startswith("model.mtp."):
        return None
    name = name.removeprefix("model.mtp.").removeprefix("layers.0.")
    name = name.removeprefix("transformer_layer.")
    return name.replace("enorm.m.", "enorm.").replace("hnorm.m.", "hnorm.")
