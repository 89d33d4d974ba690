"""Fused attention with lengths: exact forms of each layout, what is refused and why, numbers against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.engine.record import Log
from cannopy.fusion_rules.rewrite import fused_infer_attention
from cannopy.fx_passes import normalise
from cannopy.fx_passes.program import Program
from tests.passes.graphs import program_of, run
from tests.rules.support import fuse

Tensor = torch.Tensor
Form = Callable[..., Tensor | tuple[Tensor, ...]]
RULE = fused_infer_attention.RULE
B, S, L, N, K, D = 2, 3, 32, 4, 2, 32
PAST = torch.tensor(9)
OP = "air.npu_fused_infer_attention_score_v2.default"
BF16 = 2.0**-7


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    dialect.register_all()
    with target.using("atlas-a3"):
        yield


def _r(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False, gqa: bool = False) -> Tensor:
    out: Tensor = torch.ops.cannopy.attention(q, k, v, mask, 0.2, causal, gqa)
    return out


def repeated(x: Tensor, groups: int = N // K) -> Tensor:
    b, k, t, d = x.shape
    return x[:, :, None].expand(b, k, groups, t, d).reshape(b, k * groups, t, d)


def seen(past: Tensor, queries: int, keys: int = L) -> Tensor:
    """[1, 1, queries, keys]"""
    return (torch.arange(keys) <= (torch.arange(queries) + past)[:, None])[None, None]


def static(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    """Stock Llama and Qwen with a static cache."""
    return attention(q, repeated(k), repeated(v), seen(past, q.shape[2]).expand(B, 1, -1, -1))


def groups_in_the_op(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    return attention(q, k, v, seen(past, q.shape[2]), gqa=True)


def no_cache(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    """Keys of the step itself."""
    n = q.shape[2]
    return attention(q, k[:, :, :n], v[:, :, :n], None, causal=True, gqa=True) + 0 * past


def bidirectional(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    return attention(q, k, v, None, gqa=True) + 0 * past


def lengths_of_requests(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    lengths = torch.stack((past, past + 5))
    ahead = torch.arange(q.shape[2])
    return attention(q, k, v, torch.arange(L) <= (lengths[:, None] + ahead)[:, None, :, None], gqa=True)


FORMS: dict[str, tuple[Form, int, str]] = {
    "static, decode": (static, 1, "BNSD"),
    "static, prefill": (static, S, "BNSD_BSND"),
    "groups in the op": (groups_in_the_op, S, "BNSD_BSND"),
    "no cache": (no_cache, S, "BNSD_BSND"),
    "bidirectional": (bidirectional, S, "BNSD_BSND"),
    "lengths of requests": (lengths_of_requests, 1, "BNSD"),
    "lengths of requests, drafts": (lengths_of_requests, S, "BNSD_BSND"),
}


def operands(queries: int) -> tuple[Tensor, ...]:
    return _r(B, N, queries, D), _r(B, K, L, D, seed=1), _r(B, K, L, D, seed=2), PAST


def fused(form: Form, inputs: Sequence[Tensor], parameters: Sequence[int] = ()) -> tuple[Program, Program, Log]:
    """(the normalised program, the fused one, the log)"""
    programs = [program_of(form, *inputs) for _ in range(2)]
    for program in programs:
        for i in parameters:
            program.inputs[i] = replace(program.inputs[i], kind="parameter")
        normalise.run(program)
    return programs[0], programs[1], fuse(programs[1], (RULE,))


def layout(program: Program) -> str:
    (node,) = (n for n in program.gm.graph.nodes if str(n.target) == OP)
    return str(node.kwargs["input_layout"])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def agrees(form: Form, program: Program, inputs: Sequence[Tensor]) -> None:
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = form(*wide)
    wanted = exact if isinstance(exact, tuple) else (exact,)
    plain = form(*inputs)
    for found, old, true in zip(run(program, *inputs)[0], plain if isinstance(plain, tuple) else (plain,), wanted,
                                strict=True):
        assert error(found, true) <= max(1.5 * error(old, true), 1e-6)
        assert error(found, true) < BF16


@pytest.mark.parametrize("name", FORMS)
def test_fires_on_exact_forms(name: str) -> None:
    form, queries, wanted = FORMS[name]
    inputs = operands(queries)
    _, after, log = fused(form, inputs)
    assert log.counts() == {"fused_infer_attention": 1}
    assert log.misses == []
    assert layout(after) == wanted
    assert not any("expand" in str(n.target) and n.meta["val"].dim() == 5 for n in after.gm.graph.nodes)
    agrees(form, after, inputs)


ENDS = torch.tensor([4, 7])


def packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """Prompts of our zoo, one behind the other, heads behind the tokens."""
    index = torch.arange(q.shape[0])
    request = (index[:, None] >= ends[None, :]).sum(-1)
    mask = ((request[:, None] == request[None, :]) & (index[:, None] >= index[None, :]))[None, None]
    q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, mask, gqa=True).transpose(1, 2)[0]


@pytest.mark.parametrize("ends", [[4, 7], [7, 4], [9, 9], [0, 20], [-1, 3]], ids=str)
def test_prompts_end_wherever_the_ends_are(ends: list[int]) -> None:
    inputs = (_r(9, N, 128), _r(9, K, 128, seed=1), _r(9, K, 128, seed=2), torch.tensor(ends))
    _, after, log = fused(packed, inputs)
    assert log.counts() == {"fused_infer_attention": 1}
    assert layout(after) == "TND"
    assert not any("permute" in str(n.target) for n in after.gm.graph.nodes)
    agrees(packed, after, inputs)


def paged(q: Tensor, pages_k: Tensor, pages_v: Tensor, new_k: Tensor, new_v: Tensor, slots: Tensor, table: Tensor,
          lengths: Tensor) -> Tensor:
    """Decode of our zoo: all blocks of each request are gathered."""
    block, queries = pages_k.shape[1], q.shape[0] // B
    keys, values = (p.flatten(0, 1).index_copy(0, slots, n).view(p.shape)[table].flatten(1, 2)
                    for p, n in ((pages_k, new_k), (pages_v, new_v)))
    positions = lengths[:, None] - queries + torch.arange(queries)
    mask = torch.arange(table.shape[1] * block)[None, None, :] <= positions[:, :, None]
    q = q.view(B, queries, N, -1).transpose(1, 2)
    out = attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask[:, None], gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def paged_inputs(queries: int, block: int = 128) -> tuple[Tensor, ...]:
    tokens = B * queries
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    return (_r(tokens, N, D), _r(5, block, K, D, seed=1), _r(5, block, K, D, seed=2), _r(tokens, K, D, seed=3),
            _r(tokens, K, D, seed=4), torch.arange(tokens) + 3 * block, table, torch.tensor([block + 5, queries]))


@pytest.mark.parametrize(("queries", "block"), [(1, 16), (1, 128), (3, 128)])
def test_a_paged_cache_is_read_where_it_is(queries: int, block: int) -> None:
    inputs = paged_inputs(queries, block)
    _, after, log = fused(paged, inputs)
    assert log.counts() == {"fused_infer_attention": 1}
    assert layout(after) == "BSND"
    assert not any(str(n.target).startswith("aten.index.") for n in after.gm.graph.nodes), "nothing is gathered"
    agrees(paged, after, inputs)


def latent(q: Tensor, cache: Tensor, ropes: Tensor, new: Tensor, new_rope: Tensor, index: Tensor, kv_b: Tensor,
           past: Tensor) -> Tensor:
    """Stock DeepSeek with a static cache of latents: q [B, N, S, 192]."""
    b, n, s, _ = q.shape
    cache, ropes = cache.index_copy(2, index, new), ropes.index_copy(2, index, new_rope)
    both = torch.nn.functional.linear(cache, kv_b).view(b, -1, n, 256).transpose(1, 2)
    key = torch.cat((both[..., :128], ropes.expand(-1, n, -1, -1)), -1)
    query = torch.cat((q[..., :128], q[..., 128:] * 0.5), -1)
    return attention(query, key, both[..., 128:], seen(past, s, cache.shape[2]))


def latent_inputs(queries: int, length: int = 48) -> tuple[Tensor, ...]:
    return (_r(B, N, queries, 192), _r(B, 1, length, 512, seed=1), _r(B, 1, length, 64, seed=2),
            _r(B, 1, queries, 512, seed=3), _r(B, 1, queries, 64, seed=4), torch.arange(queries) + 9,
            _r(N * 256, 512, seed=5) / 20, PAST)


KV_B = 6


@pytest.mark.parametrize(("queries", "wanted"), [(1, "TND_NTD"), (16, "TND_NTD"), (17, "TND")])
def test_latents_are_attended_directly_by_few_queries(queries: int, wanted: str) -> None:
    inputs = latent_inputs(queries)
    _, after, log = fused(latent, inputs, [KV_B])
    assert log.counts() == {"fused_infer_attention": 1}
    assert layout(after) == wanted
    expands = any("linear" in str(n.target) for n in after.gm.graph.nodes)
    assert expands == (wanted == "TND")
    agrees(latent, after, inputs)


def _refusal(form: Form, inputs: Sequence[Tensor], parameters: Sequence[int] = ()) -> str:
    before, after, log = fused(form, inputs, parameters)
    assert "fused_infer_attention" not in log.counts()
    (miss,) = (m for m in log.misses if m.rule == RULE.name)
    assert all((miss.expected, miss.found, miss.remedy))
    for old, new in zip(run(before, *inputs)[0], run(after, *inputs)[0], strict=True):
        assert torch.equal(old, new)
    return miss.reason


def window(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    position = (torch.arange(q.shape[2]) + past)[:, None]
    near = torch.arange(L) > position - 8
    return attention(q, k, v, (seen(past, q.shape[2])[0, 0] & near)[None, None], gqa=True)


def bias(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    """ALiBi."""
    distance = (torch.arange(L) - torch.arange(q.shape[2])[:, None] - past).to(q.dtype)
    return attention(q, k, v, torch.where(seen(past, q.shape[2]), 0.1 * distance, float("-inf")).to(q.dtype), gqa=True)


def twice(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    return attention(q, k, v, seen(past, q.shape[2]), causal=True, gqa=True)


def padded(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    return attention(q, k, v, seen(past, q.shape[2]) & (k[:, :1, None, :, 0] > -9), gqa=True)


def no_batch(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    return attention(q[0], k[0], v[0], seen(past, q.shape[2])[0], gqa=True)


def hidden_prompts(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    index = torch.arange(q.shape[2])
    request = (index[:, None] >= ends[None, :]).sum(-1)
    return attention(q, k, v, (request[:, None] == request[None, :])[None, None], gqa=True)


def _first_sees_nothing(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    mask = torch.arange(L) <= torch.arange(q.shape[2])[:, None] - 1
    return attention(q, k, v, mask[None, None], gqa=True) + 0 * past


def keys_end_before_the_last_query(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    mask = torch.arange(4) <= torch.arange(q.shape[2])[:, None] + 2
    return attention(q, k[:, :, :4], v[:, :, :4], mask[None, None], gqa=True) + 0 * past


def fewer_keys_than_queries(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    return attention(q, k[:, :, :2], v[:, :, :2], None, causal=True, gqa=True) + 0 * past


def lengths_of_heads(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    """A mask [N, S, T] with as many heads as requests."""
    lengths = torch.stack((past, past + 5))
    return attention(q[:, :B], k, v, torch.arange(L) <= lengths[:, None, None], gqa=True)


def prompts_of_two_rows(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    index = torch.arange(q.shape[2])
    request = (index[:, None] >= ends[None, :]).sum(-1)
    mask = (request[:, None] == request[None, :]) & (index[:, None] >= index[None, :])
    return attention(q, k, v, mask[None, None], gqa=True)


def ring(rows: Callable[[Tensor], Tensor]) -> Form:
    """A cache that is written at ``rows(position)``: behind its last row the mask shows all of it."""
    def form(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
        index = rows(past + torch.arange(q.shape[2]))
        k, v = k.index_copy(2, index, q[:, :K]), v.index_copy(2, index, q[:, :K])
        return attention(q, k, v, seen(past, q.shape[2]), gqa=True)

    return form


def ring_bounded(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    """The same for one query, with a mask by the last row that there is."""
    k, v = (x.index_copy(2, (past % L).view(1), q[:, :K]) for x in (k, v))
    return attention(q, k, v, seen(past.clamp(max=L - 1), 1), gqa=True)


RINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "remainder": lambda p: p % L,
    "bits": lambda p: p & (L - 1),
    "cut": lambda p: p.clamp(max=L - 1),
    "selected": lambda p: torch.where(p < L, p, p - L),
}


@pytest.mark.parametrize("queries", [1, S])
@pytest.mark.parametrize("name", RINGS)
def test_refuses_positions_behind_the_last_row_of_a_ring(name: str, queries: int) -> None:
    past = torch.tensor(L + 2) if name in ("remainder", "selected") or queries == 1 else PAST
    assert "may lie behind the last of" in _refusal(ring(RINGS[name]), (*operands(queries)[:3], past))


@pytest.mark.parametrize("position", [9, L + 2])
def test_a_ring_with_a_bounded_mask_fuses(position: int) -> None:
    inputs = (*operands(1)[:3], torch.tensor(position))
    _, program, log = fused(ring_bounded, inputs)
    assert log.counts() == {"fused_infer_attention": 1}
    agrees(ring_bounded, program, inputs)


REFUSED: dict[str, tuple[Form, Callable[[], tuple[Tensor, ...]], str]] = {
    "sliding window": (window, lambda: operands(S), "has 2 conditions"),
    "bias": (bias, lambda: operands(S), "not provably causal by cache position"),
    "mask and is_causal": (twice, lambda: operands(S), "the attention has a mask and is_causal at once"),
    "no key for the first query": (_first_sees_nothing, lambda: operands(S), "the first query sees no key"),
    "padding": (padded, lambda: operands(S), "a padding or custom mask stays a tensor"),
    "three dims": (no_batch, lambda: operands(S), "the attention is not over [B, N, S, D] with one batch"),
    "fp32": (static, lambda: (*(x.float() for x in operands(1)[:3]), PAST), "clause query-dtype"),
    "odd head dim": (static, lambda: (_r(B, N, 1, 24), _r(B, K, L, 24), _r(B, K, L, 24), PAST), "head-dim-multiple"),
    "packed head dim": (packed, lambda: (_r(9, N, 64), _r(9, K, 64), _r(9, K, 64), ENDS), "head-dim-packed"),
    "requests without order": (hidden_prompts, lambda: (_r(1, N, 9, 128), _r(1, K, 9, 128), _r(1, K, 9, 128), ENDS),
                               "not provably causal"),
    "fewer keys than the mask shows": (keys_end_before_the_last_query, lambda: operands(S), "behind the last key"),
    "is_causal with fewer keys": (fewer_keys_than_queries, lambda: operands(S), "behind the last key"),
    "lengths of heads": (lengths_of_heads, lambda: operands(1), "those of heads, not of requests"),
    "packed prompts in two rows": (prompts_of_two_rows, lambda: (_r(B, N, 9, 128), _r(B, K, 9, 128), _r(B, K, 9, 128),
                                                                 ENDS), "not provably causal"),
    "small blocks for drafts": (paged, lambda: paged_inputs(3, 16), "block-multiple-many"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    form, inputs, reason = REFUSED[name]
    assert reason in _refusal(form, inputs())


def test_refuses_latents_in_a_cache_that_blocks_do_not_divide() -> None:
    assert "is not a multiple of 16" in _refusal(latent, latent_inputs(1, 42), [KV_B])


def test_refuses_a_projection_that_is_computed() -> None:
    assert "kv_b_proj" in _refusal(latent, latent_inputs(1))


def test_refuses_expanded_values_of_another_width() -> None:
    def narrow(q: Tensor, *rest: Tensor) -> Tensor:
        cache, ropes, new, new_rope, index, kv_b, past = rest
        cache, ropes = cache.index_copy(2, index, new), ropes.index_copy(2, index, new_rope)
        both = torch.nn.functional.linear(cache, kv_b[: N * 192]).view(B, -1, N, 192).transpose(1, 2)
        key = torch.cat((both[..., :128], ropes.expand(-1, N, -1, -1)), -1)
        return attention(torch.cat((q[..., :128], q[..., 128:] * 0.5), -1), key, both[..., 128:],
                         seen(past, q.shape[2], cache.shape[2]))

    assert "value-shape" in _refusal(narrow, latent_inputs(17))


def test_latents_with_fewer_heads_than_queries_are_no_latents_of_each_head() -> None:
    def halved(q: Tensor, *rest: Tensor) -> Tensor:
        cache, ropes, new, new_rope, index, kv_b, past = rest
        cache, ropes = cache.index_copy(2, index, new), ropes.index_copy(2, index, new_rope)
        both = torch.nn.functional.linear(cache, kv_b[: K * 256]).view(B, -1, K, 256).transpose(1, 2)
        key = torch.cat((both[..., :128], ropes.expand(-1, K, -1, -1)), -1)
        return attention(torch.cat((q[..., :128], q[..., 128:] * 0.5), -1), key, both[..., 128:],
                         seen(past, q.shape[2], cache.shape[2]), gqa=True)

    assert "value-shape" in _refusal(halved, latent_inputs(1), [KV_B])


def test_refuses_without_torchairs_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_infer_attention, "torchair_op", lambda name: None)
    assert "this torchair has no fused attention" in _refusal(static, operands(1))
