"""What a rule looks for: a tree of operations, read from the result towards its inputs.

    Op(aten.mul.Tensor, Any("gamma"), Cast(Any("x")), commutative=True)

A name binds the value it matched; the same name again must meet the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any as Anything


class Pattern:
    """A tree that a graph value may or may not match."""


@dataclass(frozen=True)
class Any(Pattern):
    """Any value; bound to ``name`` unless the name is empty.

    ``where`` may look at it: what it is instead of what is wanted, or None. ``wants``: what is wanted, in words.
    """

    name: str = ""
    where: Callable[[Anything], str | None] | None = None
    wants: str = ""


@dataclass(frozen=True)
class Number(Pattern):
    """A Python number bound to ``name``; ``equal`` asks for that value (relative tolerance 1e-6)."""

    name: str = ""
    equal: float | None = None


@dataclass(frozen=True)
class Literal(Pattern):
    """Exactly this Python value (a dim, a flag, a list of sizes)."""

    value: Anything


@dataclass(frozen=True)
class Op(Pattern):
    """A call of one of ``targets`` whose arguments match ``args`` in order.

    A target is an operator or the full name of one that may not be loaded (``"npu::npu_swiglu"``).
    Arguments that the pattern does not list must be absent from the call, unless ``rest`` is True;
    keyword arguments must match ``kwargs``. ``commutative`` tries both orders of the first two arguments.
    ``name`` binds the node.
    """

    target: Anything
    args: tuple[Pattern, ...] = ()
    kwargs: tuple[tuple[str, Pattern], ...] = ()
    name: str = ""
    commutative: bool = False
    rest: bool = False

    @property
    def targets(self) -> tuple[Anything, ...]:
        """The accepted operations."""
        return self.target if isinstance(self.target, tuple) else (self.target,)


def op(target: Anything, *args: Pattern, name: str = "", commutative: bool = False, rest: bool = False,
       **kwargs: Pattern) -> Op:
    """An `Op` written like a call."""
    return Op(target, args, tuple(kwargs.items()), name, commutative, rest)


@dataclass(frozen=True)
class Alt(Pattern):
    """The first of ``options`` that matches; ``name`` binds the number of the option taken."""

    options: tuple[Pattern, ...]
    name: str = ""


@dataclass(frozen=True)
class Through(Pattern):
    """``inner``, possibly behind any number of the unary operations ``over`` (reshapes, casts, expands).

    A cast of floating point numbers to integers or bools ends it: it changes values. With ``truth``, where only
    matters whether a value is 0, casts to bool count.
    """

    inner: Pattern
    over: tuple[Anything, ...] = field(default=())
    name: str = ""
    truth: bool = False


@dataclass(frozen=True)
class Items(Pattern):
    """A list of values, item by item (the operands of a concatenation)."""

    items: tuple[Pattern, ...]
