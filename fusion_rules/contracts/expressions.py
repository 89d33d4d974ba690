"""The expression language of contract files: arithmetic and comparisons over a call's arguments.

Names are the call's arguments and the sizes that ``shape`` clauses have bound. A tensor is a `TensorFacts`, a tensor
list a tuple of them, everything else stays as it was passed. Functions: ``align(x, n)``, ``ceil_div(x, n)``,
``len(x)``, ``scalar_type(code)``. Nothing else is reachable: the text is interpreted, not evaluated by Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    code: Callable[[Mapping[str, Any]], Any] = field(compare=False, repr=False)
    reads: frozenset[str] = frozenset()

    @staticmethod
    def parse(text: str) -> Expression:
        """Parse `text`. ValueError for a syntax error or a construct outside the language."""
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"not an expression: {text!r}") from error
        _validate(tree, text)
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        return Expression(text, tree, _compiled(tree), frozenset(names - set(_FUNCTIONS)))

    def __call__(self, names: Mapping[str, Any]) -> Any:
        """The value with `names` bound. KeyError names what is not bound."""
        return self.code(names)

    def names(self) -> set[str]:
        """The names that the expression reads, functions not counted."""
        return set(self.reads)


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


_Code = Callable[[Mapping[str, Any]], Any]


def _compiled(node: ast.expr) -> _Code:
    """A function of the bound names that gives the value of ``node``; the tree is walked once, not at each call."""
    match node:
        case ast.Constant(value=value):
            return lambda names: value
        case ast.Name(id=name):
            return operator.itemgetter(name)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            parts = [_compiled(item) for item in items]
            return lambda names: [part(names) for part in parts]
        case ast.Attribute(value=inner, attr=attr):
            of, get = _compiled(inner), operator.attrgetter(attr)
            return lambda names: get(of(names))
        case ast.Subscript(value=inner, slice=ast.Slice(lower=lower, upper=upper, step=None)):
            of, start, end = _compiled(inner), *(None if x is None else _compiled(x) for x in (lower, upper))
            return lambda names: of(names)[start and start(names) : end and end(names)]
        case ast.Subscript(value=inner, slice=index):
            of, at = _compiled(inner), _compiled(index)
            return lambda names: of(names)[at(names)]
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            of = _compiled(inner)
            return lambda names: not of(names)
        case ast.UnaryOp(operand=inner):
            of = _compiled(inner)
            return lambda names: -of(names)
        case ast.BinOp(left=left, op=op, right=right):
            a, b, apply = _compiled(left), _compiled(right), _BINARY[type(op)]
            return lambda names: apply(a(names), b(names))
        case ast.BoolOp(op=op, values=values):
            parts, every = [_compiled(v) for v in values], isinstance(op, ast.And)
            return lambda names: (all if every else any)(part(names) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            return _comparison(_compiled(left), [_COMPARE[type(o)] for o in ops], [_compiled(r) for r in rights])
        case ast.Call(func=ast.Name(id=name), args=args):
            function, given = _FUNCTIONS[name], [_compiled(arg) for arg in args]
            return lambda names: function(*(arg(names) for arg in given))
    raise ValueError(f"unexpected {type(node).__name__} in a contract expression")


def _comparison(first: _Code, tests: Sequence[Callable[[Any, Any], bool]], rest: Sequence[_Code]) -> _Code:
    def compare(names: Mapping[str, Any]) -> bool:
        left = first(names)
        for test, code in zip(tests, rest, strict=True):
            right = code(names)
            if not test(left, right):
                return False
            left = right
        return True

    return compare
