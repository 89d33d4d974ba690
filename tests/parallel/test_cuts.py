"""Small graphs, cut for every rank and run side by side, give what one die gives; what cannot be cut says why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu  # noqa: F401  (registers the npu ops)

from cannopy.fusion_rules import dialect
from cannopy.fx_passes.parallel import Parallel, ParallelError
from tests.parallel import lockstep, ranks
from tests.rules.moe_support import Traced, trace

Tensor = torch.Tensor
H, INNER, VOCABULARY = 32, 64, 48
npu = torch.ops.npu


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size)))


def weights(*sizes: tuple[int, ...]) -> list[Tensor]:
    """Matrices of size 1/√in."""
    return [normal(*size, seed=i) / size[-1] ** 0.5 for i, size in enumerate(sizes)]


def check(fn: Callable[..., Any], parameters: Sequence[Tensor], parallel: str, make: Callable[[int], Tensor],
          limit: float = 2e-6) -> list[lockstep.Rank]:
    """All ranks of ``fn(x, *parameters)`` on x of their own (``make(rank)``) next to the graph of one die."""
    dialect.register_all()
    traced = trace(fn, make(0), *parameters, parameters=range(1, len(parameters) + 1))
    dies = Parallel.parse(parallel).dies
    programs = [ranks.cut(traced.program, parallel, rank) for rank in range(dies)]
    name = traced.program.inputs[0].name
    values = [{**traced.values, name: make(rank // Parallel.parse(parallel).attn_tp)} for rank in range(dies)]
    found = lockstep.run(programs, values)
    for rank, own in zip(found, values, strict=True):
        for ours, single in zip(rank.outputs, Traced(copy.deepcopy(traced.program), own).run(), strict=True):
            assert ours.shape == single.shape
            torch.testing.assert_close(ours, single, rtol=0, atol=limit and limit * float(single.abs().amax() + 1))
    return found


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return F.linear(npu.npu_swiglu(F.linear(x, gate_up)), down)


def merged(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def halves(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def biased(x: Tensor, up: Tensor, bias_up: Tensor, down: Tensor, bias_down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias_up)), down, bias_down)


def scaled(x: Tensor, up: Tensor, factor: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x.reshape(-1, H), up)) * factor, down).reshape(x.shape)


def two(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Two MLPs one after the other, as LongCat has them."""
    return swiglu(x + swiglu(x, gate_up, down), gate_up, down)


MLPS: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
    (swiglu, weights((2 * INNER, H), (H, INNER))),
    (merged, weights((INNER, H), (INNER, H), (H, INNER))),
    (halves, weights((2 * INNER, H), (H, INNER))),
    (biased, weights((INNER, H), (INNER,), (H, INNER), (H,))),
    (scaled, weights((INNER, H), (INNER,), (H, INNER))),
    (two, weights((2 * INNER, H), (H, INNER))),
]


@pytest.mark.parametrize("parallel", ["dp=2,dense_tp=2", "dp=4,dense_tp=2", "dp=8,dense_tp=8"])
@pytest.mark.parametrize(("fn", "parameters"), MLPS, ids=[fn.__name__ for fn, _ in MLPS])
@pytest.mark.parametrize("lead", [(3,), (1, 2)], ids=["packed", "batched"])
def test_dense(fn: Callable[..., Tensor], parameters: list[Tensor], parallel: str, lead: tuple[int, ...]) -> None:
    check(fn, parameters, parallel, lambda rank: normal(*lead, H, seed=100 + rank))


def refused(fn: Callable[..., Any], x: Tensor, parameters: Sequence[Tensor], parallel: str, words: str) -> None:
    dialect.register_all()
    traced = trace(fn, x, *parameters, parameters=range(1, len(parameters) + 1))
    with pytest.raises(ParallelError, match=words):
        ranks.cut(traced.program, parallel, 0)


REFUSED: list[tuple[str, Callable[..., Any], list[Tensor], str]] = [
    ("another reader of the hidden values", lambda x, a, b: (F.linear(h := F.gelu(F.linear(x, a)), b), h.sum(-1)),
     weights((INNER, H), (H, INNER)), r"sum\w* reads all of gelu"),
    ("a factor of each token", lambda x, a, b: F.linear(F.relu(F.linear(x, a)) * x.mean(-1, keepdim=True), b),
     weights((INNER, H), (H, INNER)), "activation .* belongs to no MLP"),
    ("sums between the projections", lambda x, a, b: F.linear(F.silu(F.linear(x, a)).cumsum(-1), b),
     weights((INNER, H), (H, INNER)), "activation .* belongs to no MLP"),
    ("one of two MLPs", lambda x, a, b: F.linear(F.gelu(F.linear(swiglu(x, a, b[:, ::2]), a)).sort()[0], b),
     weights((INNER, H), (H, INNER)), "activation .* belongs to no MLP"),
    ("a width that cannot be divided", lambda x, a, b: F.linear(F.gelu(F.linear(x, a)), b),
     weights((INNER + 2, H), (H, INNER + 2)), "66 / 4 is no whole number"),
    ("no MLP", lambda x, a: F.linear(x, a), weights((INNER, H)), "finds nothing to cut"),
    ("weights that are computed", lambda x, a, b: F.linear(F.gelu(F.linear(x, a * x.mean())), b),
     weights((INNER, H), (H, INNER)), "activation .* belongs to no MLP"),
]


@pytest.mark.parametrize(("fn", "parameters", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_dense_refused(fn: Callable[..., Any], parameters: list[Tensor], words: str) -> None:
    refused(fn, normal(3, H), parameters, "dp=4,dense_tp=4", words)


def test_a_shared_expert_stays_whole() -> None:
    """Its result is joined with that of routed experts that read the same tokens; a dense MLP behind it is cut."""
    def shared(x: Tensor, gate_up: Tensor, down: Tensor, router: Tensor, experts: Tensor) -> Tensor:
        scales, ids = F.linear(x, router).softmax(-1).topk(2)
        rows, source, counts, _ = npu.npu_moe_init_routing_v2(
            x, ids.int(), active_num=6, expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True,
            quant_mode=-1, active_expert_range=[0, 4], row_idx_type=0)
        (out,) = npu.npu_grouped_matmul([rows], [experts], group_list=counts, split_item=3, group_type=0,
                                        group_list_type=1)
        return npu.npu_moe_finalize_routing(out, swiglu(x, gate_up, down), None, None, scales, source, None,
                                            drop_pad_mode=2)

    parameters = weights((2 * INNER, H), (H, INNER), (4, H), (4, H, H))
    refused(shared, normal(3, H), parameters, "dp=2,dense_tp=2", "finds nothing to cut")
    both = trace(lambda x, *w: swiglu(shared(x, *w), *w[:2]), normal(3, H), *parameters, parameters=range(1, 5))
    found = lockstep.collectives(ranks.cut(both.program, "dp=2,dense_tp=2", 0))
    assert found == {"all_gather_into_tensor dense_tp": 1, "reduce_scatter_tensor dense_tp": 1}


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *bias: Tensor) -> Tensor:
    """Self-attention of 4 heads within each row of x [B, S, H]."""
    heads = [F.linear(x, w).unflatten(-1, (4, -1)).transpose(1, 2) for w in (q, k, v)]
    out = torch.ops.cannopy.attention(*heads, None, 0.3, True, False)
    return F.linear(out.transpose(1, 2).flatten(2), o, *bias)


@pytest.mark.parametrize("parallel", ["dp=2,o_proj_tp=2", "dp=8,o_proj_tp=4", "dp=8,o_proj_tp=8"])
@pytest.mark.parametrize("bias", [False, True])
def test_o_proj(parallel: str, bias: bool) -> None:
    parameters = weights((H, H), (H, H), (H, H), (24, H), *([(24,)] if bias else []))
    check(attention, parameters, parallel, lambda rank: normal(2, 3, H, seed=100 + rank))


def test_o_proj_refused() -> None:
    parameters = weights((H, H), (H, H), (H, H), (24, H))
    x = normal(2, 3, H)
    dialect.register_all()
    refused(attention, x, parameters, "dp=3,o_proj_tp=3", "columns of all heads cannot be divided: 32 / 3 is no")
    refused(attention, x, parameters, "attn_tp=2,dp=2,o_proj_tp=2", "attn_tp cuts the output projections already")
    refused(lambda x, a: F.linear(x, a), x, weights((H, H)), "dp=2,o_proj_tp=2", "finds nothing to cut")


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table)


def head(x: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
    return F.linear(x, matrix, *bias).float() * 0.5


def tied(ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.embedding(ids, table).tanh()
    return F.linear(hidden, table), hidden


def ids_of(rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("parallel", ["dp=2,embed_tp=2", "dp=4,embed_tp=4", "dp=8,embed_tp=8"])
def test_embedding_is_exact(parallel: str) -> None:
    table = normal(VOCABULARY, H)
    table[5] = float("inf")  # a row that a product with zero would spoil
    check(embedding, [table], parallel, ids_of, limit=0.0)


@pytest.mark.parametrize("parallel", ["dp=2,lm_head_tp=2", "dp=8,lm_head_tp=4", "dp=8,lm_head_tp=8"])
@pytest.mark.parametrize("bias", [False, True])
def test_head(parallel: str, bias: bool) -> None:
    check(head, weights((VOCABULARY, H), *([(VOCABULARY,)] if bias else [])), parallel,
          lambda rank: normal(2, 3, H, seed=100 + rank))


TIED = ["dp=4,embed_tp=4,lm_head_tp=4", "dp=8,embed_tp=2,lm_head_tp=8", "dp=4,embed_tp=4"]


@pytest.mark.parametrize("parallel", TIED)
def test_tied(parallel: str) -> None:
    check(tied, [normal(VOCABULARY, H)], parallel, ids_of)
    traced = trace(tied, ids_of(0), normal(VOCABULARY, H), parameters=[1])
    if "lm_head_tp=4" in parallel:
        assert len(ranks.cut(traced.program, parallel, 3).weights) == 1, "both read one part"


def test_vocabulary_refused() -> None:
    refused(embedding, ids_of(0), [normal(VOCABULARY + 1, H)], "dp=4,embed_tp=4", "vocabulary .*49 / 4 is no whole")
    refused(head, normal(2, H), weights((VOCABULARY + 1, H)), "dp=4,lm_head_tp=4", "vocabulary .*49 / 4 is no whole")
    refused(lambda x, a: F.linear(x, a).sum(-1), normal(2, H), weights((VOCABULARY, H)), "dp=4,lm_head_tp=4", "nothing")
