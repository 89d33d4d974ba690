"""Numbers that are complex between ``view_as_complex`` and ``view_as_real``  →  their real and imaginary parts.

    view_as_real(view_as_complex(x) · polar(1, a))  →  stack((x₀ cos a - x₁ sin a, x₀ sin a + x₁ cos a), -1)

No device kernel takes complex numbers; models write rotations with them. A complex parameter or buffer becomes two real
weights at load time. What is not known here stays, and is refused when the graph is legalised.
"""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.weight_plan import derived, why_not_weight

Parts = tuple[fx.Node, fx.Node]
MOVES = (
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.slice.Tensor, aten.select.int, aten.index.Tensor, aten.index_select.default, aten.clone.default,
)
"""Operations that move elements and compute nothing: the same on both parts."""
SUMS = (aten.add.Tensor, aten.sub.Tensor)
CONJUGATES = (aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)


def run(program: Program) -> int:
    """Replace every real view of complex numbers."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    value = cast(fx.Node, node.args[0])
    if not dtype(value).is_complex or not _known(program, value):
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten.stack.default, list(_parts(program, editor, value)), -1))
    return 1


STEP = Step("complexes", frozenset({aten.view_as_real.default}), _visit, far=frozenset({aten.view_as_real.default}))


def _known(program: Program, node: object) -> bool:
    """Whether `_parts` can take ``node`` apart; asked first, so that nothing is added to the graph in vain."""
    if not isinstance(node, fx.Node) or not dtype(node).is_complex:
        return not isinstance(node, complex)
    if node.op == "placeholder":
        return why_not_weight(program, node) is None
    if is_call(node, aten.view_as_complex.default, aten.polar.default, aten.complex.default):
        return not node.kwargs
    if is_call(node, *MOVES, *CONJUGATES):
        return _known(program, node.args[0])
    if is_call(node, aten.mul.Tensor, *SUMS):
        return not node.kwargs and all(_known(program, a) for a in node.args)
    return False


def _parts(program: Program, editor: Editor, node: Any) -> Parts:
    """The real and imaginary part of the complex ``node``, which is `_known`."""
    call = editor.call
    if node.op == "placeholder":
        real, imaginary = (derived(program, editor, f"{node.name}_{part}", [node], f"w[0].{part}.contiguous()")
                           for part in ("real", "imag"))
        return real, imaginary
    if is_call(node, aten.view_as_complex.default):
        # As rotations in real numbers read their pairs: every other one of the last dim.
        *rows, pairs = shape(node)
        flat = editor.reshape(cast(fx.Node, node.args[0]), [*rows, 2 * pairs])
        real, imaginary = (call(aten.slice.Tensor, flat, len(rows), i, 2 * pairs, 2) for i in (0, 1))
        return real, imaginary
    if is_call(node, aten.complex.default):
        return cast(Parts, node.args[:2])
    if is_call(node, aten.polar.default):
        length, angle = node.args
        return (call(aten.mul.Tensor, length, call(aten.cos.default, angle)),
                call(aten.mul.Tensor, length, call(aten.sin.default, angle)))
    if is_call(node, *MOVES):
        real, imaginary = (call(node.target, part, *node.args[1:], **node.kwargs)
                           for part in _parts(program, editor, node.args[0]))
        return real, imaginary
    if is_call(node, *CONJUGATES):
        real, imaginary = _parts(program, editor, node.args[0])
        return real, call(aten.neg.default, imaginary)
    return _combined(program, editor, node)


def _combined(program: Program, editor: Editor, node: fx.Node) -> Parts:
    """The parts of a product or a sum, of which one operand may be real."""
    call, (left, right) = editor.call, node.args
    whole = [isinstance(a, fx.Node) and dtype(a).is_complex for a in (left, right)]
    if all(whole):
        (a, b), (c, d) = (_parts(program, editor, x) for x in (left, right))
        if is_call(node, *SUMS):
            return call(node.target, a, c), call(node.target, b, d)
        return (call(aten.sub.Tensor, call(aten.mul.Tensor, a, c), call(aten.mul.Tensor, b, d)),
                call(aten.add.Tensor, call(aten.mul.Tensor, a, d), call(aten.mul.Tensor, b, c)))
    plain: Any = left if whole[1] else right
    a, b = _parts(program, editor, right if whole[1] else left)
    if is_call(node, aten.mul.Tensor):
        return call(aten.mul.Tensor, a, plain), call(aten.mul.Tensor, b, plain)
    turned = whole[1] and is_call(node, aten.sub.Tensor)
    first = call(node.target, plain, a) if whole[1] else call(node.target, a, plain)
    rest = call(aten.neg.default, b) if turned else b
    size = list(shape(node))
    return first, rest if list(shape(rest)) == size else editor.expand(rest, size)
