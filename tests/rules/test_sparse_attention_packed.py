"""Indexer and sparse attention over packed tokens, on one layer of our DeepSeek-V3.2 and on mutants of its graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.frontend.capture import capture
from cannopy.frontend.state import prepare_state
from cannopy.fusion_rules import catalog, dialect
from cannopy.fusion_rules.rewrite import mla_prolog_dense, mla_prolog_rows, sparse_flash_attention_packed
from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.program import Program
from cannopy.models.lively import lively_
from cannopy.models.mla import Indexer, LatentAttention, LatentPages, LatentSizes
from cannopy.models.paging import Decode, Prefill
from cannopy.models.parts import Rotary
from cannopy.parity.measure import compare_picks
from cannopy.parity.picks import Pick, Recorder, Replay
from tests.rules.attention_mutants import attention
from tests.rules.packed_mutants import REFUSED, SAME, Phase, before_operand, source
from tests.rules.support import Case, fresh, fuse, run, targets

Tensor = torch.Tensor
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
        expanded = source(source(source(attention(program), 2)))
        linear = expanded if is_call(expanded, aten.linear.default) else source(expanded)
        before_operand(program, linear, 0, aten.tanh.default)
        program.gm.recompile()
    log = fuse(after, RULES)
    assert log.counts()[SPARSE] == 1
    assert PROLOG not in log.counts()
    assert any("the latent cache does not take a normalised latent" in m.reason for m in log.misses)
    _agrees(c, before, after)


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
