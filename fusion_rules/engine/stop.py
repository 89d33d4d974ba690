"""Where an attempt to match came to an end, and how that is said: expected, found, and what would make it match."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any as Anything

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Op, Pattern, Through
from cannopy.fx_passes.graph import aten, is_call, where

CASTS = ("aten._to_copy", "aten.to")
MADE = ("cannopy::", "npu::")
"""What only rules make: where it is wanted and not there, what there is instead is written out."""
VIEWS = (aten.permute.default, aten.reshape.default, aten.expand.default, aten.unsqueeze.default)
"""Operations that only arrange: what they arrange is what is of interest."""
DEPTH = 4
"""Levels of a formula that are written out."""


@dataclass(frozen=True)
class Stop:
    """The furthest point of an attempt.

    ``matched`` of ``total`` operations of the pattern were found (``total``: those of its shortest form, or what was
    found and one more). At ``node``, an operand of ``user``, one of ``wanted`` was expected and ``value`` was there.
    ``kind`` is one of "operation", "constant", "operand" (another value where the same was expected), "value",
    "argument", "order" and "missing". ``text`` says what was found where the value alone does not. ``nodes`` are those
    that matched, ``reach`` is their number with what was looked through. Nothing is put into
    words before it is asked for.
    """

    matched: int
    total: int
    kind: str
    node: fx.Node | None
    user: fx.Node | None
    wanted: tuple[Pattern | str, ...]
    value: Anything = None
    text: str = ""
    reach: int = 0
    nodes: tuple[fx.Node, ...] = ()

    @property
    def expected(self) -> str:
        """What the pattern has at this place."""
        return " or ".join(dict.fromkeys(wording(w) for w in self.wanted))

    @property
    def found(self) -> str:
        """What the graph has there, and what reads it where that is another line."""
        if not self.text and any(isinstance(w, Op) and str(w.target).startswith(MADE) for w in self.wanted):
            return f"{describe(self.value)} = {formula(self.value)}"
        return f"{self.text or describe(self.value)}{self._behind()}{self._reader()}"

    def _behind(self) -> str:
        """The operation behind a view that stands where another operation was expected."""
        value = self.value
        while not self.text and self.kind == "operation" and is_call(value, *VIEWS):
            value = value.args[0]
        return f" of {describe(value)} at {where(value)}" if value is not self.value else ""

    def _reader(self) -> str:
        value, user = self.value, self.user
        if self.kind not in ("operation", "value") or not isinstance(value, fx.Node) or user is None:
            return ""
        if user is value or not user.meta.get("source") or user.meta["source"] == value.meta.get("source"):
            return ""
        return f", read by {short(user.target)} ({where(user)})"

    @property
    def reason(self) -> str:
        """One sentence that is the same for corresponding places of different layers."""
        return f"matched {self.matched} of {self.total} operations, then expected {self.expected}, found {self.found}"

    @property
    def remedy(self) -> str:
        """What would make it match, as far as that can be told from the pattern."""
        return _remedy(self)

    def __str__(self) -> str:
        place = f" at {self.node.name} ({where(self.node)})" if self.node is not None else ""
        return f"{self.reason}{place}"


def size_of(p: Pattern) -> int:
    """Operations of a pattern's shortest form, a part that is used twice counted once."""
    return _size(p, set())


def _size(p: Pattern, seen: set[int]) -> int:
    if id(p) in seen:
        return 0
    match p:
        case Op():
            seen.add(id(p))
            return 1 + sum(_size(a, seen) for a in (*p.args, *(v for _, v in p.kwargs)))
        case Items():
            return sum(_size(i, seen) for i in p.items)
        case Through():
            return _size(p.inner, seen)
        case Alt():
            sized = []
            for option in p.options:
                mine = set(seen)
                sized.append((_size(option, mine), mine))
            best, kept = min(sized, key=lambda s: s[0])
            seen |= kept
            return best
    return 0


def wording(p: Pattern | str) -> str:
    """A pattern's first operation or value in words."""
    match p:
        case str():
            return p
        case Op():
            return " or ".join(dict.fromkeys(short(t) for t in p.targets))
        case Alt():
            return " or ".join(dict.fromkeys(wording(o) for o in p.options))
        case Through():
            return wording(p.inner)
        case Items():
            return f"a list of {len(p.items)}"
        case Literal():
            return repr(p.value)
        case Number():
            name = p.name or "the number"
            return f"{name} = {p.equal:g}" if p.equal is not None else f"a number ({name})"
        case Any():
            return p.wants or p.name or "a value"
    return type(p).__name__


def short(target: Anything) -> str:
    """``aten.mul`` for ``aten.mul.Tensor``; ``npu_swiglu`` for the name ``npu::npu_swiglu``."""
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}"
    if target is operator.getitem:
        return "an output of an operation with several"
    if isinstance(target, str):
        return target.replace("::", ".")
    return getattr(target, "__name__", str(target))


def describe(value: Anything) -> str:
    """A short description of a graph value for messages."""
    if isinstance(value, fx.Node):
        fake = value.meta.get("val")
        kind = f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)}" if isinstance(fake, Tensor) else ""
        if value.op == "call_function":
            what = short(value.target)
            if what in CASTS:
                kind = f"(a cast to {kind})"
        else:
            what = {"placeholder": "an input or weight", "get_attr": "a constant"}.get(value.op, value.op)
        return f"{what} {kind}".strip()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value)


def formula(value: Anything, depth: int = DEPTH, line: Anything = None) -> str:
    """A value's operations, nested, each with its line where that is another than the reader's; ``_`` for the rest."""
    if not isinstance(value, fx.Node):
        return repr(value)
    if value.op != "call_function" or depth == 0:
        return "_"
    source = value.meta.get("source")
    flat = [a for arg in value.args for a in (arg if isinstance(arg, list | tuple) else (arg,))]
    operands = ", ".join(formula(a, depth - 1, source) for a in flat if isinstance(a, fx.Node | float))
    name = short(value.target)
    place = f" at {source}" if source and line is not None and source != line else ""
    if name.partition(".")[0] in ("cannopy", "npu"):
        return f"{name}(_){place}"
    return f"{name.removeprefix('aten.')}({operands}){place}"


def _remedy(stop: Stop) -> str:
    first = stop.wanted[0] if stop.wanted else ""
    match stop.kind:
        case "constant" if isinstance(first, Number) and first.equal is None and isinstance(stop.value, fx.Node):
            return f"make {first.name or 'it'} a Python number; here it is a tensor that the graph computes or loads"
        case "constant":
            return f"use {stop.expected}"
        case "order":
            return f"swap the operands of {stop.text.removeprefix('the operands of ').split(' ')[0]}"
        case "operand":
            return f"let both places read {stop.expected}"
        case "missing":
            return f"follow it with {stop.expected}, or leave it as it is: without that it is another function"
        case "argument":
            return f"call it as {stop.expected}"
        case "value":
            return f"make it {first.wants}" if isinstance(first, Any) and first.wants else ""
    if isinstance(stop.value, fx.Node) and stop.value.op == "call_function" and short(stop.value.target) in CASTS:
        return f"drop this cast, or keep one dtype through the formula, so that {stop.expected} is read directly"
    if isinstance(first, Op | Alt | Through):
        return f"compute this step with {stop.expected}"
    return ""
