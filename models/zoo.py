"""Zoo models by name and size: a preset (YAML) and the plain module that it describes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.abc import Traversable
from typing import Any, cast

import torch
import yaml
from torch import nn

from .lively import lively_


@dataclass(frozen=True)
class Preset:
    """One size of one zoo model.

    ``architecture`` and ``config_class`` are names in `transformers`, ``config`` its keyword arguments.
    ``meta``: the model is too large to hold and is built on the meta device. ``max_cache_len`` and
    ``prefill_tokens`` are the cache length and prompt length, in tokens, of its default generation case.
    """

    name: str
    size: str
    architecture: str
    config_class: str
    config: Mapping[str, Any]
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
    return Preset(
        name,
        size,
        data["architecture"],
        data["config"],
        config,
        bool(one.get("meta", False)),
        one["max_cache_len"],
        one["prefill_tokens"],
    )


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
