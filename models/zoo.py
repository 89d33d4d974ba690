"""Zoo models by name and size: a preset (YAML) and the plain module that it describes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from importlib.abc import Traversable
from typing import Any, cast

import torch
import yaml
from torch import nn

from .deepseek import Deepseek, DeepseekConfig
from .lively import lively_
from .longcat import Longcat, LongcatConfig
from .qwen import Qwen, QwenConfig
from .serving import ServingModel


@dataclass(frozen=True)
class Preset:
    """One size of one zoo model.

    ``architecture`` and ``config_class`` are names in `transformers`, ``config`` its keyword arguments. ``serving`` is
    the family of our own plain model (`build_serving`), ``own`` what only its configuration has.
    ``meta``: the model is too large to hold and is built on the meta device. ``max_cache_len`` and
    ``prefill_tokens`` are the cache length and prompt length, in tokens, of its default generation case.
    """

    name: str
    size: str
    architecture: str
    config_class: str
    config: Mapping[str, Any]
    serving: str
    own: Mapping[str, Any]
    meta: bool
    max_cache_len: int
    prefill_tokens: int


def names() -> list[str]:
    """Names of the zoo's models, sorted."""
    return sorted(f.name.removesuffix(".yaml") for f in _presets().iterdir() if f.name.endswith(".yaml"))


def _presets() -> Traversable:
    return resources.files("cannopy.models") / "presets"


def _read(name: str) -> dict[str, Any]:
    text = (_presets() / f"{name}.yaml").read_text(encoding="utf-8")
    return cast("dict[str, Any]", yaml.safe_load(text))


def sizes(name: str) -> list[str]:
    """Sizes of zoo model ``name`` in the order of its file; KeyError if there is no such model."""
    if name not in names():
        raise KeyError(name)
    return list(_read(name)["sizes"])


def preset(name: str, size: str) -> Preset:
    """The preset of zoo model ``name`` at ``size``; KeyError if there is none."""
    if size not in sizes(name):
        raise KeyError(size)
    data = _read(name)
    one = data["sizes"][size]
    config = {**data["common"], **one["config"]}
    rope = one.get("rope")
    if rope:
        config["rope_parameters"] = _stock_rope(rope)
    return Preset(
        name,
        size,
        data["architecture"],
        data["config"],
        config,
        data["serving"],
        {**data.get("own", {}), **({"rope": rope} if rope else {})},
        bool(one.get("meta", False)),
        one["max_cache_len"],
        one["prefill_tokens"],
    )


def _stock_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """``rope`` in the words of `transformers`."""
    if "factor" not in rope:
        return {"rope_type": "default", "rope_theta": rope["theta"]}
    return {
        "rope_type": "yarn",
        "rope_theta": rope["theta"],
        "factor": rope["factor"],
        "original_max_position_embeddings": rope["original_positions"],
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
        "mscale": 1.0,
        "mscale_all_dim": rope["mscale_all_dim"],
    }


_FAMILIES: Mapping[str, tuple[type[Any], Callable[[Any], ServingModel]]] = {
    "deepseek": (DeepseekConfig, Deepseek),
    "longcat": (LongcatConfig, Longcat),
    "qwen": (QwenConfig, Qwen),
}
_STOCK_ONLY = frozenset({"rope_parameters", "max_position_embeddings", "num_key_value_heads"})
"""Arguments of `transformers` configurations that one of our families has no use for."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters have ``dtype`` where their module does not ask for another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_serving(preset: Preset, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> ServingModel:
    """Our own plain model of ``preset`` (packed tokens, paged cache) in eval mode; dtype and weights as in `build`."""
    config_class, family = _FAMILIES[preset.serving]
    known = {f.name for f in fields(config_class)}
    sizes = {k: v for k, v in preset.config.items() if k in known or k not in _STOCK_ONLY}
    with torch.device("meta") if preset.meta else contextlib.nullcontext(), default_dtype(dtype):
        model = family(config_class(**sizes, **preset.own)).eval()
    if not preset.meta:
        lively_(model, seed)
    return model


def build(preset: Preset, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """The module of ``preset`` in eval mode, parameters in ``dtype`` where the architecture does not ask for float32.

    Weights are random but lively (see `lively`), a function of ``seed`` and of the parameters' names only.

    Raises:
        ImportError: `transformers` is missing or too old to have the architecture.
    """
    import transformers

    config = getattr(transformers, preset.config_class)(**preset.config)
    architecture = getattr(transformers, preset.architecture)
    with torch.device("meta") if preset.meta else contextlib.nullcontext():
        model = cast("nn.Module", architecture._from_config(config, dtype=dtype)).eval()
    return model if preset.meta else lively_(model, seed)
