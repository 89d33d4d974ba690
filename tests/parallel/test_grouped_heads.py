"""Heads of keys cut with the caches that hold them: all ranks against eager, and their parts of the caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cannopy
from cannopy.frontend.serving import ServingCase
from cannopy.fx_passes.parallel import Parallel, ParallelError
from cannopy.models import qwen
from cannopy.models.parts import attend, rotate_halves
from cannopy.parity.serving import fill
from tests.parallel import lockstep, lockstep_experts, ranks

LAYERS = {"num_hidden_layers": 2}
REPLICATED = {"num_attention_heads": 8, "num_key_value_heads": 2}
MODELS = [
    ("qwen2.5", "decode", "attn_tp=2,dense_tp=2,embed_tp=2,lm_head_tp=2", {}),
    ("qwen2.5", "prefill", "attn_tp=4,dense_tp=2", {}),
    ("qwen2.5", "decode", "attn_tp=4,dp=2", REPLICATED),
    ("qwen3-moe", "decode", "attn_tp=2,ep=2", {}),
    ("qwen3-moe", "prefill", "attn_tp=4,moe_tp=4", {"num_attention_heads": 8, "num_key_value_heads": 4}),
]


def caches(found: lockstep.Rank) -> dict[str, torch.Tensor]:
    return {name: t for name, t in found.inputs.items() if name.endswith(("_key", "_value", "_keys", "_values"))}


def compare(case: ranks.Case, parallel: str, args: ranks.Call, slots: torch.Tensor | None = None,
            ) -> list[lockstep.Rank]:
    """Every rank gives what one die gives; its caches are heads of the whole ones, of which it writes ``slots``.

    Partial sums are bfloat16: errors are within 1.5 times eager's own of 1e-2. A head of another group is off by 1.
    """
    programs = ranks.cuts(case, parallel)
    given = [ranks.values(case, program, args) for program in programs]
    (single,) = lockstep.run([case.program], [ranks.values(case, case.program, args)])
    found = lockstep.run(programs, given, lockstep_experts.joint())
    for rank, program, before in zip(found, programs, given, strict=True):
        for ours, expected in zip(rank.outputs, single.outputs, strict=True):
            assert float((ours.double() - expected.double()).norm() / expected.double().norm()) < 1.5e-2
        assert caches(rank)
        for name, ours in caches(rank).items():
            held = program.spec(name).held
            expected = single.inputs[name] if held is None else held.of(single.inputs[name])
            torch.testing.assert_close(ours, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
            same = (ours == before[name]).flatten(2).all(-1).flatten()
            if slots is not None:
                assert not same[slots].any()
                same[slots] = True
                assert same.all()
    return found


@pytest.mark.parametrize(("name", "phase", "parallel", "sizes"), MODELS, ids=[f"{m[0]} {m[1]} {m[2]}" for m in MODELS])
def test_models(name: str, phase: str, parallel: str, sizes: dict[str, int]) -> None:
    case = ranks.serving(name, phase, (3, 17, 4), **LAYERS, **sizes)
    size = Parallel.parse(parallel).attn_tp
    assert lockstep.collectives(ranks.cut(case.program, f"attn_tp={size}", 1)) == {"all_reduce attn_tp": 2}
    for report in ranks.check(case, parallel, lockstep_experts.joint()):
        assert report.passed, report.failures
    args = case.call(1)
    compare(case, f"attn_tp={size}", args, args[-2])


@pytest.mark.parametrize("next_n", range(4))
def test_drafts(next_n: int) -> None:
    model = ranks.serving("qwen2.5", **LAYERS).model

    def call(seed: int) -> ranks.Call:
        source = ServingCase(model, 3, 150, 256, seed, next_n)  # type: ignore[arg-type]
        requests = source.new_requests()
        fill(requests.cache, seed)
        requests.lengths = source.prompt_lengths
        return source.decode(source.ids("decode"), requests)[0]

    compare(ranks.of(model, "decode", call), "attn_tp=2", call(0), call(0)[-2])


def test_caches_and_weights_of_a_rank() -> None:
    """Rank 3 of 4 has the second head of two, which it shares with rank 2; norms and embeddings are whole."""
    case = ranks.serving("qwen3-moe", **LAYERS)
    program = ranks.cut(case.program, "attn_tp=4", 3)
    held = {spec.held for spec in program.inputs if spec.kind == "state"}
    assert [(h.dim, h.start, h.stop, h.size) for h in held if h is not None] == [(2, 1, 2, 2)]
    recipes = {e.name: e.recipe for e in program.weights if "layers_0_self_attn" in e.name}
    assert {n.rpartition("attn_")[2]: r for n, r in recipes.items()} == {
        "q_proj_weight_part": "w[0][384:512]", "k_proj_weight_part": "w[0][128:256]",
        "v_proj_weight_part": "w[0][128:256]", "o_proj_weight_part": "w[0][:, 384:512]"}
    kernels = [n for n in program.gm.graph.nodes if "fused_infer" in str(n.target)]
    assert [(n.kwargs["num_query_heads"], n.kwargs["num_key_value_heads"]) for n in kernels] == [(1, 1)] * 2


class Stock(nn.Module):
    """A model of transformers called by position."""

    def __init__(self, architecture: str, **sizes: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{architecture}Config")(
            vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, intermediate_size=512, **sizes)
        torch.manual_seed(0)
        self.model = getattr(transformers, f"{architecture}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
        self.eval()

    def step(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, past_key_values=cache, use_cache=True).logits
        return logits

    def call(self, tokens: int, past: int, seed: int, sequences: int = 2) -> ranks.Call:
        """``tokens`` of ``sequences`` behind ``past`` random ones."""
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=64)
        generator = torch.Generator().manual_seed(seed)
        for layer in cache.layers:
            layer.lazy_initialization(*(torch.zeros(sequences, 2, 0, 64, dtype=torch.bfloat16) for _ in range(2)))
            for t in (layer.keys, layer.values):
                t.copy_(torch.randn(t.shape, generator=generator))
            layer.cumulative_length.fill_(past)
        return torch.randint(0, 512, (sequences, tokens), generator=generator), cache


@pytest.mark.parametrize(("architecture", "sizes"), [
    ("Qwen2", {}), ("Qwen3", {}), ("Llama", {"attention_bias": True}),
    ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128})])
def test_stock(architecture: str, sizes: dict[str, Any]) -> None:
    """Llama's attention_bias puts a bias on the output projection, which is added once."""
    model = Stock(architecture, **sizes)
    for tokens, past, parallel in ((1, 20, "attn_tp=2,dense_tp=2"), (7, 0, "attn_tp=4")):
        case = ranks.of(model, "step", lambda seed, n=tokens, p=past: model.call(n, p, seed))
        if architecture == "Qwen3Moe":
            parallel = "attn_tp=2,ep=2"
        compare(case, parallel, model.call(tokens, past, 1))


class Repeated(qwen.GroupedAttention):
    """Query head h reads head h % K of the keys."""

    def forward(self, x: torch.Tensor, angles: Any, step: Any, pages: qwen.KeyValuePages) -> torch.Tensor:
        cos, sin = (a[:, None] for a in angles)
        query, key, value = (p(x).unflatten(-1, (-1, self.config.head_dim))
                             for p in (self.q_proj, self.k_proj, self.v_proj))
        exchanged = step.exchange(pages.key, rotate_halves(key, cos, sin)), step.exchange(pages.value, value)
        repeated = (x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(2, 3) for x in exchanged)
        out = attend(step.grouped(rotate_halves(query, cos, sin)), *repeated, step.mask, self.config.head_dim**-0.5)
        y: torch.Tensor = self.o_proj(step.packed(out).flatten(1))
        return y


class Put(qwen.GroupedAttention):
    """Writes by block and place in it, and reads rows of a cache that no kernel sees as paged."""

    def forward(self, x: torch.Tensor, angles: Any, step: Any, pages: qwen.KeyValuePages) -> torch.Tensor:
        cos, sin = (a[:, None] for a in angles)
        query, key, value = (p(x).unflatten(-1, (-1, self.config.head_dim))
                             for p in (self.q_proj, self.k_proj, self.v_proj))
        for cache, rows in ((pages.key, rotate_halves(key, cos, sin)), (pages.value, value)):
            cache[step.slots // 128, step.slots % 128] = rows
        keys, values = (cache[step.block_table].flatten(1, 2) for cache in (pages.key, pages.value))
        out = attend(step.grouped(rotate_halves(query, cos, sin)), keys, values, step.mask, self.config.head_dim**-0.5)
        y: torch.Tensor = self.o_proj(step.packed(out).flatten(1))
        return y


class Watched(qwen.GroupedAttention):
    """Adds a number that is made of all heads of keys."""

    def forward(self, x: torch.Tensor, angles: Any, step: Any, pages: qwen.KeyValuePages) -> torch.Tensor:
        return super().forward(x, angles, step, pages) + self.k_proj(x).mean()


class Uncausal(qwen.GroupedAttention):
    """Attention with a bias on its mask, which no kernel takes."""

    def forward(self, x: torch.Tensor, angles: Any, step: Any, pages: qwen.KeyValuePages) -> torch.Tensor:
        step.mask = torch.where(step.mask, 0.25, float("-inf")).to(x.dtype)
        return super().forward(x, angles, step, pages)


def changed(attention: type[qwen.GroupedAttention] = qwen.GroupedAttention, phase: str = "decode",
            bias: bool = False) -> ranks.Case:
    """A tiny model of one layer with another attention, which no other test gets."""
    ranks.serving.cache_clear()
    case = ranks.serving("qwen2.5", phase, (3, 17, 4), num_hidden_layers=1)
    ranks.serving.cache_clear()
    found: Any = case.model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    found.__class__ = attention
    if bias:
        found.o_proj.bias = nn.Parameter(torch.full((512,), 3.0, dtype=torch.bfloat16))
    return ranks.of(case.model, case.method, case.call)


def test_a_bias_behind_heads_is_added_once() -> None:
    case = changed(bias=True)
    compare(case, "attn_tp=2", case.call(1), case.call(1)[-2])


def test_caches_written_by_two_indices() -> None:
    case = changed(Put)
    program = ranks.cut(case.program, "attn_tp=2", 1)
    assert "index_put" in str(program.gm.graph)
    assert all(spec.held is not None for spec in program.inputs if spec.kind == "state")
    compare(case, "attn_tp=2", case.call(1), case.call(1)[-2])


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_heads_in_another_order(phase: str) -> None:
    """Two query heads in a row need both heads of keys, so that all ranks have whole caches, and one is no part."""
    case = changed(Repeated, phase)
    assert all(spec.held is None for spec in ranks.cut(case.program, "attn_tp=2", 1).inputs)
    compare(case, "attn_tp=2", case.call(1))
    with pytest.raises(ParallelError, match="are no whole parts of"):
        ranks.cut(case.program, "attn_tp=4", 0)


def test_other_readers_of_keys() -> None:
    for phase in ("decode", "prefill"):
        with pytest.raises(ParallelError, match=r"reads all of linear.*, which is spread over dies"):
            ranks.cut(changed(Watched, phase).program, "attn_tp=2", 0)


def test_attention_that_was_not_fused() -> None:
    case = changed(Uncausal)
    options = cannopy.Options(phase="decode", parallel=Parallel(attn_tp=2), rank=0, use_cache=False)
    with pytest.raises(ParallelError, match=r"it was not fused into an attention of the device, `cannopy explain` says "
                                            r"why: the mask is not provably causal.*; leave the causal mask to the"):
        cannopy.compile(case.model, "decode", case.call(0), options=options)


def test_refused() -> None:
    odd = ranks.serving("qwen2.5", num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2)
    tiny = ranks.serving("qwen2.5", num_hidden_layers=1)
    for case, parallel, words in (
        (odd, "attn_tp=3", "6 query heads share 2 heads of keys: neither 2 / 3 nor 3 / 2 is a whole number; take a"),
        (odd, "attn_tp=4", "6 attention heads cannot be divided: 6 / 4 is no whole number"),
        (tiny, "kvp=2", "2 heads of keys in layout BSND: only caches of latents"),
    ):
        with pytest.raises(ParallelError, match=words):
            ranks.cut(case.program, parallel, 0)
    prompts = ranks.serving("qwen2.5", "prefill", num_hidden_layers=1).program
    with pytest.raises(ParallelError, match="holds heads of keys, which kvp does not cut: it is for caches of latents"):
        ranks.cut(prompts, "kvp=2", 0)
