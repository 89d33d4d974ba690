"""Changes of one thing in the normalised graph of a serving DeepSeek-V3.2 attention: what fuses, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, shape
from cannopy.fx_passes.program import Program
from tests.rules.attention_mutants import attention, one

Phase = Literal["decode", "prefill"]


def source(node: fx.Node, argument: int = 0) -> fx.Node:
    found = node.args[argument]
    assert isinstance(found, fx.Node)
    return found


def before_operand(program: Program, node: fx.Node, argument: int, op: object, *args: object, **kwargs: object) -> None:
    """``op`` between ``node`` and its operand."""
    editor, old = Editor(program.gm), source(node, argument)
    with editor.before(node):
        new = editor.call(op, old, *args, **kwargs)
    node.args = (*node.args[:argument], new, *node.args[argument + 1 :])


def _scatter(program: Program) -> fx.Node:
    return one(program, aten.scatter.value)


def _topk(program: Program) -> fx.Node:
    return one(program, aten.topk.default)


def _masked(program: Program) -> fx.Node:
    return one(program, aten.masked_fill.Scalar)


def _both(program: Program) -> fx.Node:
    return one(program, aten.bitwise_and.Tensor, where=lambda n: _scatter(program) in n.all_input_nodes)


def _compare(program: Program) -> fx.Node:
    """key <= query: of three dims in a decode step."""
    return one(program, aten.le.Tensor)


def _gathered(program: Program, width: int) -> fx.Node:
    return one(program, aten.index.Tensor, where=lambda n: shape(n)[-1] == width)


def _written(program: Program, width: int) -> fx.Node:
    return one(program, aten.index_copy.default, where=lambda n: shape(n)[-1] == width)


def _scaled(program: Program) -> None:
    scaled = source(one(program, aten.relu.default))
    scaled.args = (scaled.args[0], scaled.args[1] * 3)  # type: ignore[operator]


def _other_softmax_scale(program: Program) -> None:
    node = attention(program)
    node.args = (*node.args[:4], node.args[4] * 1.7, *node.args[5:])  # type: ignore[operator]


def _factor_on_queries(program: Program) -> None:
    before_operand(program, attention(program), 0, aten.mul.Tensor, 0.75)


def _no_factor_on_weights(program: Program) -> None:
    weights = one(program, aten.mul.Tensor, where=lambda n: shape(n)[-1] == 4 and isinstance(n.args[1], float))
    weights.replace_all_uses_with(source(weights))


def _key_of_one_step_less(program: Program) -> None:
    _compare(program).target = aten.lt.Tensor


def _every_table_flipped(program: Program) -> None:
    for node in program.gm.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        _flip_table(program, node)


def _flip_table(program: Program, node: fx.Node) -> None:
    editor, table = Editor(program.gm), node.args[1][0]  # type: ignore[index]
    with editor.before(node):
        node.args = (node.args[0], [editor.call(aten.flip.default, table, [0])])


def _returned(find: Callable[[Program], fx.Node]) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        output = next(iter(reversed(program.gm.graph.nodes)))
        output.args = ((*output.args[0], find(program)),)  # type: ignore[misc]

    return change


def _window(program: Program) -> None:
    compare = _compare(program)
    editor, users = Editor(program.gm), list(compare.users)
    with editor.before(compare.next, like=compare):
        near = editor.call(aten.gt.Tensor, compare.args[0], editor.call(aten.sub.Tensor, compare.args[1], 8))
        both = editor.call(aten.bitwise_and.Tensor, compare, near)
    for user in users:
        user.replace_input_with(compare, both)


def _strict(program: Program, node: fx.Node, argument: int) -> None:
    editor = Editor(program.gm)
    with editor.before(node):
        strict = editor.call(aten.lt.Tensor, *_compare(program).args)
    node.args = tuple(strict if i == argument else a for i, a in enumerate(node.args))


def _indexer_sees_less(program: Program) -> None:
    _strict(program, source(_masked(program), 1), 0)


def _attention_sees_less(program: Program) -> None:
    both = _both(program)
    _strict(program, both, both.args.index(_compare(program)))


def _one_more_request(program: Program) -> None:
    """A prompt's first token belongs to the prompt before, for the attention only."""
    both = _both(program)
    old = source(both)
    editor = Editor(program.gm)
    ends = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and shape(n) == (3,))
    with editor.before(both):
        index = editor.call(aten.arange.default, 40)
        request = editor.call(aten.sum.dim_IntList, editor.call(
            aten.gt.Tensor, editor.reshape(index, [40, 1]), editor.reshape(ends, [1, 3])), [-1])
        same = editor.call(aten.eq.Tensor, editor.reshape(request, [40, 1]), editor.reshape(request, [1, 40]))
        order = editor.call(aten.ge.Tensor, editor.reshape(index, [40, 1]), editor.reshape(index, [1, 40]))
        new = editor.reshape(editor.call(aten.bitwise_and.Tensor, same, order), [1, 40, 40])
    both.replace_input_with(old, new)


def _padding(program: Program) -> None:
    """Keys may be hidden by data."""
    compare = _compare(program)
    editor, users = Editor(program.gm), list(compare.users)
    with editor.before(compare.next, like=compare):
        table = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and n.meta["val"].dtype is torch.int32)
        odd = editor.call(aten.ge.Scalar, editor.call(aten.sum.dim_IntList, table, [1], True), 0)
        both = editor.call(aten.bitwise_and.Tensor, compare, editor.reshape(odd, [2, 1, 1]))
    for user in users:
        user.replace_input_with(compare, both)


def _masked_twice(program: Program) -> None:
    masked = _masked(program)
    before_operand(program, masked, 0, aten.masked_fill.Scalar, masked.args[1], -1.0)


def _bool_added(program: Program) -> None:
    masked = _masked(program)
    masked.target, masked.args = aten.add.Tensor, (masked.args[0], _compare(program))


def _only_the_indexer_masks(program: Program) -> None:
    both = _both(program)
    both.replace_all_uses_with(_scatter(program))


def _other_table(program: Program) -> None:
    _flip_table(program, _gathered(program, 128))


def _keys_of_the_step_before(program: Program) -> None:
    """The indexer reads its cache as it was before the write."""
    written = _written(program, 128)
    cache = source(written)
    gathered = _gathered(program, 128)
    editor = Editor(program.gm)
    with editor.before(gathered):
        gathered.args = (editor.reshape(cache, list(shape(source(gathered)))), gathered.args[1])


def _shifted_picks(program: Program) -> None:
    before_operand(program, _scatter(program), 2, aten.bitwise_xor.Scalar, 1)


def _smallest(program: Program) -> None:
    topk = _topk(program)
    topk.args = (topk.args[0], topk.args[1], -1, False, True)


def _tanh_heads(program: Program) -> None:
    one(program, aten.relu.default).target = aten.tanh.default


def _negative(program: Program) -> None:
    scaled = source(one(program, aten.relu.default))
    scaled.args = (scaled.args[0], -scaled.args[1])  # type: ignore[operator]


def _values_from_keys(program: Program) -> None:
    values = source(source(attention(program), 2))
    values.args = (values.args[0], values.args[1], 0, 128, 1)


def _computed_kv_b(program: Program) -> None:
    weight = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and "kv_b_proj" in n.name)
    editor, linear = Editor(program.gm), next(iter(weight.users))
    with editor.before(linear):
        linear.replace_input_with(weight, editor.call(aten.mul.Tensor, weight, 1.5))


def _requests_as_heads(program: Program) -> None:
    """The mask of each request is that of a head."""
    node = attention(program)
    node.args = (*node.args[:3], source(source(node, 3)), *node.args[4:])


def _flat_mask(program: Program) -> None:
    both = _both(program)
    editor = Editor(program.gm)
    with editor.before(both):
        flat = [editor.reshape(source(both, i), [6, 48]) for i in (0, 1)]
    both.args = tuple(flat)
    editor.refresh(both)


def _without_a_batch(program: Program) -> None:
    node = attention(program)
    editor, users = Editor(program.gm), list(node.users)
    with editor.before(node):
        node.args = (*(editor.reshape(source(node, i), list(shape(source(node, i)))[1:]) for i in range(4)),
                     *node.args[4:])
    editor.refresh(node)
    with editor.before(node.next, like=node):
        whole = editor.reshape(node, [1, *shape(node)])
    for user in users:
        user.replace_input_with(node, whole)


def _keys_beside_others(program: Program) -> None:
    """The rows of the indexer's keys are a part of wider ones."""
    wide = source(one(program, aten.permute.default, where=lambda n: n.args[1] == [0, 2, 1]))
    key, editor = source(wide), Editor(program.gm)
    with editor.before(wide):
        twice = editor.call(aten.neg.default, editor.call(aten.cat.default, [key, key], 2))
        wide.args = (editor.call(aten.slice.Tensor, twice, 2, 128, 256, 1),)


def _one_head_weight(program: Program) -> None:
    """Every query has the head weights of the first of its request."""
    weights = one(program, aten.mul.Tensor, where=lambda n: shape(n)[-1] == 4 and isinstance(n.args[1], float))
    before_operand(program, source(weights), 0, aten.slice.Tensor, 1, 0, 1, 1)
    editor = Editor(program.gm)
    for node in (source(weights), weights):
        editor.refresh(node)
    for user in list(weights.users):
        user.args = (user.args[0], [2, 1, 1, 4])
        editor.refresh(user)


SAME: dict[str, tuple[Phase, Callable[[Program], None]]] = {
    "scale of the products": ("decode", _scaled),
    "scale of the softmax": ("prefill", _other_softmax_scale),
    "factor on the queries": ("decode", _factor_on_queries),
    "no factor on the weights": ("prefill", _no_factor_on_weights),
    "one key less": ("decode", _key_of_one_step_less),
    "blocks of the other request": ("decode", _every_table_flipped),
    "keys of the indexer are returned": ("decode", _returned(lambda p: _gathered(p, 128))),
    "expanded keys are returned": ("prefill", _returned(lambda p: source(attention(p), 1))),
    "scores are returned": ("decode", _returned(lambda p: source(_masked(p)))),
    "the cache takes other latents": ("prefill", lambda p: before_operand(p, _written(p, 512), 3, aten.tanh.default)),
    "the mask is returned": ("prefill", _returned(lambda p: source(_both(p)))),
}


REFUSED: dict[str, tuple[Phase, Callable[[Program], None], str]] = {
    "window": ("decode", _window, "the mask has 2 conditions"),
    "indexer sees less": ("decode", _indexer_sees_less, "the indexer and the attention use different masks"),
    "attention sees less": ("decode", _attention_sees_less, "the indexer and the attention use different masks"),
    "attention crosses prompts": ("prefill", _one_more_request, "the indexer and the attention use different masks"),
    "padding": ("decode", _padding, "the mask is not provably causal by cache position"),
    "masked twice": ("decode", _masked_twice, "the scores of the indexer are masked twice"),
    "bool added": ("decode", _bool_added, "what is added to the scores of the indexer is"),
    "only the indexer masks": ("decode", _only_the_indexer_masks, "expected aten.bitwise_and"),
    "table of another request": ("decode", _other_table, "the keys of the indexer stand in other blocks"),
    "cache before the write": ("decode", _keys_of_the_step_before, "are not both rows of caches"),
    "picks": ("decode", _shifted_picks, "found aten.bitwise_xor"),
    "smallest": ("prefill", _smallest, "expected True"),
    "tanh": ("decode", _tanh_heads, "found aten.tanh"),
    "negative": ("prefill", _negative, "only a positive factor leaves the top-k unchanged"),
    "values": ("decode", _values_from_keys, "keys and values do not come from one latent"),
    "weight": ("prefill", _computed_kv_b, "kv_b_proj"),
    "requests as heads": ("decode", _requests_as_heads, "the mask of the attention has shape [2, 3, 48]"),
    "flat mask": ("decode", _flat_mask, "the mask has shape [6, 48]"),
    "no batch": ("prefill", _without_a_batch, "the queries has shape [2, 40, 192]"),
    "part of wider rows": ("prefill", _keys_beside_others, "are not the rows of one value in order"),
    "weights of the first query": ("decode", _one_head_weight, "head_weight has shape"),
}
