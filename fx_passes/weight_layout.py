"""linear(x, W [N, K], bias)  →  mm(x, Wᵀ [K, N]) with Wᵀ built once at load time; a cast of a weight is done then, too.

torchair lowers a linear to Transpose(W) and MatMul in every step. The stored form is the one that cube kernels read:
K-major, and FRACTAL_NZ on a device for 16-bit weights (fp32 weights stay ND).
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, shape
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.weight_plan import derived, why_not_weight

NZ_DTYPES = (torch.bfloat16, torch.float16)


def run(program: Program) -> int:
    """Rewrite every cast of a weight and every linear whose weight is constant over the steps; the number rewritten."""
    editor = Editor(program.gm)
    changes = sum(_cast(program, editor, node) for node in editor.calls([aten._to_copy.default]))
    for node in editor.calls([aten.linear.default]):
        if why_not_weight(program, node.args[1]) is None:
            changes += _linear(program, editor, node)
    editor.sweep()
    drop_unread(program, editor)
    return changes


def _cast(program: Program, editor: Editor, node: fx.Node) -> int:
    weight = cast(fx.Node, node.args[0])
    if set(node.kwargs) != {"dtype"} or weight.op != "placeholder" or why_not_weight(program, weight) is not None:
        return 0
    kind = str(node.kwargs["dtype"])
    name = f"{weight.name}_{kind.removeprefix('torch.')}"
    entry = next((e for e in program.weights if e.name == weight.name), None)
    with editor.before(node):
        sources = [weight] if entry is None else [editor.input(s) for s in entry.sources]
        recipe = f"w[0].to({kind})" if entry is None else f"({entry.recipe}).to({kind})"
        editor.replace(node, derived(program, editor, name, sources, recipe))
    return 1


def _linear(program: Program, editor: Editor, node: fx.Node) -> int:
    x, weight = cast(fx.Node, node.args[0]), cast(fx.Node, node.args[1])
    if len(shape(weight)) != 2 or not shape(x)[:-1]:
        return 0
    bias = node.args[2] if len(node.args) > 2 else None
    rows = math.prod(shape(node)[:-1])
    with editor.before(node):
        flat = editor.reshape(x, [rows, shape(x)[-1]])
        transposed = _transposed(program, editor, weight)
        product = (
            editor.call(aten.mm.default, flat, transposed)
            if bias is None
            else editor.call(aten.addmm.default, bias, flat, transposed)
        )
        editor.replace(node, editor.reshape(product, shape(node)))
    return 1


def _transposed(program: Program, editor: Editor, weight: fx.Node) -> fx.Node:
    """The placeholder of ``weight`` transposed; a derived weight is transposed in its own recipe."""
    nz = dtype(weight) in NZ_DTYPES
    entry = next((e for e in program.weights if e.name == weight.name), None)
    if entry is None:
        return derived(program, editor, f"{weight.name}_t", [weight], "w[0].t()", nz=nz)
    sources = [editor.input(s) for s in entry.sources]
    return derived(program, editor, f"{weight.name}_t", sources, f"({entry.recipe}).t()", nz=nz)


def drop_unread(program: Program, editor: Editor) -> None:
    """Forget derived weights that no node and no other recipe reads any more."""
    sources = {s for e in program.weights for s in e.sources}
    for node in [n for n in editor.graph.nodes if n.op == "placeholder" and not n.users]:
        if node.name not in sources and any(e.name == node.name for e in program.weights):
            program.weights[:] = [e for e in program.weights if e.name != node.name]
            editor.graph.erase_node(node)
