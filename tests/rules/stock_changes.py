"""Stock models with one thing changed in their source or data, and what `explain` has to say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from cannopy.models.lively import lively_
from tests.rules import support

LAYERS = 2
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Patch = pytest.MonkeyPatch


def dense() -> nn.Module:
    """Qwen3 of two equal layers."""
    config = Qwen3Config(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, head_dim=32,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def mlp_norms(model: nn.Module) -> list[Any]:
    """The norm in front of each MLP."""
    return [layer.post_attention_layernorm for layer in model.model.layers]  # type: ignore[union-attr, attr-defined]


def qwen(model: nn.Module | None = None) -> Call:
    """A step of four tokens without a cache."""
    return model or dense(), (torch.ones(1, 4, dtype=torch.long),), {"use_cache": False}


def deepseek(**changes: Any) -> Call:
    """A decode step of DeepSeek-V3.2; its layers are dense but for ``first_k_dense_replace``."""
    extra = changes.pop("extra", {})
    model = support.build(**{"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS, **changes})
    args, kwargs = support.inputs(model, 1)
    return model, args, kwargs | extra


def eps_is_a_tensor(_: Patch) -> Call:
    model = dense()
    for norm in mlp_norms(model):
        norm.variance_epsilon = nn.Parameter(torch.tensor(1e-6))
    return qwen(model)


def another_power(patch: Patch) -> Call:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.float32)
        variance = wide.pow(4).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)

    patch.setattr(qwen3.Qwen3RMSNorm, "forward", forward)
    return qwen()


def product_in_float32(patch: Patch) -> Call:
    def forward(self: Any, x: Tensor) -> Tensor:
        wide = self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()
        return self.down_proj((2 * wide).to(x.dtype))

    patch.setattr(qwen3.Qwen3MLP, "forward", forward)
    return qwen()


def gamma_for_all(_: Patch) -> Call:
    model = dense()
    for norm in mlp_norms(model):
        norm.weight = nn.Parameter(norm.weight[:1])
    return qwen(model)


def gate_read_elsewhere(patch: Patch) -> Call:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x)) + gate.amax()

    patch.setattr(qwen3.Qwen3MLP, "forward", forward)
    return qwen()


class WithGates(nn.Module):
    """Returns the gate projections of the MLPs beside their results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.mlp for layer in model.model.layers)  # type: ignore[union-attr, attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        gates = []
        for mlp in self.layers:
            gates.append(mlp.gate_proj(x))  # type: ignore[operator]
            x = x + mlp(x)
        return x, *gates


def gate_returned(_: Patch) -> Call:
    return WithGates(dense()), (torch.ones(4, 64, dtype=torch.bfloat16),), {}


def rotation_operands_swapped(patch: Patch) -> Call:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        q_embed = qwen3.rotate_half(q) * sin - q * cos
        return q_embed, k * cos + qwen3.rotate_half(k) * sin

    patch.setattr(qwen3, "apply_rotary_pos_emb", rotate)
    return qwen()


def mask_from_outside(_: Patch) -> Call:
    return deepseek(extra={"attention_mask": torch.ones(1, 1, 1, 64, dtype=torch.bool)})


def cache_written_twice(patch: Patch) -> Call:
    once = StaticCache.update

    def update(self: Any, keys: Tensor, values: Tensor, index: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = once(self, keys, values, index, *args, **kwargs)
        self.layers[index].keys.index_copy_(2, torch.zeros(1, dtype=torch.long), keys)
        return found

    patch.setattr(StaticCache, "update", update)
    return deepseek()


def width_1280(_: Patch) -> Call:
    return deepseek(hidden_size=1280)


def not_renormalised(_: Patch) -> Call:
    return deepseek(norm_topk_prob=False, first_k_dense_replace=0)


def no_low_rank_queries(_: Patch) -> Call:
    """DeepSeek-V3 as published with q_lora_rank None: one projection makes the queries."""
    sizes = {k: v for k, v in support.SIZES.items() if not k.startswith("index_")}
    sizes |= {"q_lora_rank": None, "num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS}
    model = DeepseekV3ForCausalLM._from_config(
        DeepseekV3Config(**sizes), dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    args, kwargs = support.inputs(lively_(model, 0), 1)
    return model, args, kwargs


@dataclass(frozen=True)
class Said:
    """Of ``rule``: kind, and a part each of expected, found, source line and remedy; the clause of a contract."""

    rule: str
    kind: str
    expected: str
    found: str
    line: str
    remedy: str
    clause: str = ""


CHANGES: dict[str, tuple[Callable[[Patch], Call], Said]] = {
    "eps is a tensor": (eps_is_a_tensor, Said(
        "lift_rms_norm", "constant", "a number (eps)", "an input or weight float32[]", "torch.rsqrt",
        "make eps a Python number")),
    "another constant": (another_power, Said(
        "lift_rms_norm", "constant", "the number = 2", "4", "wide.pow(4)", "use the number = 2")),
    "dtype": (product_in_float32, Said(
        "swiglu", "dtype", "bfloat16", "float32", "wide = ", "cast the product to torch.bfloat16")),
    "shape": (gamma_for_all, Said("lift_rms_norm", "shape", "[64]", "[1]", "self.weight *", "one entry for each")),
    "reader": (gate_read_elsewhere, Said(
        "swiglu", "reader", "no reader outside", "stock_changes.py:", "gate = self.gate_proj(x)", "stock_changes.py:")),
    "output": (gate_returned, Said(
        "swiglu", "output", "no reader outside", "the method returns it", "gate_proj", "do not return")),
    "order": (rotation_operands_swapped, Said(
        "lift_rotary_half", "order", "aten.sub of", "the other way round", "* sin - q * cos", "swap the operands")),
    "mask": (mask_from_outside, Said(
        "sparse_flash_attention", "mask", "causal by position", "", "", "causal mask to the model")),
    "cache": (cache_written_twice, Said(
        "mla_prolog", "operand", "the same index", "", "cache_position = ", "let both places read")),
    "low rank": (no_low_rank_queries, Said(
        "mla_prolog", "operand", "the chains of MLA", "cannopy.rms_norm", "self.weight * hidden_states",
        "with q_lora_rank")),
    "contract": (width_1280, Said(
        "mla_prolog", "contract", "7168", "1280", "", "npu_mla_prolog_v3 on atlas-a3 takes", "npu_mla_prolog_v3.")),
    "missing": (not_renormalised, Said(
        "moe_gating_top_k", "missing", "a division by (sum", "aten.mul float32", "gather", "norm_topk_prob=True")),
}
