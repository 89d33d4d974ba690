"""x.to(same dtype), clone, alias, detach, expand to the same shape, x * 1, x + 0, x / 1, cat([x]), dropout that drops
nothing  →  x; copy(x, y)  →  y in x's dtype and shape."""

from __future__ import annotations

import math
import operator
from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes import alias
from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program

COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.to.dtype)
TIMES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
PLUS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor)


def run(program: Program) -> int:
    """Remove operations that return their input's value in the same shape and dtype."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    source = _passed_through(node)
    if source is not None:
        editor.replace(node, source)
        _erase(editor, node)
        return 1
    if is_call(node, aten.expand.default):
        return _explicit_expand(node)
    if is_call(node, aten._to_copy.default):
        return _plain_cast(editor, node)
    return _functional_copy(editor, node) if is_call(node, aten.copy.default) else 0


STEP = Step(
    "noops",
    frozenset({*COPIES, *CASTS, *TIMES, *PLUS, aten.expand.default, aten.contiguous.default, aten.cat.default,
               aten.dropout.default, aten.copy.default, operator.getitem}),
    _visit,
    far=frozenset({*COPIES, *CASTS, aten.contiguous.default}),
)
"""Whether a copy saves an input's old value depends on who reads it, however far behind views."""


def _erase(editor: Editor, node: fx.Node) -> None:
    """Erase ``node`` and the dropout it came from: dead-code removal keeps whatever may draw random numbers."""
    origin = node.args[0]
    editor.graph.erase_node(node)
    if is_call(origin, aten.native_dropout.default) and not cast(fx.Node, origin).users:
        editor.graph.erase_node(cast(fx.Node, origin))


def _passed_through(node: fx.Node) -> fx.Node | None:
    x = _source(node)
    if x is None or not isinstance(x.meta.get("val"), torch.Tensor) or not isinstance(node.meta["val"], torch.Tensor):
        return None
    if shape(node) != shape(x) or dtype(node) != dtype(x) or not _same_value(node, x):
        return None
    return None if _saves_old_value(node, x) else x


def _source(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args:
        return None
    first: Any = node.args[0]
    if is_call(node, aten.cat.default) and len(first) == 1:
        first = first[0]
    if is_call(node, operator.getitem) and node.args[1] == 0 and is_call(first, aten.native_dropout.default):
        first = first.args[0]
    return first if isinstance(first, fx.Node) else None


def _same_value(node: fx.Node, x: fx.Node) -> bool:
    if is_call(node, *COPIES, *CASTS, aten.expand.default, aten.contiguous.default, aten.cat.default):
        return True
    if is_call(node, aten.dropout.default):
        return _drops_nothing(node.args[1:])
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.native_dropout.default):
        return _drops_nothing(node.args[0].args[1:])  # type: ignore[union-attr]
    if is_call(node, *TIMES):
        return not node.kwargs and _is_number(node.args[1], 1)
    if is_call(node, *PLUS):
        return _adds_nothing(node, x)
    return False


def _adds_nothing(node: fx.Node, x: fx.Node) -> bool:
    """x + 0.0 turns -0.0 into 0.0, x + -0.0 and x - 0.0 keep it; integers have one zero."""
    if not _is_number(node.args[1], 0):
        return False
    if not dtype(x).is_floating_point:
        return True
    minus = is_call(node, aten.sub.Tensor)
    return not node.kwargs and math.copysign(1, cast(float, node.args[1])) == (1 if minus else -1)


def _drops_nothing(options: Any) -> bool:
    probability, train = options
    return probability == 0 or train is False


def _is_number(value: Any, wanted: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == wanted


def _saves_old_value(node: fx.Node, x: fx.Node) -> bool:
    """Whether ``node`` keeps what an input held before its trailing ``copy_``, for a result or for another input."""
    if not is_call(node, *COPIES, *CASTS, aten.contiguous.default):
        return False
    owner = alias.base(x)
    written = owner.op == "placeholder" and any(
        is_call(user, aten.copy_.default) and user.args[0] is owner for user in owner.users
    )
    return written and _outlives_graph(node)


def _outlives_graph(node: fx.Node) -> bool:
    return any(
        user.op == "output" or is_call(user, aten.copy_.default) or (alias.is_view(user) and _outlives_graph(user))
        for user in node.users
    )


def _explicit_expand(node: fx.Node) -> int:
    wanted = list(shape(node))
    if list(node.args[1]) == wanted:  # type: ignore[arg-type]
        return 0
    node.args = (node.args[0], wanted)
    return 1


def _plain_cast(editor: Editor, node: fx.Node) -> int:
    """`_to_copy` that changes only the dtype carries only the dtype."""
    if set(node.kwargs) == {"dtype"}:
        return 0
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if node.meta["val"].device != x.meta["val"].device:
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten._to_copy.default, x, dtype=dtype(node)))
    return 1


def _functional_copy(editor: Editor, node: fx.Node) -> int:
    value = node.args[1]
    assert isinstance(value, fx.Node)
    with editor.before(node):
        if dtype(value) != dtype(node):
            value = editor.call(aten._to_copy.default, value, dtype=dtype(node))
        editor.replace(node, editor.expand(value, shape(node)))
    return 1
