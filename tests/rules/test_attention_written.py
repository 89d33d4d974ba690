"""Attention written out in the spellings of plain models: lifted and fused, or refused where it is something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.fusion_rules import catalog, dialect
from cannopy.fusion_rules.engine.record import Log
from cannopy.fusion_rules.engine.stop import short
from cannopy.fusion_rules.rewrite import fused_infer_attention
from cannopy.fx_passes import normalise
from cannopy.fx_passes.program import Program
from tests.passes.graphs import program_of, run
from tests.rules.support import fuse

Tensor = torch.Tensor
Form = Callable[[Tensor, Tensor, Tensor], Tensor]
B, N, K, S, D = 2, 4, 2, 8, 64
SCALE = D**-0.5
INF = float("-inf")


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    dialect.register_all()
    with target.using("atlas-a3"):
        yield


def _r(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


MANY = (_r(B, N, S, D), _r(B, N, S, D, seed=1), _r(B, N, S, D, seed=2))
FEW = (MANY[0], _r(B, K, S, D, seed=1), _r(B, K, S, D, seed=2))
TOKENS_FIRST = tuple(x.transpose(1, 2).contiguous() for x in MANY)
FEW_TOKENS_FIRST = tuple(x.transpose(1, 2).contiguous() for x in FEW)


def _seen() -> Tensor:
    return torch.arange(S)[:, None] >= torch.arange(S)[None, :]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * SCALE


def _masked(scores: Tensor) -> Tensor:
    return scores.masked_fill(~_seen(), INF)


def _added(mask: Callable[[], Tensor]) -> Form:
    return lambda q, k, v: (_scores(q, k) + mask().to(q.dtype)).softmax(-1) @ v


def _filled(hidden: Callable[[], Tensor], fill: float = INF) -> Form:
    return lambda q, k, v: _scores(q, k).masked_fill(hidden(), fill).softmax(-1) @ v


def _fp32_inputs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide = _masked(_scores(*(x if x.dtype is torch.float64 else x.float() for x in (q, k)))).softmax(-1)
    return (wide @ v.to(wide.dtype)).transpose(1, 2).to(q.dtype)


def _fp32_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    wide = scores if q.dtype is torch.float64 else scores.float()
    return _masked(wide * SCALE).softmax(-1).to(q.dtype) @ v


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _masked(torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def _einsum_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _masked(torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def _repeat_interleave(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(N // K, dim=1) for x in (k, v))
    return _masked(_scores(q, k)).softmax(-1) @ v


def _groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _masked(_scores(q.reshape(B, K, N // K, S, D), k[:, :, None])).softmax(-1)
    return (weights @ v[:, :, None]).reshape(B, N, S, D)


def _groups_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqkgd,btkd->bkgqt", q.reshape(B, S, K, N // K, D), k) * SCALE
    return torch.einsum("bkgqt,btkd->bqkgd", _masked(scores).softmax(-1), v).reshape(B, S, N * D)


def _tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head n reads keys n % K, not n // (N / K)."""
    return _masked(_scores(q, k.repeat(1, N // K, 1, 1))).softmax(-1) @ v.repeat(1, N // K, 1, 1)


SAME: dict[str, tuple[Form, tuple[Tensor, ...], int]] = {
    "a bool mask of two dims": (_filled(lambda: ~_seen()), MANY, N),
    "a lower triangle": (_filled(lambda: ~torch.ones(S, S, dtype=torch.bool).tril()), MANY, N),
    "an upper triangle": (_filled(lambda: torch.ones(S, S, dtype=torch.bool).triu(1)), MANY, N),
    "a triangle of ones": (_filled(lambda: torch.tril(torch.ones(S, S)) == 0), MANY, N),
    "a triangle cast to bool": (_filled(lambda: torch.triu(torch.ones(1, 1, S, S), 1).bool()), MANY, N),
    "the lowest number": (_filled(lambda: ~_seen(), torch.finfo(torch.bfloat16).min), MANY, N),
    "an added triangle": (_added(lambda: torch.triu(torch.full((S, S), INF), 1)), MANY, N),
    "added zeros, filled": (_added(lambda: torch.zeros(S, S).masked_fill(~_seen(), INF)), MANY, N),
    "added, three dims": (_added(lambda: torch.where(_seen(), 0.0, INF)[None]), MANY, N),
    "where": (lambda q, k, v: torch.where(_seen(), _scores(q, k), INF).softmax(-1) @ v, MANY, N),
    "where not": (lambda q, k, v: torch.where(~_seen(), INF, _scores(q, k)).softmax(-1) @ v, MANY, N),
    "divided": (lambda q, k, v: _masked(q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v, MANY, N),
    "scaled queries": (lambda q, k, v: _masked((q * SCALE) @ k.transpose(-1, -2)).softmax(-1) @ v, MANY, N),
    "no mask": (lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v, MANY, N),
    "fp32 scores": (_fp32_scores, MANY, N),
    "fp32 inputs": (_fp32_inputs, MANY, N),
    "einsum": (_einsum, MANY, N),
    "einsum, tokens first": (_einsum_tokens_first, TOKENS_FIRST, N),
    "repeated heads": (_repeat_interleave, FEW, K),
    "heads in another order": (_tiled, FEW, N),
    "groups of queries": (_groups, FEW, K),
    "groups, einsum": (_groups_einsum, FEW_TOKENS_FIRST, K),
}


def _fused(form: Form, inputs: tuple[Tensor, ...]) -> tuple[Program, Log]:
    program = program_of(form, *inputs)
    normalise.run(program)
    return program, fuse(program, (*catalog.LIFT, fused_infer_attention.RULE))


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _agrees(form: Form, program: Program, inputs: tuple[Tensor, ...]) -> None:
    exact = form(*(x.double() for x in inputs))  # type: ignore[call-arg]
    found, plain = run(program, *inputs)[0][0], form(*inputs)  # type: ignore[call-arg]
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    assert _error(found, exact) <= 1.5 * _error(plain, exact)


@pytest.mark.parametrize("name", SAME)
def test_a_spelling_is_fused(name: str) -> None:
    form, inputs, kv_heads = SAME[name]
    program, log = _fused(form, inputs)
    assert log.counts() == {"lift_attention": 1, "fused_infer_attention": 1}
    assert log.misses == []
    (node,) = (n for n in program.gm.graph.nodes if "fused_infer" in str(n.target))
    assert node.kwargs["num_key_value_heads"] == kv_heads
    assert node.kwargs["sparse_mode"] == (0 if name == "no mask" else 3)
    _agrees(form, program, inputs)


def _values_of_the_next_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _masked(_scores(q.reshape(B, K, N // K, S, D), k[:, :, None])).softmax(-1)
    return (weights.transpose(1, 2).reshape(B, K, N // K, S, S) @ v[:, :, None]).reshape(B, N, S, D)


def _keys_of_two_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).reshape(B, N, S // 2, 2 * S).softmax(-1)
    return weights.reshape(B, N, S, S) @ v


def _no_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (_scores(q[0], k[0])).softmax(-1) @ v[0]


def _mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide = v.dtype if v.dtype is torch.float64 else torch.float16
    return _scores(q, k).softmax(-1).to(wide) @ v.to(wide)


def _mask_per_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.arange(S) > torch.arange(S)[:, None] + torch.arange(N)[:, None, None]
    return _scores(q, k).masked_fill(hidden, INF).softmax(-1) @ v


def _one_query_for_all_requests(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _scores(q[:1], k).softmax(-1) @ v


def _one_set_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask makes scores of every request from those of the first."""
    hidden = torch.arange(S) > torch.arange(S)[:, None] + torch.arange(B)[:, None, None, None]
    return torch.where(hidden, INF, _scores(q[:1], k[:1])).softmax(-1) @ v


def _softcap(scores: Tensor) -> Tensor:
    return torch.tanh(scores / 30) * 30


def _per_head(scores: Tensor) -> Tensor:
    return scores * torch.linspace(0.5, 1.0, N, dtype=scores.dtype)[:, None, None]


def _bool_added(scores: Tensor) -> Tensor:
    return scores + _seen()


PRODUCT = "the scores are not a product of queries and keys: "
STOPS: dict[str, tuple[Callable[[Tensor], Tensor], int, str, str]] = {
    # name: (what becomes of the scores, dim of the softmax, operation that is named, reason)
    "softcap": (_softcap, -1, "aten.tanh", f"{PRODUCT}found aten.tanh"),
    "softcap and mask": (lambda s: _masked(_softcap(s)), -1, "aten.tanh", f"{PRODUCT}found aten.tanh"),
    "factor per head": (_per_head, -1, "aten.mul", f"{PRODUCT}they are scaled by aten."),
    "factor per head and mask": (lambda s: _masked(_per_head(s)), -1, "aten.mul", f"{PRODUCT}they are scaled by aten."),
    "factor 0": (lambda s: s * 0.0, -1, "aten.mul", f"{PRODUCT}they are scaled by 0.0"),
    "bool added": (_bool_added, -1, "aten.ge", "a mask of bool is added to the scores"),
    "filled with 0": (lambda s: s.masked_fill(~_seen(), 0.0), -1, "aten.masked_fill", f"{PRODUCT}hidden keys get the"),
    "filled with -1e4": (lambda s: torch.where(_seen(), s, -1e4), -1, "aten.where",
                         f"{PRODUCT}hidden keys get the score -10000"),
    "two masks": (lambda s: _masked(s).masked_fill(_seen().flip(0), -1e38), -1, "aten.masked_fill",
                  f"{PRODUCT}a second mask"),
    "softmax over queries": (_masked, -2, "aten._softmax", "the softmax is over dim -2, not over the keys"),
}


def _spelled(spelling: str, change: Callable[[Tensor], Tensor], dim: int) -> Form:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if spelling == "einsum":
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
            return torch.einsum("bhqk,bkhd->bqhd", change(scores).softmax(dim), v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return (change(_scores(q, k)).softmax(dim) @ v).transpose(1, 2)

    return form


@pytest.mark.parametrize("spelling", ["matmul", "einsum"])
@pytest.mark.parametrize("name", STOPS)
def test_the_operation_that_stops_it_is_named_once(name: str, spelling: str) -> None:
    change, dim, operation, reason = STOPS[name]
    form = _spelled(spelling, change, dim)
    program, log = _fused(form, TOKENS_FIRST)
    (miss,) = [m for m in log.misses if m.rule == "lift_attention"]
    assert miss.reason.startswith(reason), miss.reason
    (node,) = [n for n in program.gm.graph.nodes if n.name == miss.node]
    assert short(node.target) == operation
    assert log.hits == []
    _agrees(form, program, TOKENS_FIRST)


def _hidden(rows: int) -> Tensor:
    """A lower triangle of each request, of the last one without its first ``rows`` keys: padding on the left."""
    shown = _seen().expand(B, 1, S, S).clone()
    shown[-1, ..., :rows] = False
    return ~shown


@pytest.mark.parametrize("fill", [INF, torch.finfo(torch.bfloat16).min, -1e30])
@pytest.mark.parametrize("spelling", ["fill", "add"])
def test_a_query_without_keys_gives_what_the_softmax_gives(fill: float, spelling: str) -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = _scores(q, k)
        if spelling == "add":
            return (scores + torch.zeros(B, 1, S, S, dtype=q.dtype).masked_fill(hidden, fill)).softmax(-1) @ v
        return scores.masked_fill(hidden, fill).softmax(-1) @ v

    inputs = (*MANY, _hidden(3))
    program = program_of(form, *inputs)
    normalise.run(program)
    assert fuse(program, (*catalog.LIFT, fused_infer_attention.RULE)).counts() == {"lift_attention": 1}
    found, plain = run(program, *inputs)[0][0], form(*inputs)
    exact = form(*(x.double() for x in MANY), inputs[3])
    assert torch.equal(found.isnan(), plain.isnan())
    assert bool(plain.isnan().any()) is (fill == INF)
    assert _error(found.nan_to_num(), exact.nan_to_num()) <= _error(plain.nan_to_num(), exact.nan_to_num())


@pytest.mark.parametrize("spelling", ["fill", "add"])
def test_lengths_that_may_hide_every_key_are_refused(spelling: str) -> None:
    """For a request of length 0 the fused op gives zeros, a softmax a mean or NaN; a position shows its own key."""
    lengths = torch.tensor([0, 5])

    def form(step: int) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
            shown = torch.arange(S) < (lengths + step)[:, None, None, None]
            lowest = torch.finfo(torch.bfloat16).min
            if spelling == "add":
                return (_scores(q, k) + torch.where(shown, 0.0, lowest).to(q.dtype)).softmax(-1) @ v
            return _scores(q, k).masked_fill(~shown, lowest).softmax(-1) @ v

        return attend

    inputs = (MANY[0][:, :, :1], *MANY[1:], lengths)
    for step in (0, 1):
        program, log = _fused(form(step), inputs)
        assert log.counts() == {"lift_attention": 1} | ({FUSE: 1} if step else {})
        assert any("a length below 1 leaves a query without a key" in m.reason for m in log.misses) is not bool(step)
        exact = form(step)(*(x.double() for x in inputs[:3]), lengths)
        plain = form(step)(*inputs)
        assert _error(run(program, *inputs)[0][0], exact) <= 1.5 * _error(plain, exact)


LIFT, FUSE = "lift_attention", "fused_infer_attention"
OTHER: dict[str, tuple[Form, tuple[Tensor, ...], str, str]] = {
    "values of the next group": (_values_of_the_next_group, FEW, LIFT, "keys and values are not one matrix for each"),
    "keys of two queries": (_keys_of_two_queries, MANY, LIFT, "the keys of a query are not one row of the scores"),
    "one query for all requests": (_one_query_for_all_requests, MANY, LIFT, "has not the rows of its result"),
    "one set of scores": (_one_set_of_scores, MANY, LIFT, "the scores are not a product of queries and keys over"),
    "no batch": (_no_batch, MANY, LIFT, "the scores are not a product of queries and keys over"),
    "dtypes": (_mixed, MANY, LIFT, "q, k, v and the result are not of one dtype"),
    "a mask per head": (_mask_per_head, MANY, LIFT, "what is put on the scores is no mask for all heads"),
    "a bool that is added": (_added(_seen), MANY, FUSE, "the mask is not provably causal"),
    "a weak fill": (_filled(lambda: ~_seen(), -1.0), MANY, LIFT, "the scores are not a product of queries and keys"),
    "first query without a key": (_filled(lambda: ~torch.ones(S, S, dtype=torch.bool).tril(-1)), MANY, FUSE,
                                  "the first query sees no key"),
    "later keys": (_filled(lambda: torch.ones(S, S, dtype=torch.bool).tril(-1)), MANY, FUSE,
                   "not of the form key <= query + past"),
    "a window": (_filled(lambda: ~(_seen() & torch.ones(S, S, dtype=torch.bool).triu(-3))), MANY, FUSE,
                 "the mask has 2 conditions"),
    "a triangle of small numbers": (_added(lambda: torch.triu(torch.full((S, S), -9.0), 1)), MANY, FUSE,
                                    "the mask is not provably causal"),
    "what is not 1": (_filled(lambda: torch.tril(torch.ones(S, S)) != 1), MANY, FUSE,
                      "the mask is not provably causal"),
    "scale behind the mask": (lambda q, k, v: ((q @ k.transpose(-1, -2)).masked_fill(~_seen(), -1e30) * SCALE)
                              .softmax(-1) @ v, MANY, LIFT, "the scores are not a product of queries and keys"),
}


@pytest.mark.parametrize("name", OTHER)
def test_something_else_is_refused_and_stays_right(name: str) -> None:
    form, inputs, rule, reason = OTHER[name]
    program, log = _fused(form, inputs)
    assert FUSE not in log.counts()
    assert any(m.rule == rule and reason in m.reason for m in log.attempts), [(m.rule, m.reason) for m in log.attempts]
    if "first query" not in name:
        _agrees(form, program, inputs)
