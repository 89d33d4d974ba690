"""Finds a loop over experts in a method's source, and compiles the method with something else in its place.

The loop is the kind that models write: a mask of who chose which expert, and for each expert the tokens that chose it
(``torch.where``, ``nonzero``), their expert's output times their weight, added at their rows (``index_add_``).
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from .errors import SourceLine

SELECTIONS = frozenset({"where", "nonzero"})
ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
REPLACEMENT = "_cannopy_routed_experts"
"""Method of the twin that stands for the loop."""

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


@dataclass(frozen=True)
class Loop:
    """Statements ``first`` to ``last`` of ``block``, part of ``tree``: ``result`` of ``hidden``, ``ids``, ``weights``.

    ``sizes`` are the other variables that they read, each with what it is: "one", "tokens" or "hidden".
    """

    function: FunctionType
    tree: ast.FunctionDef
    block: list[ast.stmt]
    first: int
    last: int
    hidden: str
    ids: str
    weights: str
    result: str
    sizes: tuple[tuple[str, str], ...]
    where: SourceLine


class NotUnderstoodError(Exception):
    """A loop over experts whose parts this module does not recognise; the message says which."""


def suspicious(function: FunctionType) -> bool:
    """Whether a function may hold such a loop, from the names that its code uses."""
    names = set(function.__code__.co_names)
    return bool(names & {"index_add_", "index_add"}) and bool(names & SELECTIONS)


def find(function: FunctionType) -> Loop | None:
    """The loop over experts in ``function``, None when there is none.

    Raises:
        NotUnderstoodError: there is one of another make, or no source.
    """
    try:
        text = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError) as e:
        raise NotUnderstoodError(f"no source of {function.__qualname__}") from e
    if not isinstance(tree, ast.FunctionDef):
        raise NotUnderstoodError(f"{function.__qualname__} is not a plain function")
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    for block in _blocks(tree):
        for last, statement in enumerate(block):
            if isinstance(statement, ast.For) and _selects([statement]) and _added(statement) is not None:
                return _loop(function, tree, block, last)
    return None


def _blocks(tree: ast.FunctionDef) -> Iterable[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _calls(nodes: Iterable[ast.AST]) -> Iterable[tuple[str, ast.Call]]:
    for root in nodes:
        for node in ast.walk(root):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                yield name, node


def _selects(nodes: Iterable[ast.AST]) -> bool:
    return any(n == "nonzero" or (n == "where" and len(c.args) == 1) for n, c in _calls(nodes))


def _added(loop: ast.For) -> tuple[str, str] | None:
    """(result, rows) of ``result.index_add_(0, rows, …)`` in the loop."""
    for name, call in _calls(loop.body):
        if name in ("index_add_", "index_add") and isinstance(call.func, ast.Attribute) and len(call.args) == 3:
            result, rows = call.func.value, call.args[1]
            if isinstance(result, ast.Name) and isinstance(rows, ast.Name):
                return result.id, rows.id
    return None


def _loop(function: FunctionType, tree: ast.FunctionDef, block: list[ast.stmt], last: int) -> Loop:
    statement = block[last]
    assert isinstance(statement, ast.For)
    added = _added(statement)
    assert added is not None
    result, rows = added
    hidden, weights = _indexed_by(statement, rows)
    after = {n.id for s in block[last + 1 :] for n in ast.walk(s) if isinstance(n, ast.Name)}
    first = last
    while first > 0 and _belongs(block[first - 1], result, after | {hidden, weights}):
        first -= 1
    ids = _chosen(block[first : last + 1])
    while first < last and (ids in _names(block[first : last + 1], ast.Store)
                            or not _useful(block[first], block[first + 1 : last + 1])):
        first += 1
    region = block[first : last + 1]
    if not _starts_at_zero(region, result):
        raise NotUnderstoodError(f"{result} does not start as zeros next to the loop")
    stored = _names(region, ast.Store)
    known = {hidden, weights, ids, "self"} | stored | set(function.__globals__) | set(dir(builtins))
    known |= set(function.__code__.co_freevars)
    unknown = sorted(_names(region, ast.Load) - known)
    sizes = tuple((name, _size(tree, name)) for name in unknown)
    if {hidden, weights, ids} & stored:
        raise NotUnderstoodError(f"the loop assigns {', '.join(sorted({hidden, weights, ids} & stored))}")
    code = inspect.getsourcelines(function)[0][statement.lineno - function.__code__.co_firstlineno].strip()
    where = SourceLine(function.__code__.co_filename, statement.lineno, code)
    return Loop(function, tree, block, first, last, hidden, ids, weights, result, sizes, where)


def _belongs(statement: ast.stmt, result: str, after: set[str]) -> bool:
    """Whether a statement before the loop serves the loop alone."""
    if isinstance(statement, ast.If):  # no token chose anything: the result is the zeros that it started as
        returns = statement.body[0] if len(statement.body) == 1 else None
        return isinstance(returns, ast.Return) and isinstance(returns.value, ast.Name) and returns.value.id == result \
            and any(name == "numel" for name, _ in _calls([statement.test])) and not statement.orelse
    if not isinstance(statement, ast.Assign | ast.With):
        return False
    stored = _names([statement], ast.Store)
    return bool(stored) and not (stored - {result}) & after


def _useful(statement: ast.stmt, rest: Sequence[ast.stmt]) -> bool:
    return isinstance(statement, ast.If) or bool(_names([statement], ast.Store) & _names(rest, ast.Load))


def _names(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> set[str]:
    return {
        n.id for root in nodes for n in ast.walk(root) if isinstance(n, ast.Name) and isinstance(n.ctx, context)
    }


def _starts_at_zero(region: list[ast.stmt], result: str) -> bool:
    starts = [s for s in region if isinstance(s, ast.Assign) and result in _names([s], ast.Store)]
    return len(starts) == 1 and any(name in ZEROS for name, _ in _calls([starts[0].value]))


def _indexed_by(loop: ast.For, rows: str) -> tuple[str, str]:
    """The tensors read as ``x[rows]`` (or ``x[None, rows]``) and ``w[rows, place]`` in the loop."""
    hidden: list[str] = []
    weights: list[str] = []
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
            continue
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        plain = [i for i in index if not (isinstance(i, ast.Constant) and i.value is None)]
        if plain and isinstance(plain[0], ast.Name) and plain[0].id == rows:
            (weights if len(plain) == 2 else hidden).append(node.value.id)
    if len(set(hidden)) != 1 or len(set(weights)) != 1:
        raise NotUnderstoodError("the loop does not read one tensor of tokens and one of weights by the chosen rows")
    return hidden[0], weights[0]


def _chosen(region: list[ast.stmt]) -> str:
    """The tensor of chosen experts: what is one-hot encoded, or compared with the expert's number."""
    for name, call in _calls(region):
        if name == "one_hot" and call.args and isinstance(call.args[0], ast.Name):
            return call.args[0].id
        if name == "where" and len(call.args) == 1 and isinstance(call.args[0], ast.Compare):
            left = call.args[0].left
            if isinstance(left, ast.Name) and isinstance(call.args[0].ops[0], ast.Eq):
                return left.id
    raise NotUnderstoodError("the chosen experts are neither one-hot encoded nor compared with an expert's number")


def _size(tree: ast.FunctionDef, name: str) -> str:
    """What an integer variable stands for: a part of the shape of the hidden states."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and all(isinstance(e, ast.Name) for e in target.elts):
            names = [e.id for e in target.elts if isinstance(e, ast.Name)]
            if name in names and len(names) in (2, 3):
                return ("one", "tokens", "hidden")[3 - len(names) :][names.index(name)]
    raise NotUnderstoodError(f"the loop reads {name}, which is no size of the hidden states")


def alone(loop: Loop) -> FunctionType:
    """The loop as a function of (self, hidden, ids, weights, *sizes)."""
    names = ["self", loop.hidden, loop.ids, loop.weights, *(name for name, _ in loop.sizes)]
    body = [*loop.block[loop.first : loop.last + 1], ast.Return(ast.Name(loop.result, ast.Load()))]
    tree = _function("loop", _arguments(names), body, loop.where.line)
    return _compiled(tree, loop.function)


def without(loop: Loop) -> FunctionType:
    """The method with ``result = self.REPLACEMENT(hidden, ids, weights)`` in place of the loop."""
    call = ast.parse(f"{loop.result} = self.{REPLACEMENT}({loop.hidden}, {loop.ids}, {loop.weights})").body[0]
    for node in ast.walk(call):
        node.lineno = node.end_lineno = loop.where.line  # type: ignore[attr-defined]
    kept = loop.block[:]
    loop.block[loop.first : loop.last + 1] = [call]
    try:
        new = _compiled(loop.tree, loop.function)
    finally:
        loop.block[:] = kept
    new.__defaults__, new.__kwdefaults__ = loop.function.__defaults__, loop.function.__kwdefaults__
    return new


def _arguments(names: Sequence[str]) -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[])


def _compiled(tree: ast.FunctionDef, like: FunctionType) -> FunctionType:
    """``tree`` as a function with the globals, closure and file of ``like``."""
    tree = _plain(tree)
    names = like.__code__.co_freevars
    body: list[ast.stmt] = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    factory = _function("factory", _arguments(names), body, tree.lineno)
    module = _located(ast.Module([factory], []), tree.lineno)
    flags = like.__code__.co_flags & _FUTURE
    scope: dict[str, FunctionType] = {}
    exec(compile(module, like.__code__.co_filename, "exec", flags, dont_inherit=True), like.__globals__, scope)
    made = scope["factory"](*names)
    assert isinstance(made, FunctionType)
    cells = dict(zip(names, like.__closure__ or (), strict=True))
    closure = tuple(cells[n] for n in made.__code__.co_freevars)
    return FunctionType(made.__code__, like.__globals__, like.__name__, None, closure)


def _located(module: ast.Module, line: int) -> ast.Module:
    """Nodes without a place in the source are at ``line``."""
    for node in ast.walk(module):
        if "lineno" not in node._attributes or getattr(node, "end_lineno", None) is not None:
            continue
        place = {"lineno": line, "end_lineno": line, "col_offset": 0, "end_col_offset": 0}
        for name, value in place.items():
            setattr(node, name, value)
    return module


def _plain(tree: ast.FunctionDef) -> ast.FunctionDef:
    """A function without decorators, annotations and values of defaults, which the original keeps."""
    given = tree.args
    arguments = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in given.posonlyargs],
        args=[ast.arg(a.arg) for a in given.args],
        vararg=ast.arg(given.vararg.arg) if given.vararg else None,
        kwonlyargs=[ast.arg(a.arg) for a in given.kwonlyargs],
        kw_defaults=[None] * len(given.kwonlyargs),
        kwarg=ast.arg(given.kwarg.arg) if given.kwarg else None,
        defaults=[],
    )
    return _function(tree.name, arguments, tree.body, tree.lineno)


def _function(name: str, arguments: ast.arguments, body: list[ast.stmt], line: int) -> ast.FunctionDef:
    fields: dict[str, Any] = {"name": name, "args": arguments, "body": body, "decorator_list": []}
    if "type_params" in ast.FunctionDef._fields:  # from Python 3.12 on
        fields["type_params"] = []
    fields |= {"lineno": line, "end_lineno": line, "col_offset": 0, "end_col_offset": 0}
    return ast.FunctionDef(**fields)
