"""Sizes of published models, as plain numbers (``models/*.yaml``)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import yaml

FAMILIES = ("deepseek", "longcat", "gqa")
ZOO = {"qwen2.5": "qwen2.5-72b", "qwen3-moe": "qwen3-235b-a22b"}
"""Zoo models that go by another name here, with the one that their size ``full`` is."""
MATRICES = frozenset({"q_a", "q_b", "kv_a", "indexer_q", "qkv", "o_proj", "dense", "shared", "experts"})


class UnknownModelError(ValueError):
    """No model has this name; the message has the nearest one."""


@dataclass(frozen=True)
class Indexer:
    """Lightning indexer: ``heads`` of ``dim``, ``selected`` tokens per query."""

    heads: int
    dim: int
    selected: int


@dataclass(frozen=True)
class Attention:
    """Sizes of attention.

    ``kind`` mla: ``q_rank``, latent ``rank``, head dims ``rope``, ``nope`` and ``value``, bytes of an int8 cache row
    ``cache_row_int8``. ``kind`` gqa: ``kv_heads`` of ``dim``, ``qk_norm`` for RMSNorm of q and k.
    """

    kind: str
    heads: int
    q_rank: int = 0
    rank: int = 0
    rope: int = 0
    nope: int = 0
    value: int = 0
    cache_row_int8: int = 0
    indexer: Indexer | None = None
    kv_heads: int = 0
    dim: int = 0
    qk_norm: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed experts of ``width``; ``zero_experts`` are routing targets without weights. ``shared_width`` 0: none.
    ``dispatch_int8``: an int8 network quantises before the tokens are sent."""

    experts: int
    top_k: int
    width: int
    zero_experts: int = 0
    shared_width: int = 0
    dispatch_int8: bool = True

    @property
    def targets(self) -> int:
        """Experts that the router chooses among."""
        return self.experts + self.zero_experts


@dataclass(frozen=True)
class Model:
    """One published model.

    ``family``: structure of a layer; longcat has two attentions and two dense MLPs beside one MoE. ``dense_layers``:
    leading layers with a dense MLP instead of experts. ``dense_width``: of one gate, up or down matrix. ``quantised``:
    matrices that an int8 checkpoint quantises. ``draft``: what an MTP draft runs, ``layer``, ``dense`` or ``none``.
    ``embedding_parameters``: of additional embedding tables.
    """

    name: str
    title: str
    family: str
    hidden: int
    layers: int
    dense_layers: int
    vocab: int
    attention: Attention
    dense_width: int
    experts: Experts | None
    quantised: frozenset[str]
    draft: str
    embedding_parameters: float = 0.0


def model_names() -> tuple[str, ...]:
    """Names of the described models, sorted."""
    folder = files(__package__) / "models"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


@cache
def load_model(name: str) -> Model:
    """The model called ``name``. `UnknownModelError` names the nearest, ValueError what is wrong in a description."""
    name = ZOO.get(name, name)
    if name not in model_names():
        close = difflib.get_close_matches(name, model_names(), n=1, cutoff=0.0)
        raise UnknownModelError(f"unknown model {name!r}; did you mean {close[0]!r}? known: {', '.join(model_names())}")
    text = (files(__package__) / "models" / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_model(name, yaml.safe_load(text))


def parse_model(name: str, data: Mapping[str, Any]) -> Model:
    """A `Model` from plain data; ValueError for unknown keys and values."""
    raw = dict(data)
    attention = dict(raw.pop("attention"))
    if indexer := attention.pop("indexer", None):
        attention["indexer"] = _record(Indexer, indexer, name)
    experts = raw.pop("moe", None)
    known = {
        "attention": _record(Attention, attention, name),
        "experts": _record(Experts, experts, name) if experts else None,
        "dense_width": int(raw.pop("dense")["width"]),
        "quantised": frozenset(raw.pop("quantised")),
        "embedding_parameters": float(raw.pop("embedding_parameters", 0)),
    }
    model = _record(Model, {"name": name, **raw, **known}, name)
    if model.family not in FAMILIES or model.draft not in ("layer", "dense", "none"):
        raise ValueError(f"{name}: family {model.family!r} or draft {model.draft!r} is not known")
    if odd := model.quantised - MATRICES:
        raise ValueError(f"{name}: no matrix is called {sorted(odd)[0]!r}; there are {', '.join(sorted(MATRICES))}")
    return model


R = TypeVar("R")


def _record(cls: type[R], data: Mapping[str, Any], name: str) -> R:
    allowed = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if odd := set(data) - allowed:
        raise ValueError(f"{name}: {sorted(odd)[0]!r} is no key of {cls.__name__}")
    return cls(**data)
