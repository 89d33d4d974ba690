"""Access paths: how a tensor is reached from ``self``, ``args`` or ``kwargs`` of a call.

Grammar: ``path = root step*``, ``root = "self" | "args" | "kwargs"``, ``step = "." name | "[" (int | string) "]"``.
``kwargs['cache'].layers[0].keys`` is a path; nothing in it is ever called or evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from .errors import BindingError

Root = Literal["self", "args", "kwargs"]
Getter = Callable[[object, tuple[Any, ...], Mapping[str, Any]], Any]
"""``getter(self, args, kwargs)`` finds one object of a call."""


@dataclass(frozen=True)
class Attr:
    """Step ``.name``."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True)
class Key:
    """Step ``[value]``: a sequence index or a mapping key."""

    value: int | str

    def __str__(self) -> str:
        return f"[{self.value!r}]"


Step = Attr | Key


@dataclass(frozen=True)
class Path:
    """A parsed access path; ``str(path)`` is its text."""

    root: Root
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.root + "".join(map(str, self.steps))

    def then(self, *steps: Step) -> Path:
        """This path with ``steps`` behind it."""
        return Path(self.root, (*self.steps, *steps))


def split_expression(text: str) -> tuple[str, tuple[Step, ...]]:
    """The name at the head of an access expression and the steps behind it.

    Raises:
        ValueError: the text has anything but attributes and constant integer or string subscripts.
    """
    try:
        node: ast.expr = ast.parse(text, mode="eval").body
    except SyntaxError as e:
        raise ValueError(f"{text!r} is not an access path") from e
    steps: list[Step] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.append(Attr(node.attr))
            node = node.value
        elif isinstance(node, ast.Subscript):
            steps.append(Key(_constant(node.slice, text)))
            node = node.value
        else:
            raise ValueError(f"{text!r} is not an access path: it has a {type(node).__name__}")
    return node.id, tuple(reversed(steps))


def _constant(node: ast.expr, text: str) -> int | str:
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = cast("ast.UnaryOp", node).operand if negative else node
    value = inner.value if isinstance(inner, ast.Constant) else None
    if type(value) is int:
        return -value if negative else value
    if type(value) is str and not negative:
        return value
    raise ValueError(f"{text!r} is not an access path: a subscript is neither an integer nor a string")


def parse(text: str) -> Path:
    """The path written as ``text``.

    Raises:
        ValueError: not a path (see the grammar of this module).
    """
    root, steps = split_expression(text)
    if root not in ("self", "args", "kwargs"):
        raise ValueError(f"{text!r} is not an access path: it starts at {root!r}, not at self, args or kwargs")
    return Path(cast("Root", root), steps)


def compile_path(path: str | Path) -> Getter:
    """A function that follows ``path``.

    The function raises `BindingError` with the path and the step that led nowhere.
    """
    parsed = parse(path) if isinstance(path, str) else path
    root, steps = parsed.root, parsed.steps
    plan = tuple((isinstance(s, Attr), s.name if isinstance(s, Attr) else s.value) for s in steps)

    def get(self: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value: Any = self if root == "self" else args if root == "args" else kwargs
        done = 0
        try:
            for is_attribute, name in plan:
                value = getattr(value, cast("str", name)) if is_attribute else value[name]
                done += 1
        except (AttributeError, LookupError, TypeError) as e:
            at = Path(root, steps[:done])
            raise BindingError(f"{parsed} cannot be reached: {at} ({type(value).__name__}) has no {steps[done]}") from e
        return value

    return get
