"""Loops over experts, as models write them: replaced by something equal that captures, or left with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cannopy
from cannopy.frontend import experts
from cannopy.frontend.capture import capture
from cannopy.frontend.errors import CaptureError

Tensor = torch.Tensor
EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 16, 12


class Mlp(nn.Module):
    def __init__(self, inner: int = INNER, act: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)
        self.act_fn = act()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class Listed(nn.Module):
    """transformers 4.57: DeepSeek-V3; with identities behind the MLPs LongCat."""

    def __init__(self, zero: int = 0, make: Callable[[int], nn.Module] = lambda i: Mlp()) -> None:
        super().__init__()
        self.experts = nn.ModuleList([make(i) for i in range(EXPERTS)] + [nn.Identity() for _ in range(zero)])
        self.gate = nn.Linear(HIDDEN, EXPERTS + zero, bias=False)

    def moe(self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
        final_hidden_states = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
        expert_mask = F.one_hot(topk_indices, num_classes=len(self.experts))
        expert_mask = expert_mask.permute(2, 0, 1)
        for expert_idx in range(len(self.experts)):
            expert = self.experts[expert_idx]
            mask = expert_mask[expert_idx]
            token_indices, weight_indices = torch.where(mask)
            if token_indices.numel() > 0:
                expert_weights = topk_weights[token_indices, weight_indices]
                expert_output = expert(hidden_states[token_indices])
                final_hidden_states.index_add_(0, token_indices, expert_output * expert_weights.unsqueeze(-1))
        return final_hidden_states.type(hidden_states.dtype)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, HIDDEN)
        weights, ids = self.gate(flat).float().sigmoid().topk(TOP_K, -1)
        return self.moe(flat, ids, weights).view(x.shape)


class Block(nn.Module):
    """transformers 4.57: Mixtral, Qwen2-MoE, Qwen3-MoE: router and loop in one method."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Mlp() for _ in range(EXPERTS)])
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.num_experts = EXPERTS

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        routing_weights = F.softmax(self.gate(hidden_states), dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, TOP_K, dim=-1)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final = torch.zeros((batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype)
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch_size, sequence_length, hidden_dim)


class Squared(Listed):
    """A look-alike: weights are squared."""

    def moe(self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for i in range(len(self.experts)):
            rows, places = torch.where(topk_indices == i)
            out = self.experts[i](hidden_states[rows]) * topk_weights[rows, places, None] ** 2
            total.index_add_(0, rows, out.to(total.dtype))
        return total


class Once(Listed):
    """A look-alike: an expert that a token chose twice counts once."""

    def moe(self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for i in range(len(self.experts)):
            rows, places = torch.where((topk_indices == i) & ((topk_indices == i).cumsum(1) == 1))
            out = self.experts[i](hidden_states[rows]) * topk_weights[rows, places, None]
            total.index_add_(0, rows, F.one_hot(topk_indices).sum() * 0 + out)
        return total


def _mixed_kinds(i: int) -> nn.Module:
    return Mlp() if i else nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))


FORMS: dict[str, Callable[[], nn.Module]] = {
    "list": Listed,
    "zero experts": lambda: Listed(zero=3),
    "router and loop": Block,
    "gelu": lambda: Listed(make=lambda i: Mlp(act=nn.GELU)),
    "experts of two sizes": lambda: Listed(make=lambda i: Mlp(INNER + i)),
    "experts of two kinds": lambda: Listed(make=_mixed_kinds),
}


def _built(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return make().to(dtype).eval().requires_grad_(False), torch.randn(2, 3, HIDDEN).to(dtype)


@pytest.mark.parametrize("name", FORMS)
def test_the_twin_computes_the_same_and_captures(name: str) -> None:
    model, x = _built(FORMS[name])
    before = {n: p.clone() for n, p in model.named_parameters()}
    attributes = dict(model.__dict__)
    twin = experts.capturable(model)
    assert twin.refused == ()
    assert twin.replaced == ("",)
    assert twin.model is not model
    assert type(model) is type(_built(FORMS[name])[0])
    assert model.__dict__ == attributes
    assert all(p is dict(twin.model.named_parameters())[n] for n, p in model.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(twin.model(x), model(x), rtol=1e-5, atol=1e-6)
    program = capture(model, "forward", (x,), {})
    assert all(s.source.startswith(("self.", "args")) for s in program.inputs)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("cls", [Squared, Once])
def test_a_look_alike_stays_and_capture_says_why(cls: type[nn.Module]) -> None:
    model, x = _built(cls)
    twin = experts.capturable(model)
    assert twin.model is model
    (reason,) = twin.refused
    assert "test_experts.py" in reason
    with pytest.raises(CaptureError, match="this loop was not replaced"):
        capture(model, "forward", (x,), {})


def test_uneven_choices_are_part_of_the_check() -> None:
    class Favourite(Listed):
        """Differs only for an expert that every token chose."""

        def moe(self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
            total = torch.zeros_like(hidden_states)
            for i in range(len(self.experts)):
                rows, places = torch.where(topk_indices == i)
                out = self.experts[i](hidden_states[rows]) * topk_weights[rows, places, None]
                total.index_add_(0, rows, out * (2 if rows.numel() == topk_indices.numel() else 1))
            return total

    model, _ = _built(Favourite)
    assert any("results differ" in reason for reason in experts.capturable(model).refused)


@pytest.mark.parametrize("architecture", ["LongcatFlash", "DeepseekV3", "Qwen3Moe"])
def test_stock_loops_of_transformers(architecture: str) -> None:
    import transformers

    sizes = {
        "LongcatFlash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "num_layers": 1, "n_routed_experts": 8,
                         "zero_expert_num": 4, "moe_topk": 3, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8,
                         "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        "DeepseekV3": {"intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 1, "kv_lora_rank": 16,
                       "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
                       "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
                       "num_key_value_heads": 2},
        "Qwen3Moe": {"intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 1, "num_experts": 8,
                     "num_experts_per_tok": 2, "head_dim": 16, "num_key_value_heads": 2},
    }[architecture]
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=64, hidden_size=32, num_attention_heads=2, max_position_embeddings=64, **sizes)
    extra = {} if architecture == "LongcatFlash" else {"experts_implementation": "eager"}
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")._from_config(config, **extra).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
        twin = experts.capturable(model)
        assert len(twin.replaced) == 1, twin.refused
        ids = torch.randint(0, 64, (2, 5), generator=generator)
        torch.testing.assert_close(twin.model(ids, use_cache=False).logits, model(ids, use_cache=False).logits,
                                   rtol=1e-4, atol=1e-5)


def test_compiled_fused_and_loaded_again(tmp_path: Path) -> None:
    model, x = _built(Listed, torch.bfloat16)
    options = cannopy.Options(cache_dir=tmp_path)
    with torch.no_grad():
        expected = copy.deepcopy(model).float()(x.float()).double()
    for status in ("miss", "hit"):
        compiled = cannopy.compile(model, example_inputs=(x,), options=options)
        assert compiled.report.cache["status"] == status
        assert compiled.report.fusions["moe_experts"] == 1
        error = (compiled(x).double() - expected).norm() / expected.norm()
        assert float(error) < 0.01
    with torch.no_grad():
        model.experts[1].up_proj.weight.mul_(-1)  # a weight that went into a stack
        changed = copy.deepcopy(model).float()(x.float()).double()
        assert float((compiled(x).double() - changed).norm() / changed.norm()) < 0.01
        assert float((changed - expected).norm() / expected.norm()) > 0.1
