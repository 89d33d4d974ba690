"""x * x, square(x), x ** 2.0  →  pow(x, 2); 1 / sqrt(x), x ** -0.5  →  rsqrt(x); scalar overloads  →  Tensor overloads."""

from __future__ import annotations

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call
from cannopy.fx_passes.program import Program

SCALAR_OVERLOADS = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}


def run(program: Program) -> int:
    """Use one spelling per formula."""
    editor = Editor(program.gm)
    changes = 0
    for node in list(editor.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in SCALAR_OVERLOADS:
            node.target = SCALAR_OVERLOADS[node.target]
            changes += 1
        replacement = _respelled(editor, node)
        if replacement is not None:
            editor.replace(node, replacement)
            changes += 1
    editor.sweep()
    return changes


def _respelled(editor: Editor, node: fx.Node) -> fx.Node | None:
    squared = (
        is_call(node, aten.square.default)
        or (is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1])
        or (is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2 and isinstance(node.args[1], float))
    )
    if squared:
        with editor.before(node):
            return editor.call(aten.pow.Tensor_Scalar, node.args[0], 2)
    inverse_root = (
        is_call(node, aten.reciprocal.default) and is_call(node.args[0], aten.sqrt.default)
    ) or (is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5)
    if inverse_root:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        with editor.before(node):
            return editor.call(aten.rsqrt.default, inner.args[0] if is_call(inner, aten.sqrt.default) else inner)
    return None
