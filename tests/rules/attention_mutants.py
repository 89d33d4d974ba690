"""Changes of one thing in the normalised graph of a stock DeepSeek-V3.2 layer, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from cannopy.fusion_rules.rewrite import mla_prolog, sparse_flash_attention
from cannopy.fx_passes.graph import Editor, aten, is_call, shape
from cannopy.fx_passes.program import Program

SPARSE, PROLOG = sparse_flash_attention.RULE.name, mla_prolog.RULE.name


def one(program: Program, *ops: object, where: Callable[[fx.Node], bool] = lambda n: True) -> fx.Node:
    return next(n for n in program.gm.graph.nodes if is_call(n, *ops) and where(n))


def after(program: Program, node: fx.Node, op: object, *args: object) -> None:
    editor = Editor(program.gm)
    users = list(node.users)
    with editor.before(node.next, like=node):
        new = editor.call(op, node, *args)
    for user in users:
        user.replace_input_with(node, new)


def _relu_input(program: Program) -> fx.Node:
    scaled = one(program, aten.relu.default).args[0]
    assert isinstance(scaled, fx.Node)
    return scaled


def _negative_index_scale(program: Program) -> None:
    scaled = _relu_input(program)
    scaled.args = (scaled.args[0], -scaled.args[1])  # type: ignore[operator]


def _relu_to_tanh(program: Program) -> None:
    one(program, aten.relu.default).target = aten.tanh.default


def _smallest(program: Program) -> None:
    topk = one(program, aten.topk.default, where=lambda n: n.args[1] == 16)
    topk.args = (topk.args[0], topk.args[1], -1, False, True)


def _weak_mask(program: Program) -> None:
    fill = one(program, aten.masked_fill.Scalar, where=lambda n: n.args[2] == float("-inf"))
    fill.args = (fill.args[0], fill.args[1], -1.0)


def _other_index_mask(program: Program) -> None:
    fill = one(program, aten.masked_fill.Scalar)
    mask = fill.args[1].args[0]  # type: ignore[union-attr]
    assert isinstance(mask, fx.Node)
    source = mask.args[0]
    assert isinstance(source, fx.Node)
    editor = Editor(program.gm)
    with editor.before(mask):
        strict = editor.call(aten.lt.Tensor, *one(program, aten.le.Tensor).args)
        mask.replace_input_with(source, editor.call(aten.expand.default, strict, list(shape(source))))


def _window(program: Program) -> None:
    compare = one(program, aten.le.Tensor)
    editor = Editor(program.gm)
    users = list(compare.users)
    with editor.before(compare.next, like=compare):
        near = editor.call(aten.gt.Tensor, compare.args[0], editor.call(aten.sub.Tensor, compare.args[1], 8))
        both = editor.call(aten.bitwise_and.Tensor, compare, near)
    for user in users:
        user.replace_input_with(compare, both)


def _one_row_for_all_queries(program: Program) -> None:
    """Every query sees what the first one sees: the mask broadcasts over the queries."""
    editor = Editor(program.gm)
    whole = one(program, aten.expand.default, where=lambda n: n.meta["val"].dtype is torch.bool)
    users = list(whole.users)
    with editor.before(whole.next, like=whole):
        row = editor.call(aten.slice.Tensor, whole, 2, 0, 1, 1)
    for user in users:
        user.replace_input_with(whole, row)
    for node in program.gm.graph.nodes:
        if is_call(node, aten.reshape.default) and node.args[0] is row:
            node.args = (row, [shape(row)[0], *shape(row)[2:]])
        if is_call(node, aten.select.int, aten.bitwise_not.default, aten.reshape.default):
            editor.refresh(node)


def _scaled_kv_b(program: Program) -> None:
    weight = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and "kv_b_proj" in n.name)
    linear = next(iter(weight.users))
    editor = Editor(program.gm)
    with editor.before(linear):
        linear.replace_input_with(weight, editor.call(aten.mul.Tensor, weight, 1.5))


def attention(program: Program) -> fx.Node:
    return next(n for n in program.gm.graph.nodes if str(n.target).startswith("cannopy.attention"))


def _values_from_keys(program: Program) -> None:
    node = attention(program)
    values = node.args[2]
    assert isinstance(values, fx.Node)
    values.args = (values.args[0], 3, 0, 128, 1)


def _shifted_latent(program: Program) -> None:
    copy = one(program, aten.index_copy.default, where=lambda n: n.meta["val"].shape[-1] == 512)
    after(program, copy.args[3], aten.add.Tensor, 2.0)  # type: ignore[arg-type]


def _swapped_rope(program: Program) -> None:
    """cos and sin change places for the key only."""
    key = next(n for n in program.gm.graph.nodes if is_call(n, aten.sub.Tensor) and n.meta["val"].shape[1] == 1)
    first, second = key.args
    assert isinstance(first, fx.Node)
    assert isinstance(second, fx.Node)
    key.args = (second, first)


def _one_angle_for_all_tokens(program: Program) -> None:
    """sin of the first token serves every token of the key."""
    key = next(n for n in program.gm.graph.nodes if is_call(n, aten.sub.Tensor) and n.meta["val"].shape[1] == 1)
    sin = key.args[1].args[1]  # type: ignore[union-attr]
    assert isinstance(sin, fx.Node)
    editor = Editor(program.gm)
    users = list(sin.users)
    with editor.before(sin.next, like=sin):
        first = editor.call(aten.slice.Tensor, sin, 2, 0, 1, 1)
    for user in users:
        user.replace_input_with(sin, first)


def _other_rows(program: Program) -> None:
    """The rope cache is written one row further than the latent cache."""
    copy = one(program, aten.index_copy.default, where=lambda n: n.meta["val"].shape[-1] == 64)
    editor = Editor(program.gm)
    with editor.before(copy):
        copy.replace_input_with(copy.args[2], editor.call(aten.add.Tensor, copy.args[2], 1))  # type: ignore[arg-type]


def _other_input(program: Program) -> None:
    """The key/value chain reads twice the hidden states."""
    weight = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and "kv_a_proj" in n.name)
    linear = next(iter(weight.users))
    editor = Editor(program.gm)
    with editor.before(linear):
        linear.replace_input_with(linear.args[0], editor.call(aten.mul.Tensor, linear.args[0], 2.0))  # type: ignore[arg-type]


def _masked_twice(program: Program) -> None:
    """The indexer chooses among keys with a positive score only."""
    fill = one(program, aten.masked_fill.Scalar, where=lambda n: n.args[2] == float("-inf"))
    editor = Editor(program.gm)
    with editor.before(fill.next, like=fill):
        negative = editor.call(aten.bitwise_not.default, editor.call(aten.gt.Scalar, fill.args[0], 0.0))
        users = list(fill.users)
        twice = editor.call(aten.masked_fill.Scalar, fill, negative, float("-inf"))
    for user in users:
        user.replace_input_with(fill, twice)


def _one_weight_for_all_queries(program: Program) -> None:
    """The weights of the indexer's heads are those of the first query."""
    matmul = next(iter(one(program, aten.relu.default).users))
    weights = matmul.args[0]
    assert isinstance(weights, fx.Node)
    scaled = weights.args[0]
    assert isinstance(scaled, fx.Node)
    editor = Editor(program.gm)
    with editor.before(scaled):
        scaled.replace_input_with(scaled.args[0], editor.call(aten.slice.Tensor, scaled.args[0], 1, 0, 1, 1))  # type: ignore[arg-type]
    weights.args = (scaled, [shape(weights)[0], 1, *shape(weights)[2:]])
    for node in (scaled, weights, matmul):
        editor.refresh(node)


def swap_parts(*which: int) -> Callable[[Program], None]:
    """The parts of the queries (0), of the keys (1) or of both change places."""
    def swap(program: Program) -> None:
        for i in which:
            cat = attention(program).args[i]
            assert isinstance(cat, fx.Node)
            cat.args = ([*reversed(cat.args[0])], *cat.args[1:])  # type: ignore[arg-type]

    swap.__name__ = f"parts_of_{which}_swapped"
    return swap


def factor_on_queries(program: Program) -> None:
    node = attention(program)
    queries, scale = node.args[0], node.args[4]
    assert isinstance(queries, fx.Node)
    after(program, queries, aten.mul.Tensor, scale)
    node.args = (*node.args[:4], 1.0, *node.args[5:])


def _heads_rope_first(program: Program) -> None:
    """The rotated dims of a query head are its first ones."""
    for node in program.gm.graph.nodes:
        if is_call(node, aten.slice.Tensor) and shape(node.args[0])[-1] == 192:
            size = shape(node)[-1]
            node.args = (node.args[0], 3, *((64, 192) if size == 128 else (0, 64)), 1)


def _scaled_q_a(program: Program) -> None:
    weight = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and "q_a_proj" in n.name)
    linear = next(iter(weight.users))
    editor = Editor(program.gm)
    with editor.before(linear):
        linear.replace_input_with(weight, editor.call(aten.mul.Tensor, weight, 1.5))


def _fading_cache(program: Program) -> None:
    """The latent cache is halved before this step's write."""
    copy = one(program, aten.index_copy.default, where=lambda n: n.meta["val"].shape[-1] == 512)
    editor = Editor(program.gm)
    with editor.before(copy):
        copy.args = (editor.call(aten.mul.Tensor, copy.args[0], 0.5), *copy.args[1:])


def requests_as_heads(program: Program) -> None:
    """The key's rotated part is [1, B, S, 64] while it is rotated: the same function."""
    copy = one(program, aten.index_copy.default, where=lambda n: n.meta["val"].shape[-1] == 64)
    rotated = copy.args[3]
    assert isinstance(rotated, fx.Node)
    editor = Editor(program.gm)
    k_pe = one(program, aten.reshape.default, where=lambda n: shape(n) == shape(rotated) and any(
        is_call(u, aten.slice.Tensor) for u in n.users))
    k_pe.args = (k_pe.args[0], [1, shape(rotated)[0], *shape(rotated)[2:]])
    nodes = list(program.gm.graph.nodes)
    with editor.before(copy):
        copy.replace_input_with(rotated, editor.call(aten.reshape.default, rotated, list(shape(rotated))))
    for node in nodes[nodes.index(k_pe):nodes.index(copy)]:
        if node.op == "call_function":
            editor.refresh(node)


MUTANTS: list[tuple[Callable[[Program], None], str, str]] = [
    (_negative_index_scale, SPARSE, ": only a positive factor leaves the top-k unchanged"),
    (_relu_to_tanh, SPARSE, "relu"),
    (_smallest, SPARSE, "True"),
    (_weak_mask, SPARSE, "-inf"),
    (_other_index_mask, SPARSE, "the indexer and the attention use different masks"),
    (_window, SPARSE, "2 conditions"),
    (_one_row_for_all_queries, SPARSE, "not one entry for each of 3 queries"),
    (_scaled_kv_b, SPARSE, "kv_b_proj: mul"),
    (_values_from_keys, SPARSE, "nope"),
    (_masked_twice, SPARSE, "the scores of the indexer are masked twice: by aten.masked_fill"),
    (_one_weight_for_all_queries, SPARSE, "has shape [2, 1, 4], expected [2, 3, 4]"),
    (swap_parts(1), SPARSE, "the part of the queries that is rotated has shape"),
    (_heads_rope_first, PROLOG, "the nope part is (dim, start, end) = (3, 64, 192), expected (3, 0, 128)"),
    (requests_as_heads, PROLOG, "k_pe has shape [1, 2, 3, 64], expected [2, 1, 3, 64]"),
    (_scaled_q_a, PROLOG, "w_dq: mul"),
    (_fading_cache, PROLOG, "latent cache: mul_tensor is not an input of the graph"),
    (_shifted_latent, PROLOG, "rms_norm"),
    (_swapped_rope, PROLOG, "rotary"),
    (_one_angle_for_all_tokens, PROLOG, "sin has shape"),
    (_other_rows, PROLOG, "same index"),
    (_other_input, PROLOG, "different hidden states"),
]
