"""Indexer and sparse attention over packed tokens, on one layer of our DeepSeek-V3.2 and on mutants of its graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import fx, nn

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.frontend.capture import capture
from cannopy.frontend.state import prepare_state
from cannopy.fusion_rules import catalog, dialect
from cannopy.fusion_rules.rewrite import mla_prolog_dense, mla_prolog_rows, sparse_flash_attention_packed
from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import Editor, aten, is_call, shape
from cannopy.fx_passes.program import Program
from cannopy.models.lively import lively_
from cannopy.models.mla import Indexer, LatentAttention, LatentPages, LatentSizes
from cannopy.models.paging import Decode, Prefill
from cannopy.models.parts import Rotary
from cannopy.parity.measure import compare_picks
from cannopy.parity.picks import Pick, Recorder, Replay
from tests.rules.attention_mutants import attention, one
from tests.rules.support import Case, fresh, fuse, run, targets

Tensor = torch.Tensor
Phase = Literal["decode", "prefill"]
SPARSE, PROLOG = "sparse_flash_attention", "mla_prolog"
RULES = (*catalog.LIFT, sparse_flash_attention_packed.RULE, mla_prolog_dense.RULE, mla_prolog_rows.RULE)
BLOCK, BLOCKS, TOPK = 16, 3, 16
NOISE = 0.01
"""bf16 roundings at other places change a layer by less."""
DEVICE = ["npu.npu_mla_prolog_v3_functional", "npu.npu_lightning_indexer", "npu.npu_sparse_flash_attention",
          "npu.npu_transpose_batchmatmul"]


class Layer(nn.Module):
    """One latent attention of the zoo with its indexer and angles."""

    def __init__(self) -> None:
        super().__init__()
        sizes = LatentSizes(1024, 2, 1536, 512, 128, 64, 128, indexer=Indexer(4, 128, TOPK))
        self.attention = LatentAttention(sizes, {"theta": 1e4})
        self.rotary = Rotary(sizes.rope, {"theta": 1e4})

    def decode(self, x: Tensor, lengths: Tensor, table: Tensor, slots: Tensor, pages: LatentPages) -> Tensor:
        step = Decode(x.shape[0], lengths, table, slots, BLOCK)
        y: Tensor = self.attention(x, self.rotary(step.positions, x.dtype), step, pages)
        return y

    def prefill(self, x: Tensor, ends: Tensor, slots: Tensor, pages: LatentPages) -> Tensor:
        step = Prefill(x.shape[0], ends, slots)
        y: Tensor = self.attention(x, self.rotary(step.positions, x.dtype), step, pages)
        return y


def _slots(table: Tensor, lengths: list[int], queries: int) -> Tensor:
    positions = [torch.arange(n - queries, n) for n in lengths]
    return torch.cat([table[b, p // BLOCK].long() * BLOCK + p % BLOCK for b, p in enumerate(positions)])


@functools.cache
def layer(phase: Phase, queries: int = 3) -> Case:
    """A decode step of two requests, or three prompts with padding behind them; do not change it."""
    activate()
    dialect.register_all()
    module = lively_(Layer(), 0).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)

    def r(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    pages = LatentPages(*(r(2 * BLOCKS + 1, BLOCK, 1, d) for d in (512, 64, 128)))
    table = torch.tensor([[5, 2, 6], [1, 3, 4]], dtype=torch.int32)
    if phase == "decode":
        lengths = [40, queries]
        args = (r(2 * queries, 1024), torch.tensor(lengths), table, _slots(table, lengths, queries), pages)
    else:
        args = (r(40, 1024), torch.tensor([21, 22, 36]), torch.arange(40) + BLOCK, pages)  # type: ignore[assignment]
    prepare_state(module, args, {})
    program = capture(module, phase, args, {})
    normalise.run(program)
    return Case(module, args, {}, program)


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    with target.using("atlas-a3"):
        yield


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))


def _agrees(c: Case, before: Program, after: Program) -> None:
    """Results and rows at the slots alike with the same fair picks, all other rows as they were."""
    with Recorder() as recorder:
        found, new_state = run(c, after)
    with Replay([_of_row(c, pick) for pick in recorder.picks]) as replay:
        expected, state = run(c, before)
    replay.finish()
    for parity in compare_picks("", replay.choices, replay.choices):
        assert (parity.invalid, parity.worst <= 1) == (0, True)
    assert all(_distance(a, b) < NOISE for a, b in zip(expected, found, strict=True))
    assert len(state) == 3
    slots = c.args[-2]
    for path, tensor in state.items():
        rows, new_rows = (t.flatten(0, 1) for t in (tensor, new_state[path]))
        assert _distance(rows[slots], new_rows[slots]) < NOISE
        others = torch.ones(len(rows), dtype=torch.bool)
        others[slots] = False
        assert torch.equal(rows[others], new_rows[others]), "rows of others are untouched"


def _of_row(c: Case, pick: Pick) -> Pick:
    """The kernel numbers the keys of a prompt from its first, the model those of the whole row."""
    if pick.kind != "keys" or len(c.args) == 5:
        return pick
    ends = torch.cat((torch.zeros(1, dtype=torch.long), c.args[1].clamp(0, pick.rows).sort().values))
    request = (torch.arange(pick.rows)[:, None] >= ends[None, 1:]).sum(-1)
    return replace(pick, indices=torch.where(pick.indices < 0, -1, pick.indices + ends[request][:, None]))


@pytest.mark.parametrize(("phase", "queries"), [("decode", 1), ("decode", 3), ("prefill", 0)])
def test_the_layer_is_prolog_indexer_attention_and_a_product(phase: Phase, queries: int) -> None:
    c = layer(phase, queries)
    program = fresh(c)
    log = fuse(program, RULES)
    assert (log.counts()[SPARSE], log.counts()[PROLOG]) == (1, 1)
    assert log.misses == []
    assert [t.removesuffix(".default") for t in targets(program) if t.startswith(("npu", "air"))] == DEVICE
    assert not any(t.startswith(("aten.topk", "cannopy.attention")) for t in targets(program))
    assert sum("aten.index." in t for t in targets(program)) == (phase == "prefill"), "where prompts start"
    assert sum("index_copy" in t for t in targets(program)) == (1 if phase == "decode" else 3)
    indexer = next(n for n in program.gm.graph.nodes if "lightning_indexer" in str(n.target))
    layout = "PA_BSND" if phase == "decode" else "TND"
    assert (indexer.kwargs["layout_query"], indexer.kwargs["layout_key"]) == ("TND", layout)
    if phase == "decode":
        assert indexer.kwargs["block_table"].op == "placeholder", "the model's own"
    _agrees(c, fresh(c), program)


@pytest.mark.parametrize("lengths", [[1, 3], [16, 17], [33, 48], [3, 47]], ids=str)
def test_any_lengths(lengths: list[int]) -> None:
    c = layer("decode")
    table = c.args[2]
    args = (c.args[0], torch.tensor(lengths), table, _slots(table, [max(3, n) for n in lengths], 3), c.args[4])
    after = fresh(c)
    fuse(after, RULES)
    moved = Case(c.model, args, {}, c.program)
    _agrees(moved, fresh(c), after)


@pytest.mark.parametrize("ends", [[40, 40, 40], [0, 20, 40], [7, 3, 5], [1, 2, 3], [50, -4, 9]], ids=str)
def test_prompts_end_wherever_the_ends_are(ends: list[int]) -> None:
    c = layer("prefill")
    after = fresh(c)
    fuse(after, RULES)
    _agrees(Case(c.model, (c.args[0], torch.tensor(ends), *c.args[2:]), {}, c.program), fresh(c), after)


# Mutants: each changes one thing in the normalised graph.


def _source(node: fx.Node, argument: int = 0) -> fx.Node:
    found = node.args[argument]
    assert isinstance(found, fx.Node)
    return found


def _before(program: Program, node: fx.Node, argument: int, op: object, *args: object, **kwargs: object) -> None:
    """``op`` between ``node`` and its operand."""
    editor, old = Editor(program.gm), _source(node, argument)
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
    scaled = _source(one(program, aten.relu.default))
    scaled.args = (scaled.args[0], scaled.args[1] * 3)  # type: ignore[operator]


def _other_softmax_scale(program: Program) -> None:
    node = attention(program)
    node.args = (*node.args[:4], node.args[4] * 1.7, *node.args[5:])  # type: ignore[operator]


def _no_factor_on_weights(program: Program) -> None:
    weights = one(program, aten.mul.Tensor, where=lambda n: shape(n)[-1] == 4 and isinstance(n.args[1], float))
    weights.replace_all_uses_with(_source(weights))


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


SAME: dict[str, tuple[Phase, Callable[[Program], None]]] = {
    "scale of the products": ("decode", _scaled),
    "scale of the softmax": ("prefill", _other_softmax_scale),
    "no factor on the weights": ("prefill", _no_factor_on_weights),
    "one key less": ("decode", _key_of_one_step_less),
    "blocks of the other request": ("decode", _every_table_flipped),
    "keys of the indexer are returned": ("decode", _returned(lambda p: _gathered(p, 128))),
    "expanded keys are returned": ("prefill", _returned(lambda p: _source(attention(p), 1))),
    "scores are returned": ("decode", _returned(lambda p: _source(_masked(p)))),
    "the cache takes other latents": ("prefill", lambda p: _before(p, _written(p, 512), 3, aten.tanh.default)),
    "the mask is returned": ("prefill", _returned(lambda p: _source(_both(p)))),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_math_fuses(name: str) -> None:
    phase, change = SAME[name]
    c = layer(phase, 3 if phase == "decode" else 0)
    before, after = fresh(c), fresh(c)
    for program in (before, after):
        change(program)
        program.gm.recompile()
    log = fuse(after, RULES)
    assert (log.counts()[SPARSE], log.counts()[PROLOG]) == (1, 1)
    _agrees(c, before, after)


def test_latents_that_the_operator_does_not_make_are_attended_all_the_same() -> None:
    c = layer("prefill")
    before, after = fresh(c), fresh(c)
    for program in (before, after):
        expanded = _source(_source(_source(attention(program), 2)))
        linear = expanded if is_call(expanded, aten.linear.default) else _source(expanded)
        _before(program, linear, 0, aten.tanh.default)
        program.gm.recompile()
    log = fuse(after, RULES)
    assert log.counts()[SPARSE] == 1
    assert PROLOG not in log.counts()
    assert any("the latent cache does not take a normalised latent" in m.reason for m in log.misses)
    _agrees(c, before, after)


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
    _strict(program, _source(_masked(program), 1), 0)


def _attention_sees_less(program: Program) -> None:
    both = _both(program)
    _strict(program, both, both.args.index(_compare(program)))


def _one_more_request(program: Program) -> None:
    """A prompt's first token belongs to the prompt before, for the attention only."""
    both = _both(program)
    old = _source(both)
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
    _before(program, masked, 0, aten.masked_fill.Scalar, masked.args[1], -1.0)


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
    cache = _source(written)
    gathered = _gathered(program, 128)
    editor = Editor(program.gm)
    with editor.before(gathered):
        gathered.args = (editor.reshape(cache, list(shape(_source(gathered)))), gathered.args[1])


def _shifted_picks(program: Program) -> None:
    _before(program, _scatter(program), 2, aten.bitwise_xor.Scalar, 1)


def _smallest(program: Program) -> None:
    topk = _topk(program)
    topk.args = (topk.args[0], topk.args[1], -1, False, True)


def _tanh_heads(program: Program) -> None:
    one(program, aten.relu.default).target = aten.tanh.default


def _negative(program: Program) -> None:
    scaled = _source(one(program, aten.relu.default))
    scaled.args = (scaled.args[0], -scaled.args[1])  # type: ignore[operator]


def _values_from_keys(program: Program) -> None:
    values = _source(_source(attention(program), 2))
    values.args = (values.args[0], values.args[1], 0, 128, 1)


def _computed_kv_b(program: Program) -> None:
    weight = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and "kv_b_proj" in n.name)
    editor, linear = Editor(program.gm), next(iter(weight.users))
    with editor.before(linear):
        linear.replace_input_with(weight, editor.call(aten.mul.Tensor, weight, 1.5))


def _requests_as_heads(program: Program) -> None:
    """The mask of each request is that of a head."""
    node = attention(program)
    node.args = (*node.args[:3], _source(_source(node, 3)), *node.args[4:])


def _flat_mask(program: Program) -> None:
    both = _both(program)
    editor = Editor(program.gm)
    with editor.before(both):
        flat = [editor.reshape(_source(both, i), [6, 48]) for i in (0, 1)]
    both.args = tuple(flat)
    editor.refresh(both)


def _without_a_batch(program: Program) -> None:
    node = attention(program)
    editor, users = Editor(program.gm), list(node.users)
    with editor.before(node):
        node.args = (*(editor.reshape(_source(node, i), list(shape(_source(node, i)))[1:]) for i in range(4)),
                     *node.args[4:])
    editor.refresh(node)
    with editor.before(node.next, like=node):
        whole = editor.reshape(node, [1, *shape(node)])
    for user in users:
        user.replace_input_with(node, whole)


def _keys_beside_others(program: Program) -> None:
    """The rows of the indexer's keys are a part of wider ones."""
    wide = _source(one(program, aten.permute.default, where=lambda n: n.args[1] == [0, 2, 1]))
    key, editor = _source(wide), Editor(program.gm)
    with editor.before(wide):
        twice = editor.call(aten.neg.default, editor.call(aten.cat.default, [key, key], 2))
        wide.args = (editor.call(aten.slice.Tensor, twice, 2, 128, 256, 1),)


def _one_head_weight(program: Program) -> None:
    """Every query has the head weights of the first of its request."""
    weights = one(program, aten.mul.Tensor, where=lambda n: shape(n)[-1] == 4 and isinstance(n.args[1], float))
    _before(program, _source(weights), 0, aten.slice.Tensor, 1, 0, 1, 1)
    editor = Editor(program.gm)
    for node in (_source(weights), weights):
        editor.refresh(node)
    for user in list(weights.users):
        user.args = (user.args[0], [2, 1, 1, 4])
        editor.refresh(user)


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


@pytest.mark.parametrize("name", REFUSED)
def test_other_math_is_refused_with_its_reason_and_stays_right(name: str) -> None:
    phase, change, reason = REFUSED[name]
    c = layer(phase, 3 if phase == "decode" else 0)
    before, after = fresh(c), fresh(c)
    for program in (before, after):
        change(program)
        program.gm.graph.lint()
        program.gm.recompile()
    log = fuse(after, RULES)
    assert SPARSE not in log.counts()
    assert any(reason in m.reason for m in log.misses if m.rule == SPARSE), [m.reason for m in log.misses]
    expected, state = run(c, before)
    found, new_state = run(c, after)
    assert _distance(expected[0], found[0]) < 1e-6
    assert all(torch.equal(t, new_state[path]) for path, t in state.items())
