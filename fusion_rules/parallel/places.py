"""Where cuts belong in a fused graph: output projections, dense MLPs, shared experts, what leads to an output."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call, operator_named, shape
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.weight_plan import why_not_weight

ATTENTION = (
    "npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2",
    "air::npu_fused_infer_attention_score_v2", "npu::npu_sparse_flash_attention", "cannopy::attention",
    "aten::scaled_dot_product_attention",
)
"""Operators that attend; their result is made of heads."""

COMBINES = ("npu::npu_moe_finalize_routing", "npu::npu_moe_distribute_combine_v2", "npu::npu_moe_distribute_combine")
ROUTES = ("npu::npu_moe_init_routing_v2", "npu::npu_moe_distribute_dispatch_v2", "npu::npu_moe_distribute_dispatch")
SWIGLU = "npu::npu_swiglu"
_ACTIVATIONS = ("aten::silu", "aten::gelu", "aten::relu", "aten::mish", "aten::hardswish")

_RENAMES = (aten.reshape.default, aten.view.default, aten.clone.default, aten._to_copy.default)
_MOVES = (*_RENAMES, aten.permute.default, aten.transpose.int, aten.slice.Tensor, operator.getitem)
_UNTAGGED = (aten.hardswish.default, aten.hardtanh.default)
"""Elementwise operators that carry no tag of torch."""
_GATHERS = (torch.ops._c10d_functional.all_gather_into_tensor.default, torch.ops._c10d_functional.wait_tensor.default,
            aten.index_select.default)
"""How rows that were spread over dies come together in their order."""
_PRODUCTS = ("aten::bmm", "aten::matmul", "npu::npu_transpose_batchmatmul")


def called(node: object, names: Iterable[str]) -> bool:
    """Whether ``node`` calls one of the operators with these full names."""
    return is_call(node, *(found for name in names if (found := operator_named(name)) is not None))


def pointwise(node: object) -> bool:
    """Whether each element of the result comes from the elements at the same place of the (broadcast) operands."""
    target = node.target if isinstance(node, fx.Node) and node.op == "call_function" else None
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in _UNTAGGED)


def linears(program: Program, editor: Editor) -> list[fx.Node]:
    """The linears whose matrix is constant over the steps, in graph order."""
    found = editor.calls([aten.linear.default])
    return [n for n in found if len(shape(cast(fx.Node, n.args[1]))) == 2 and not why_not_weight(program, n.args[1])]


def operands(linear: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Input, matrix and bias of a linear."""
    x, weight = cast("tuple[fx.Node, fx.Node]", linear.args[:2])
    return x, weight, cast("fx.Node | None", linear.args[2] if len(linear.args) > 2 else None)


def behind_renames(node: fx.Node) -> fx.Node:
    """What ``node`` is once reshapes, copies and casts are looked through."""
    while is_call(node, *_RENAMES):
        node = cast(fx.Node, node.args[0])
    return node


def attentions_behind(node: fx.Node) -> list[fx.Node]:
    """The attention (or softmax) that the columns of ``node`` come from with no other projection in between."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if called(node, ATTENTION) or is_call(node, aten._softmax.default):
            found[node] = None
        elif called(node, _PRODUCTS) or is_call(node, *_MOVES):
            todo.append(cast(fx.Node, node.args[0]))
        elif pointwise(node) or is_call(node, aten.cat.default):
            todo += node.all_input_nodes
    return list(found)


def projections_of_attention(program: Program, editor: Editor) -> list[fx.Node]:
    """The linears that read what attention gives."""
    return [n for n in linears(program, editor) if attentions_behind(operands(n)[0])]


def without_projection(editor: Editor, projections: Iterable[fx.Node]) -> list[fx.Node]:
    """Attention that none of ``projections`` reads."""
    read = {found for n in projections for found in attentions_behind(operands(n)[0])}
    return [n for n in editor.calls(ATTENTION) if n not in read]


@dataclass(frozen=True)
class Mlps:
    """Last linears of MLPs: ``dense`` ones and ``shared`` experts of mixtures. ``lost`` are activations of a linear
    that belong to neither."""

    dense: Sequence[fx.Node]
    shared: Sequence[fx.Node]
    lost: Sequence[fx.Node]


def mlps(program: Program, editor: Editor) -> Mlps:
    """The MLPs of a graph.

    The input of their last linear is an activation of other linears: only elementwise operations, npu_swiglu and
    reshapes stand between.
    """
    known: set[fx.Node] = set()
    found: tuple[list[fx.Node], list[fx.Node]] = [], []
    for node in linears(program, editor):
        between: set[fx.Node] = set()
        if _is_mlp(program, node, between):
            found[_is_shared_expert(program, node)].append(node)
            known |= between
    active = [n for n in editor.calls([SWIGLU, *_ACTIVATIONS]) if n not in known]
    lost = [n for n in active if is_call(behind_renames(cast(fx.Node, n.args[0])), aten.linear.default)]
    return Mlps(*found, lost)


def _is_mlp(program: Program, down: fx.Node, between: set[fx.Node]) -> bool:
    first, active = _first_linears(program, down, between)
    return active and bool(first) and all(
        is_call(n, aten.linear.default) and not why_not_weight(program, n.args[1]) for n in first)


def _first_linears(program: Program, down: fx.Node, seen: set[fx.Node]) -> tuple[list[fx.Node], bool]:
    """What the input of ``down`` is computed from besides weights, and whether more than renaming stands between;
    ``seen`` gets all that stands there."""
    found: dict[fx.Node, None] = {}
    active, todo = False, [cast(fx.Node, down.args[0])]
    while todo:
        node = todo.pop()
        if node in seen or (node.op == "placeholder" and not why_not_weight(program, node)):
            continue
        seen.add(node)
        renames = is_call(node, *_RENAMES, aten.slice.Tensor)
        if renames or pointwise(node) or called(node, [SWIGLU]):
            active |= not renames
            todo += node.all_input_nodes
        else:
            found[node] = None
    return list(found), active


def _is_shared_expert(program: Program, down: fx.Node) -> bool:
    """Whether the MLP reads what the routed experts read and its result is joined with theirs, nothing added before."""
    first, _ = _first_linears(program, down, set())
    read = {behind_renames(cast(fx.Node, n.args[0])) for n in first}
    todo: list[fx.Node] = [down]
    while todo:
        node = todo.pop()
        for user in node.users:
            joined = _joined(user, node)
            if joined is not None and behind_renames(_routed(joined)) in read:
                return True
            if is_call(user, *_RENAMES, aten.mul.Tensor):
                todo.append(user)
    return False


def _joined(user: fx.Node, node: fx.Node) -> fx.Node | None:
    """The end of the mixture that ``user`` adds ``node`` to."""
    if called(user, COMBINES):
        return user
    if is_call(user, aten.add.Tensor):
        others = [n for n in user.all_input_nodes if n is not node]
        return next((found for n in others if called(found := _before_scale(n), COMBINES)), None)
    return None


def _before_scale(node: fx.Node) -> fx.Node:
    while is_call(node, *_RENAMES, aten.mul.Tensor, operator.getitem):
        node = cast(fx.Node, node.args[0])
    return node


def _routed(combine: fx.Node) -> fx.Node:
    """The tokens that the mixture which ends in ``combine`` has read; ``combine`` where that is not found."""
    seen: set[fx.Node] = set()
    todo: list[fx.Node] = [cast(fx.Node, combine.args[0])]
    while todo:
        node = todo.pop()
        if called(node, ROUTES):
            return cast(fx.Node, node.args[0])
        if node not in seen and node.op == "call_function":
            seen.add(node)
            todo += node.all_input_nodes
    return combine


def heads_of_vocabulary(program: Program, editor: Editor) -> list[fx.Node]:
    """The linears whose columns leave the graph as they are: only elementwise operations on them alone, reshapes,
    choices of rows and gathers of them stand between."""
    return [n for n in linears(program, editor) if _leaves(n)]


def _leaves(node: fx.Node) -> bool:
    for user in node.users:
        alone = pointwise(user) and [n for n in user.all_input_nodes if n.op != "placeholder"] == [node]
        if user.op == "output" or ((alone or is_call(user, *_MOVES, *_GATHERS)) and _leaves(user)):
            return True
    return False
