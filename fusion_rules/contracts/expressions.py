"""The expression language of contract files: arithmetic and comparisons over a call's arguments.

Names are the call's arguments and the sizes that ``shape`` clauses have bound. A tensor is a `TensorFacts`, a tensor
list a tuple of them, everything else stays as it was passed. Functions: ``align(x, n)``, ``ceil_div(x, n)``,
``len(x)``, ``scalar_type(code)``. Nothing else is reachable: the text is interpreted, not evaluated by Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCALAR_TYPES = {5: "float16", 6: "float32", 15: "bfloat16", 1: "int8", 3: "int32"}
"""Codes of torch's ScalarType that the npu ops take as ``output_dtype``."""


@dataclass(frozen=True)
class TensorFacts:
    """What a contract can see of a tensor, real, fake or meta."""

    dtype: str
    shape: tuple[int, ...]
    contiguous: bool

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: Mapping[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: _plain(a) == _plain(b),
    ast.NotEq: lambda a, b: _plain(a) != _plain(b),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: _plain(a) in [_plain(x) for x in b],
    ast.NotIn: lambda a, b: _plain(a) not in [_plain(x) for x in b],
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "align": lambda x, n: -(-x // n) * n,
    "ceil_div": lambda x, n: -(-x // n),
    "len": len,
    "scalar_type": lambda code: SCALAR_TYPES.get(code, f"ScalarType {code}"),
}
_ATTRIBUTES = ("dtype", "rank", "shape", "contiguous")


def _plain(value: Any) -> Any:
    """Lists and tuples compare alike: a schema's int[] arrives as either."""
    return list(value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Expression:
    """A parsed expression; ``text`` is what the contract file says."""

    text: str
    tree: ast.expr

    @staticmethod
    def parse(text: str) -> Expression:
        """Parse `text`. ValueError for a syntax error or a construct outside the language."""
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"not an expression: {text!r}") from error
        _validate(tree, text)
        return Expression(text, tree)

    def __call__(self, names: Mapping[str, Any]) -> Any:
        """The value with `names` bound. KeyError names what is not bound."""
        return _evaluate(self.tree, names)

    def names(self) -> set[str]:
        """The names that the expression reads, functions not counted."""
        found = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name)}
        return found - set(_FUNCTIONS)


_NODES = (
    *(ast.BoolOp, ast.boolop, ast.Compare, ast.BinOp, ast.UnaryOp, ast.Not, ast.USub, ast.Name, ast.Load),
    *(ast.Constant, ast.List, ast.Tuple, ast.Subscript, ast.Slice, *_BINARY, *_COMPARE),
)


def _validate(tree: ast.expr, text: str) -> None:
    for node in ast.walk(tree):
        ok = isinstance(node, _NODES)
        ok = ok or (isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES)
        ok = ok or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
        if not ok:
            raise ValueError(f"{type(node).__name__} is not allowed in a contract expression: {text!r}")


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, names) for item in items]
        case ast.Attribute(value=inner, attr=attr):
            return getattr(_evaluate(inner, names), attr)
        case ast.Subscript(value=inner, slice=ast.Slice(lower=lower, upper=upper, step=None)):
            start = None if lower is None else _evaluate(lower, names)
            return _evaluate(inner, names)[start : None if upper is None else _evaluate(upper, names)]
        case ast.Subscript(value=inner, slice=index):
            return _evaluate(inner, names)[_evaluate(index, names)]
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _evaluate(inner, names)
        case ast.UnaryOp(operand=inner):
            return -_evaluate(inner, names)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_evaluate(left, names), _evaluate(right, names))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(part, names) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_evaluate(part, names) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            return _compare(_evaluate(left, names), ops, [_evaluate(r, names) for r in rights])
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(_evaluate(arg, names) for arg in args))
    raise ValueError(f"unexpected {type(node).__name__} in a contract expression")


def _compare(left: Any, ops: Sequence[ast.cmpop], rights: Sequence[Any]) -> bool:
    for op, right in zip(ops, rights, strict=True):
        if not _COMPARE[type(op)](left, right):
            return False
        left = right
    return True
