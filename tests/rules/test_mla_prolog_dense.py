"""The MLA prolog in front of attention over all latents, on one layer of our zoo and on mutants of its graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx, nn

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.frontend.capture import capture
from cannopy.frontend.state import prepare_state
from cannopy.fusion_rules import catalog, dialect
from cannopy.fusion_rules.rewrite import fused_infer_attention, mla_prolog_dense
from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import Editor, aten, is_call
from cannopy.fx_passes.program import Program
from cannopy.models.lively import lively_
from cannopy.models.mla import LatentAttention, LatentPages, LatentSizes
from cannopy.models.paging import Decode
from cannopy.models.parts import Rotary
from tests.rules.support import Case, fresh, fuse, run, targets

Tensor = torch.Tensor
RULES = (*catalog.LIFT, fused_infer_attention.RULE, mla_prolog_dense.RULE)
SIZES = LatentSizes(1024, 2, 1536, 512, 128, 64, 128)
BLOCK, NOISE = 16, 0.01
"""bf16 roundings at other places change a layer by less."""


class Layer(nn.Module):
    """One latent attention of the zoo with its angles."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.attention = LatentAttention(sizes, {"theta": 1e4})
        self.rotary = Rotary(sizes.rope, {"theta": 1e4})

    def forward(self, x: Tensor, lengths: Tensor, table: Tensor, slots: Tensor, pages: LatentPages) -> Tensor:
        step = Decode(x.shape[0], lengths, table, slots, BLOCK)
        y: Tensor = self.attention(x, self.rotary(step.positions, x.dtype), step, pages)
        return y


@functools.cache
def layer(queries: int, q_scale: float = 1.0) -> Case:
    """A decode step of two requests of 20 and ``queries`` tokens; do not change it."""
    activate()
    dialect.register_all()
    sizes = LatentSizes(1024, 2, 1536, 512, 128, 64, 128, q_scale=q_scale, kv_scale=q_scale)
    module = lively_(Layer(sizes), 0).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)

    def r(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    pages = LatentPages(r(6, BLOCK, 1, 512), r(6, BLOCK, 1, 64))
    table = torch.tensor([[5, 2], [1, 3]], dtype=torch.int32)
    slots = torch.cat((2 * BLOCK + 4 - queries + torch.arange(queries), BLOCK + torch.arange(queries)))
    args = (r(2 * queries, 1024), torch.tensor([20, queries]), table, slots, pages)
    prepare_state(module, args, {})
    program = capture(module, "forward", args, {})
    normalise.run(program)
    return Case(module, args, {}, program)


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    with target.using("atlas-a3"):
        yield


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))


def _agrees(c: Case, program: Program) -> None:
    expected, state = run(c, fresh(c))
    found, new_state = run(c, program)
    assert _distance(expected[0], found[0]) < NOISE
    assert len(state) == 2
    for path, tensor in state.items():
        rows, new_rows = (t.flatten(0, 1) for t in (tensor, new_state[path]))
        slots = c.args[3]
        assert _distance(rows[slots], new_rows[slots]) < NOISE
        others = torch.ones(len(rows), dtype=torch.bool)
        others[slots] = False
        assert torch.equal(rows[others], new_rows[others]), "rows of others are untouched"


@pytest.mark.parametrize(("queries", "scale"), [(1, 1.0), (3, 1.0), (2, 2.5)])
def test_the_layer_is_prolog_attention_and_two_products(queries: int, scale: float) -> None:
    c = layer(queries, scale)
    program = fresh(c)
    log = fuse(program, RULES)
    assert (log.counts()["fused_infer_attention"], log.counts()["mla_prolog"]) == (1, 1)
    assert log.misses == []
    device = [t.removesuffix(".default") for t in targets(program) if t.startswith(("npu", "air"))]
    assert device == ["npu.npu_mla_prolog_v3_functional", "air.npu_fused_infer_attention_score_v2",
                      "npu.npu_transpose_batchmatmul"]
    assert sum("linear" in t for t in targets(program)) == 1, "the output projection"
    assert not any(t.startswith(("aten.index", "cannopy")) for t in targets(program))
    _agrees(c, program)


# Mutants: each changes one thing in the normalised graph.


def _weight(program: Program, name: str) -> fx.Node:
    """The linear whose weight's name has ``name``."""
    node = next(n for n in program.gm.graph.nodes if n.op == "placeholder" and name in n.name and n.users)
    return next(iter(node.users))


def _one(program: Program, op: object, where: Callable[[fx.Node], bool]) -> fx.Node:
    return next(n for n in program.gm.graph.nodes if is_call(n, op) and where(n))


def _put(program: Program, node: fx.Node, op: object, *args: object) -> None:
    """``op`` between ``node`` and everything that reads it."""
    editor, users = Editor(program.gm), list(node.users)
    with editor.before(node.next, like=node):
        new = editor.call(op, node, *args)
    for user in users:
        user.replace_input_with(node, new)


def _slice(program: Program, source: str, start: int) -> fx.Node:
    """The slice from ``start`` on of the linear ``source``, behind a reshape or not."""
    linear = _weight(program, source)
    values = [linear, *(u for u in linear.users if is_call(u, aten.reshape.default))]
    return _one(program, aten.slice.Tensor, lambda n: n.args[0] in values and n.args[2] == start)


def _squashed_queries(program: Program) -> None:
    _put(program, _slice(program, "q_b_proj", 0), aten.tanh.default)


def _squashed_rotated_queries(program: Program) -> None:
    _put(program, _slice(program, "q_b_proj", 128), aten.tanh.default)


def _write(program: Program, width: int) -> fx.Node:
    return _one(program, aten.index_copy.default, lambda n: n.meta["val"].shape[-1] == width)


def _other_rows(program: Program) -> None:
    write, editor = _write(program, 64), Editor(program.gm)
    with editor.before(write):
        write.replace_input_with(write.args[2], editor.call(aten.add.Tensor, write.args[2], 1))  # type: ignore[arg-type]


def _squashed_latent(program: Program) -> None:
    _put(program, _write(program, 512).args[3], aten.tanh.default)  # type: ignore[arg-type]


def _squashed_rope(program: Program) -> None:
    _put(program, _write(program, 64).args[3], aten.tanh.default)  # type: ignore[arg-type]


def _squashed_before_the_norm(program: Program) -> None:
    _put(program, _slice(program, "kv_a_proj", 0), aten.tanh.default)


def _before_the_last_linear(program: Program) -> None:
    _put(program, _weight(program, "q_b_proj").args[0], aten.tanh.default)  # type: ignore[arg-type]


def _behind_the_first_linear(program: Program) -> None:
    _put(program, _weight(program, "q_a_proj"), aten.tanh.default)


def _biased(program: Program) -> None:
    linear, editor = _weight(program, "q_b_proj"), Editor(program.gm)
    with editor.before(linear):
        linear.args = (*linear.args, editor.call(aten.full.default, [384], 0.5, dtype=torch.bfloat16))


def _other_input(program: Program) -> None:
    linear, editor = _weight(program, "kv_a_proj"), Editor(program.gm)
    with editor.before(linear):
        linear.replace_input_with(linear.args[0], editor.call(aten.tanh.default, linear.args[0]))  # type: ignore[arg-type]


def _computed_cache(program: Program) -> None:
    write, editor = _write(program, 512), Editor(program.gm)
    with editor.before(write):
        write.replace_input_with(write.args[0], editor.call(aten.tanh.default, write.args[0]))  # type: ignore[arg-type]


def _computed_weight(program: Program) -> None:
    linear, editor = _weight(program, "kv_a_proj"), Editor(program.gm)
    with editor.before(linear):
        linear.replace_input_with(linear.args[1], editor.call(aten.tanh.default, linear.args[1]))  # type: ignore[arg-type]


MUTANTS: dict[str, tuple[Callable[[Program], None], str]] = {
    "queries": (_squashed_queries, "the queries are not the first part of each head"),
    "rotated queries": (_squashed_rotated_queries, "the rotated queries are not the second part of each head"),
    "rows": (_other_rows, "both caches are not written once, at the same places"),
    "latent": (_squashed_latent, "the latent cache does not take a normalised latent"),
    "rotated key": (_squashed_rope, "the rope cache does not take a part that is rotated as the queries are"),
    "before the norm": (_squashed_before_the_norm, "are not the first and the second part of one projection"),
    "no low rank": (_before_the_last_linear, "not from a normalised low-rank latent"),
    "no first projection": (_behind_the_first_linear, "the normalised latent of the queries is not that of"),
    "bias": (_biased, "a projection has a bias, which the operator does not add"),
    "inputs": (_other_input, "the query and the key/value chain read different hidden states"),
    "cache": (_computed_cache, "is not an input of the graph"),
    "weight": (_computed_weight, "weight_dkv_kr"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refused_with_its_reason_and_stays_right(name: str) -> None:
    c, (change, reason) = layer(3), MUTANTS[name]
    before, after = fresh(c), fresh(c)
    for program in (before, after):
        change(program)
        program.gm.recompile()
    log = fuse(after, RULES)
    assert "mla_prolog" not in log.counts()
    said = [m for m in log.misses if m.rule == "mla_prolog" and reason in m.reason]
    assert said, [m.reason for m in log.misses]
    assert name != "bias" or said[0].remedy == "drop the bias (attention_bias=False)"
    expected, state = run(c, before)
    found, new_state = run(c, after)
    assert _distance(expected[0], found[0]) < NOISE
    assert all(_distance(t, new_state[path]) < NOISE for path, t in state.items())


def test_sizes_that_the_operator_does_not_take_are_refused_with_the_clause() -> None:
    c = layer(1)
    program = fresh(c)
    log = fuse(program, RULES, target="atlas-950")
    assert log.counts().get("mla_prolog") is None
    assert any("products" in m.clause for m in log.misses if m.rule == "fused_infer_attention")
    assert torch.equal(run(c, fresh(c))[0][0], run(c, program)[0][0])
