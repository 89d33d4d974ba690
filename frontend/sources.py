"""Loads MODEL: a zoo name, a Hugging Face checkpoint folder, or ``path.py:factory``."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from ..models import published, zoo
from ..models import weights as published_weights
from ..models.lively import lively_
from ..models.serving import ServingModel
from .errors import ModelSourceError
from .generation import Call, GenerationCase, Phase
from .serving import ServingCase

Form = Literal["stock", "serving"]
"""``stock``: the model of `transformers`, static cache. ``serving``: the zoo's own, packed tokens and a paged cache."""
FORMS: tuple[str, ...] = get_args(Form)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
"""Short dtype names; torch's own (``bfloat16``) are understood as well."""

_NO_WEIGHTS = "no weights (meta device): compiles, but cannot run."
_INSTALL_TRANSFORMERS = "transformers is not installed: pip install 'transformers>=5.24'"


@dataclass(frozen=True)
class LoadedModel:
    """A model, the method to compile and where its inputs come from.

    ``method`` is None for a serving model, which has a method per phase: ask `method_of`. ``make_inputs(phase)`` gives
    ``(args, kwargs)`` of a call, new objects each time. ``case`` prepares the calls of a generation and is None for a
    factory's model. ``notes`` are remarks for the user, one sentence each. ``checkpoint`` is the folder that the
    weights were read from.
    """

    model: nn.Module
    method: str | None
    name: str
    make_inputs: Callable[[Phase], Call]
    case: GenerationCase | ServingCase | None = None
    notes: tuple[str, ...] = ()
    checkpoint: Path | None = None

    def method_of(self, phase: Phase) -> str:
        """The method that computes ``phase``."""
        return self.method or phase


@dataclass(frozen=True)
class _Call:
    """Sequences per call, and the seed of token ids and random weights."""

    batch: int
    seed: int


def load(
    spec: str,
    *,
    size: str | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    phase: Phase = "decode",
    batch: int = 1,
    weights: bool = True,
    form: Form = "stock",
    next_n: int = 0,
    block_size: int = 128,
) -> LoadedModel:
    """The model that ``spec`` names, in eval mode.

    Args:
        spec: zoo name, folder with a ``config.json``, or ``path.py:factory``.
        size: of a zoo model; "tiny" when None.
        dtype: of the parameters; bfloat16 for the zoo, the checkpoint's own for a folder when None.
        seed: of random weights and token ids.
        phase: what a factory that asks for it should prepare.
        batch: sequences per call, for zoo models and folders.
        weights: False builds a zoo model or a folder's on the meta device: it compiles, but cannot run.
        form: of a zoo model or a folder's, see `Form`.
        next_n: drafts per request and decode step, in serving form.
        block_size: tokens per block of the cache, in serving form.

    Raises:
        ModelSourceError: nothing of that name, a broken folder or factory, transformers missing, a factory without
            weights.
    """
    wanted = _dtype(dtype)
    if form not in FORMS:
        raise ModelSourceError(f"unknown form {form!r}{_nearest(form, list(FORMS))}")
    if form == "stock" and next_n:
        raise ModelSourceError("drafts (next_n) belong to the serving form: --form serving")
    call = _Call(batch, seed)
    serving = {"next_n": next_n, "block_size": block_size} if form == "serving" else None
    file, colon, factory = spec.rpartition(":")
    if colon and file.endswith(".py"):
        _refuse_size(spec, size)
        if form == "serving":
            raise ModelSourceError(f"{spec} has the form that its factory gives it; --form is for others")
        if not weights:
            raise ModelSourceError(f"{spec} makes its own weights; let it build the model under torch.device('meta')")
        return _from_factory(spec, Path(file), factory, {"dtype": wanted, "seed": seed, "phase": phase, "batch": batch})
    if Path(spec).is_dir():
        _refuse_size(spec, size)
        if serving is not None:
            return _serving_from_folder(Path(spec), wanted, weights, call, serving)
        return _from_folder(Path(spec), wanted, weights, call)
    return _from_zoo(spec, size or "tiny", wanted or torch.bfloat16, weights, call, serving)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = DTYPES.get(dtype, getattr(torch, dtype, None))
    if not isinstance(found, torch.dtype):
        raise ModelSourceError(f"unknown dtype {dtype!r}{_nearest(dtype, list(DTYPES))}")
    return found


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}? (known: {', '.join(names)})" if close else ""


def _refuse_size(spec: str, size: str | None) -> None:
    if size is not None:
        raise ModelSourceError(f"--size {size} applies to zoo models; {spec} has one size")


def _from_zoo(
    name: str, size: str, dtype: torch.dtype, weights: bool, call: _Call, serving: Mapping[str, Any] | None
) -> LoadedModel:
    if name not in zoo.names():
        if name.endswith(".py"):
            raise ModelSourceError(f"{name} is a file; name the function in it that makes the model: {name}:FUNCTION")
        if "/" in name:
            raise ModelSourceError(f"unknown model {name!r}: no folder of that name exists")
        where = " and no folder of that name exists" if "." in name else ""
        raise ModelSourceError(f"unknown model {name!r}{where}{_nearest(name, zoo.names())}")
    if size not in zoo.sizes(name):
        raise ModelSourceError(f"{name} has no size {size!r}{_nearest(size, zoo.sizes(name))}")
    preset = zoo.preset(name, size)
    preset = replace(preset, meta=preset.meta or not weights)
    note = _NO_WEIGHTS if preset.meta else f"random weights, seed {call.seed}."
    lengths = preset.prefill_tokens, preset.max_cache_len
    if serving is not None:
        own = zoo.build_serving(preset, dtype, call.seed)
        return _serving(own, f"{name} ({size}, serving form)", call, lengths, serving, (note,))
    try:
        model = zoo.build(preset, dtype, call.seed)
    except ImportError as e:
        raise ModelSourceError(_INSTALL_TRANSFORMERS) from e
    except AttributeError as e:
        raise ModelSourceError(f"this transformers has no {preset.architecture}: pip install -U transformers") from e
    case = GenerationCase(model, call.batch, *lengths, call.seed)
    return LoadedModel(model, "forward", f"{name} ({size})", case.inputs, case, (note,))


def _serving(
    model: ServingModel, name: str, call: _Call, lengths: tuple[int, int], options: Mapping[str, Any],
    notes: tuple[str, ...],
) -> LoadedModel:
    case = ServingCase(model, call.batch, *lengths, call.seed, **options)
    return LoadedModel(model, None, name, case.inputs, case, notes)


def _serving_from_folder(
    folder: Path, dtype: torch.dtype | None, weights: bool, call: _Call, options: Mapping[str, Any]
) -> LoadedModel:
    config = _read_config(folder)
    name = f"{folder.resolve().name} (serving form)"
    wanted = dtype or _dtype(config.get("dtype") or config.get("torch_dtype")) or torch.bfloat16
    try:
        found = published.read(config)
        files = any(folder.glob("*.safetensors"))
        with torch.device("meta") if not weights else contextlib.nullcontext(), zoo.default_dtype(wanted):
            model = found.build().eval()
        notes: tuple[str, ...] = () if weights else (_NO_WEIGHTS,)
        if weights and files:
            published_weights.load(model, folder, found.rename)
        elif weights:
            lively_(model, call.seed)
            notes = (f"{folder} has no safetensors: random weights, seed {call.seed}.",)
    except published.PublishedConfigError as e:
        raise ModelSourceError(f"{folder / 'config.json'} has no serving form: {e}; --form stock takes it") from e
    except published_weights.WeightError as e:
        raise ModelSourceError(f"{folder}: {e}") from e
    limit = int(config.get("max_position_embeddings") or 256)
    lengths = min(96, limit // 2), min(256, limit)
    loaded = _serving(model, name, call, lengths, options, notes)
    return replace(loaded, checkpoint=folder if weights and files else None)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ModelSourceError(f"{folder} has no config.json: not a Hugging Face checkpoint folder")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelSourceError(f"{file} cannot be used: {str(e).splitlines()[0]}") from e
    if not isinstance(found, dict):
        raise ModelSourceError(f"{file} cannot be used: expected an object, found a {type(found).__name__}")
    return found


def _from_folder(folder: Path, dtype: torch.dtype | None, weights: bool, call: _Call) -> LoadedModel:
    try:
        import transformers
    except ImportError as e:
        raise ModelSourceError(_INSTALL_TRANSFORMERS) from e
    if not (folder / "config.json").is_file():
        raise ModelSourceError(f"{folder} has no config.json: not a Hugging Face checkpoint folder")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, json.JSONDecodeError) as e:
        raise ModelSourceError(f"{folder / 'config.json'} cannot be used: {str(e).splitlines()[0]}") from e
    architecture = _architecture(folder, config)
    if not weights:
        with torch.device("meta"):
            model = architecture._from_config(config, dtype=dtype or config.dtype or torch.bfloat16)
        notes: tuple[str, ...] = (_NO_WEIGHTS,)
    elif any(folder.glob("*.safetensors")):
        model = architecture.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True)
        notes = ()
    else:
        model = architecture._from_config(config, dtype=dtype or config.dtype or torch.bfloat16)
        lively_(model, call.seed)
        notes = (f"{folder} has no safetensors: random weights, seed {call.seed}.",)
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 256
    case = GenerationCase(model.eval(), call.batch, min(96, limit // 2), min(256, limit), call.seed)
    return LoadedModel(model, "forward", folder.resolve().name, case.inputs, case, notes,
                       None if notes else folder)


def _architecture(folder: Path, config: Any) -> Any:
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise ModelSourceError(
            f"{folder}: transformers {transformers.__version__} has no causal language model for "
            f"{config.architectures or config.model_type}: pip install -U transformers"
        )
    return found


def _from_factory(spec: str, file: Path, name: str, options: dict[str, Any]) -> LoadedModel:
    factory = _import_factory(file, name)
    accepted = inspect.signature(factory).parameters
    asked = {k: v for k, v in options.items()
             if k in accepted and (v is not None or accepted[k].default is inspect.Parameter.empty)}
    made = factory(**asked)
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and isinstance(made[1], str)):
        raise ModelSourceError(
            f"{spec} must return (module, method name, inputs), inputs being a tuple of arguments or (args, kwargs); "
            f"it returned {_shape_of(made)}"
        )
    model, method, inputs = made
    if not callable(getattr(model, method, None)):
        raise ModelSourceError(f"{spec}: {type(model).__name__} has no method {method!r}")
    first: list[Call] = [_as_call(spec, inputs)]

    def make_inputs(phase: Phase) -> Call:
        # The factory's own inputs belong to its model; a second set is made by calling it again.
        if first and phase == options["phase"]:
            return first.pop()
        again = factory(**(asked | ({"phase": phase} if "phase" in accepted else {})))
        return _as_call(spec, again[2])

    return LoadedModel(model, method, f"{file.stem}:{name}", make_inputs)


def _as_call(spec: str, inputs: Any) -> Call:
    if not isinstance(inputs, tuple | list):
        raise ModelSourceError(f"{spec}: inputs must be a tuple, not {type(inputs).__name__}")
    if len(inputs) == 2 and isinstance(inputs[0], tuple | list) and isinstance(inputs[1], dict):
        return tuple(inputs[0]), dict(inputs[1])
    return tuple(inputs), {}


def _shape_of(made: Any) -> str:
    if isinstance(made, tuple):
        return "(" + ", ".join(type(v).__name__ for v in made) + ")"
    return type(made).__name__


def _import_factory(file: Path, name: str) -> Callable[..., Any]:
    if not file.is_file():
        raise ModelSourceError(f"{file} does not exist")
    module_name = f"_cannopy_user_{file.resolve().stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, file.resolve())
    assert module_spec is not None  # a .py file always has a spec and a loader
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    previous = sys.modules.get(module_name)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up by name
    try:
        module_spec.loader.exec_module(module)
    except BaseException:  # whatever the user's file raises: its half-made module must not stay
        if previous is None:
            del sys.modules[module_name]
        else:
            sys.modules[module_name] = previous
        raise
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise ModelSourceError(f"{file} has no function {name!r}{_nearest(name, functions)}")
    return cast("Callable[..., Any]", factory)
