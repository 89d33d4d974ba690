"""How one model is spread over dies: sizes of the groups, who is in which, and their names in a graph.

Ranks are those of torch.distributed, one per die, numbered 0 to ``dies`` - 1. Groups of ``attn_tp``, ``kvp``,
``o_proj_tp``, ``dense_tp``, ``embed_tp``, ``lm_head_tp`` and ``moe_tp`` are neighbours: ranks k·n to k·n + n - 1. A
group of ``ep`` takes every (dies / ep)-th rank, so that those who share experts by ``moe_tp`` are neighbours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

LAYOUT = "layout"
"""Key of `Program.facts`: the `Layout` of the graph, absent where it is for one die."""

ROUTED_EP = "ep_routed"
"""The ranks of ``ep`` once more, for tokens that go by all-to-all: dispatch and combine have ``ep`` to themselves."""

KINDS = ("attn_tp", "o_proj_tp", "dense_tp", "embed_tp", "lm_head_tp", "moe_tp", "ep", ROUTED_EP, "cp", "kvp")
"""Kinds of groups in the order in which all ranks create them."""


class ParallelError(ValueError):
    """Sizes of groups that cannot be taken; says what can."""


@dataclass(frozen=True)
class Parallel:
    """Sizes of the groups of dies. ``ep``: experts are spread over so many dies (1: none is), ``moe_tp``: experts cut
    in width instead. ``attn_tp`` cuts heads. ``kvp`` spreads the rows of latent caches, dies of a group have the same
    requests. ``dp`` is the number of attention replicas, 0 for as many as there are, which is all that it may be.
    ``o_proj_tp``, ``dense_tp``, ``embed_tp``, ``lm_head_tp``: groups of data-parallel dies that share that matrix.
    ``cp``: a prompt is split over all dies, each of which is called with all of it. ``sp``, as large as ``attn_tp``:
    the dies of an ``attn_tp`` group have different rows of a prompt between attention and attention."""

    ep: int = 1
    dp: int = 0
    attn_tp: int = 1
    o_proj_tp: int = 1
    dense_tp: int = 1
    embed_tp: int = 1
    lm_head_tp: int = 1
    moe_tp: int = 1
    cp: int = 1
    kvp: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            value: Any = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < (f.name != "dp"):
                raise ParallelError(f"{f.name} is a number of dies, found {value!r}")
        if self.sp not in (1, self.attn_tp):
            raise ParallelError(f"sp={self.sp} with attn_tp={self.attn_tp}: rows of a prompt are spread over the dies "
                                f"that cut its heads, which are {self.attn_tp}, not {self.sp}; give sp={self.attn_tp} "
                                f"or attn_tp={self.sp}")
        if self.dp and self.dp != self.replicas:
            shared = f"cp = {self.cp}" if self.cp > 1 else f"attn_tp·kvp = {self.attn_tp}·{self.kvp}"
            each = self.dies / self.replicas
            raise ParallelError(f"dp={self.dp}: {self.dies} dies, of which {shared} have the same requests, are "
                                f"{self.dies} / {each:g} = {self.replicas:g} replicas; leave dp out")

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """From ``ep=128,o_proj_tp=4``; `ParallelError` names the nearest key."""
        values: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, number = (p.strip() for p in part.partition("="))
            _known(name)
            if name in values:
                raise ParallelError(f"{name} is given twice")
            if not number.isdecimal():
                raise ParallelError(f"{name} is a number of dies, found {number!r}")
            values[name] = int(number)
        return cls(**values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Parallel:
        """From the keys of a YAML file; `ParallelError` names the nearest key."""
        for name in values:
            _known(name)
        return cls(**values)

    @property
    def dies(self) -> int:
        """Dies of the whole layout."""
        attending = max(self.dp, 1) * self.attn_tp * self.kvp
        return max(attending, self.ep * self.moe_tp, self.o_proj_tp, self.dense_tp, self.embed_tp, self.lm_head_tp,
                   self.cp)

    @property
    def replicas(self) -> float:
        """How many dies, or groups of them, have requests of their own; no whole number where groups do not fit."""
        return self.dies / max(self.attn_tp * self.kvp, self.cp)

    @property
    def sharing(self) -> str:
        """The kind of the groups whose dies have the same tokens in a graph: ``attn_tp`` or ``kvp``. Dies of ``cp`` are
        called with the same ones and have a part of them in the graph."""
        return "kvp" if self.kvp > 1 and self.cp == 1 else "attn_tp"

    def __str__(self) -> str:
        """The sizes that are not 1, as `parse` takes them."""
        sizes = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return ",".join(f"{name}={size}" for name, size in sizes if size != (name != "dp"))


def _known(name: str) -> None:
    names = [f.name for f in fields(Parallel)]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise ParallelError(f"no group is called {name!r}; did you mean {close[0]!r}? there are {', '.join(names)}")


_NAME = re.compile(r"cannopy\.(\w+)\.\d+\.\d+\.(\d+)")


@dataclass(frozen=True)
class Group:
    """Ranks ``first``, ``first + stride``, …, ``size`` of them, that share one thing."""

    kind: str
    first: int
    stride: int
    size: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the order in which collectives concatenate."""
        return tuple(range(self.first, self.first + self.stride * self.size, self.stride))

    @property
    def name(self) -> str:
        """The name in graphs and of the process group: the same in every process that has this layout."""
        return f"cannopy.{self.kind}.{self.first}.{self.stride}.{self.size}"


def kind_of(name: str) -> str | None:
    """The kind of the group called ``name`` (`Group.name`); None for another name."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def ranks_of(name: str) -> int | None:
    """Ranks in the group called ``name`` (`Group.name`); None for another name."""
    found = _NAME.fullmatch(name)
    return int(found[2]) if found else None


@dataclass(frozen=True)
class Layout:
    """``parallel`` as ``rank`` sees it. Raises `ParallelError` for a rank or sizes that do not fit."""

    parallel: Parallel
    rank: int

    def __post_init__(self) -> None:
        dies = self.parallel.dies
        if not 0 <= self.rank < dies:
            raise ParallelError(f"{self.parallel} has ranks 0 to {dies - 1}, found rank {self.rank}")
        for kind in KINDS:
            if dies % self.size(kind):
                raise ParallelError(f"{dies} dies cannot be divided into groups of {kind}={self.size(kind)}")

    def size(self, kind: str) -> int:
        """Ranks in each group of ``kind``."""
        found: int = getattr(self.parallel, "ep" if kind == ROUTED_EP else kind)
        return found

    def group(self, kind: str) -> Group:
        """The group of ``kind`` that ``rank`` is in."""
        size, dies = self.size(kind), self.parallel.dies
        if kind in ("ep", ROUTED_EP):
            stride = dies // size
            return Group(kind, self.rank % stride, stride, size)
        return Group(kind, self.rank // size * size, 1, size)

    def position(self, kind: str) -> int:
        """Which part of what the group of ``kind`` shares is this rank's, from 0."""
        return self.group(kind).ranks.index(self.rank)

    def all_groups(self) -> tuple[Group, ...]:
        """Every group of more than one rank in the order in which all ranks create them."""
        found = (Layout(self.parallel, rank).group(kind) for kind in KINDS if self.size(kind) > 1
                 for rank in range(self.parallel.dies))
        return tuple(dict.fromkeys(found))
