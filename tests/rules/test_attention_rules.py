"""Sparse MLA, the MLA prolog, norms and rotary on the graph of a stock DeepSeek-V3.2 layer and on mutants of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.fusion_rules import catalog
from cannopy.fusion_rules.rewrite import mla_prolog, sparse_flash_attention
from cannopy.fx_passes.graph import Editor, aten, is_call, shape
from cannopy.fx_passes.program import Program
from tests.rules.support import build, case, fresh, fuse, run, stock, targets

ATTENTION = (*catalog.LIFT, sparse_flash_attention.RULE, mla_prolog.RULE)
SPARSE, PROLOG = sparse_flash_attention.RULE.name, mla_prolog.RULE.name
NOISE = 0.03
"""Relative error of one layer between bf16 roundings at different places, with the index picks that then flip."""


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    with target.using("atlas-a3"):
        yield


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))


FORMS = [(24, 1, 0), (1, 1, 30), (3, 2, 20), (1, 8, 17)]


@pytest.mark.parametrize(("tokens", "batch", "past"), FORMS)
def test_the_whole_layer_fuses(tokens: int, batch: int, past: int) -> None:
    c = stock(tokens, batch, past)
    program = fresh(c)
    log = fuse(program, (*catalog.LIFT, *(r for r in catalog.fusions() if "moe" not in r.name)))
    counts = log.counts()
    assert {k: counts.get(k) for k in (SPARSE, PROLOG, "add_rms_norm", "rms_norm", "rotary_mul")} == {
        SPARSE: 1, PROLOG: 1, "add_rms_norm": 2, "rms_norm": 1, "rotary_mul": 2
    }
    expected, state = run(c, fresh(c))
    found, new_state = run(c, program)
    assert _distance(expected[0], found[0]) < NOISE
    for path, tensor in state.items():
        assert _distance(tensor, new_state[path]) < 0.01, path


def test_the_caches_are_graph_inputs_in_block_form() -> None:
    program = fresh(stock(3, 2, 20))
    fuse(program, ATTENTION)
    views = {s.source: s.view for s in program.inputs if s.mutated and "indexer" not in s.source and s.view}
    assert views == {
        "kwargs['cache'].layers[0].keys": (2, 64, 1, 512),
        "kwargs['cache'].layers[0].values": (2, 64, 1, 64),
    }
    prolog = next(n for n in program.gm.graph.nodes if "mla_prolog" in str(n.target))
    assert [prolog.args[i].op for i in (9, 10)] == ["placeholder", "placeholder"]


def test_eager_attention_fuses_as_well() -> None:
    c = case(build(attn_implementation="eager"), 3, past=20)
    program = fresh(c)
    log = fuse(program, ATTENTION)
    assert log.counts()[SPARSE] == log.counts()[PROLOG] == 1
    assert _distance(run(c, fresh(c))[0][0], run(c, program)[0][0]) < NOISE


def test_fp32_model_is_left_alone_with_the_clause_as_reason() -> None:
    c = stock(3, 2, 20, torch.float32)
    program = fresh(c)
    log = fuse(program, ATTENTION)
    assert SPARSE not in log.counts()
    assert any(m.rule == SPARSE and "float32" in m.reason for m in log.misses)
    assert torch.equal(run(c, fresh(c))[0][0], run(c, program)[0][0])


def test_padded_batch_is_left_alone() -> None:
    padding = torch.ones(2, 23, dtype=torch.long)
    padding[0, :4] = 0
    c = case(build(), 3, batch=2, past=20, attention_mask=padding)
    program = fresh(c)
    log = fuse(program, ATTENTION)
    assert SPARSE not in log.counts()
    assert any(m.rule == SPARSE and "padding or custom mask" in m.reason for m in log.misses)
    assert torch.equal(run(c, fresh(c))[0][0], run(c, program)[0][0])


# Mutants: each changes one thing in the normalised graph.


def _one(program: Program, *ops: object, where: Callable[[fx.Node], bool] = lambda n: True) -> fx.Node:
    return next(n for n in program.gm.graph.nodes if is_call(n, *ops) and where(n))


def _after(program: Program, node: fx.Node, op: object, *args: object) -> None:
    editor = Editor(program.gm)
    users = list(node.users)
    with editor.before(node.next, like=node):
        new = editor.call(op, node, *args)
    for user in users:
        user.replace_input_with(node, new)


def _relu_input(program: Program) -> fx.Node:
    scaled = _one(program, aten.relu.default).args[0]
    assert isinstance(scaled, fx.Node)
    return scaled


def _negative_index_scale(program: Program) -> None:
    scaled = _relu_input(program)
    scaled.args = (scaled.args[0], -scaled.args[1])  # type: ignore[operator]


def _relu_to_tanh(program: Program) -> None:
    _one(program, aten.relu.default).target = aten.tanh.default


def _smallest(program: Program) -> None:
    topk = _one(program, aten.topk.default, where=lambda n: n.args[1] == 16)
    topk.args = (topk.args[0], topk.args[1], -1, False, True)


def _weak_mask(program: Program) -> None:
    fill = _one(program, aten.masked_fill.Scalar, where=lambda n: n.args[2] == float("-inf"))
    fill.args = (fill.args[0], fill.args[1], -1.0)


def _other_index_mask(program: Program) -> None:
    fill = _one(program, aten.masked_fill.Scalar)
    mask = fill.args[1].args[0]  # type: ignore[union-attr]
    assert isinstance(mask, fx.Node)
    source = mask.args[0]
    assert isinstance(source, fx.Node)
    editor = Editor(program.gm)
    with editor.before(mask):
        strict = editor.call(aten.lt.Tensor, *_one(program, aten.le.Tensor).args)
        mask.replace_input_with(source, editor.call(aten.expand.default, strict, list(shape(source))))


def _window(program: Program) -> None:
    compare = _one(program, aten.le.Tensor)
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
    whole = _one(program, aten.expand.default, where=lambda n: n.meta["val"].dtype is torch.bool)
    users = list(whole.users)
    with editor.before(whole.next, like=whole):
        row = editor.call(aten.slice.Tensor, whole, 2, 0, 1, 1)
    for user in users:
        user.replace_input_with(whole, row)
    for node in program.gm.graph.nodes:
        if is_call(node, aten.select.int, aten.bitwise_not.default):
            editor.refresh(node)


def _scaled_kv_b(program: Program) -> None:
    weight = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and "kv_b_proj" in n.name)
    linear = next(iter(weight.users))
    editor = Editor(program.gm)
    with editor.before(linear):
        linear.replace_input_with(weight, editor.call(aten.mul.Tensor, weight, 1.5))


def _attention(program: Program) -> fx.Node:
    return next(n for n in program.gm.graph.nodes if str(n.target).startswith("cannopy.attention"))


def _values_from_keys(program: Program) -> None:
    node = _attention(program)
    values = node.args[2]
    assert isinstance(values, fx.Node)
    values.args = (values.args[0], 3, 0, 128, 1)


def _doubled_latent(program: Program) -> None:
    copy = _one(program, aten.index_copy.default, where=lambda n: n.meta["val"].shape[-1] == 512)
    _after(program, copy.args[3], aten.mul.Tensor, 2.0)  # type: ignore[arg-type]


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
    copy = _one(program, aten.index_copy.default, where=lambda n: n.meta["val"].shape[-1] == 64)
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
    (_doubled_latent, PROLOG, "rms_norm"),
    (_swapped_rope, PROLOG, "rotary"),
    (_one_angle_for_all_tokens, PROLOG, "sin has shape"),
    (_other_rows, PROLOG, "same index"),
    (_other_input, PROLOG, "different hidden states"),
]


@pytest.mark.parametrize(("mutate", "rule", "reason"), MUTANTS, ids=[m[0].__name__.strip("_") for m in MUTANTS])
def test_a_mutant_is_refused_with_its_reason_and_stays_right(
    mutate: Callable[[Program], None], rule: str, reason: str
) -> None:
    c = stock(3, 2, 20)
    mutant, untouched = fresh(c), fresh(c)
    for program in (mutant, untouched):
        mutate(program)
        program.gm.recompile()
    log = fuse(mutant, ATTENTION)
    assert rule not in log.counts()
    assert any(m.rule == rule and reason in m.reason for m in log.misses), [str(m) for m in log.misses]
    expected, state = run(c, untouched)
    found, new_state = run(c, mutant)
    assert _distance(run(c, fresh(c))[0][0], expected[0]) > 0, "the mutant computes something else"
    tolerance = NOISE if log.counts().get(SPARSE) else 0.0
    assert _distance(expected[0], found[0]) <= tolerance
    for path, tensor in state.items():
        assert _distance(tensor, new_state[path]) <= 0.01, path


def test_a_first_query_that_sees_nothing_is_refused() -> None:
    """Its softmax is NaN in the model; the op's is not."""
    program = fresh(stock(24))
    compare = _one(program, aten.le.Tensor)
    editor = Editor(program.gm)
    with editor.before(compare):
        queries = editor.call(aten.arange.start, -1, 23, device=torch.device("cpu"))
        compare.args = (compare.args[0], editor.reshape(queries, list(shape(compare.args[1]))))  # type: ignore[arg-type]
    log = fuse(program, ATTENTION)
    assert SPARSE not in log.counts()
    assert any(m.rule == SPARSE and m.reason == "the first query sees no key" for m in log.misses)


def test_an_extra_user_of_the_latent_query_is_served() -> None:
    c = stock(3, 2, 20)
    program, plain = fresh(c), fresh(c)
    for p in (program, plain):
        weight = next(n for n in p.gm.graph.nodes if n.op == "placeholder" and "q_b_proj" in n.name)
        latent = next(iter(weight.users)).args[0]
        output = next(iter(reversed(p.gm.graph.nodes)))
        output.args = ((*output.args[0], latent),)
        p.gm.recompile()
    log = fuse(program, ATTENTION)
    assert log.counts()[PROLOG] == 1
    assert _distance(run(c, plain)[0][1], run(c, program)[0][1]) < 0.01


def test_an_impossible_block_size_is_refused() -> None:
    log = fuse(fresh(stock(3, 2, 20)), ATTENTION, block_size=48)
    assert any(m.rule == SPARSE and "block_size 48" in m.reason for m in log.misses)


def test_transpose_batchmatmul_is_used_where_it_is_legal() -> None:
    program = fresh(stock(3, 2, 20))
    fuse(program, ATTENTION)
    assert targets(program).count("npu.npu_transpose_batchmatmul.default") == 1
