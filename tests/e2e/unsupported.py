"""Attention as models outside of the zoo have it, on a small model of the zoo: one thing is changed in its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cannopy.models import qwen
from cannopy.models.lively import lively_
from cannopy.models.parts import Rotary

Patch = pytest.MonkeyPatch
SIZES = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 128}


def model(**changes: int | bool) -> qwen.Qwen:
    """Two layers in bf16; ``changes`` are sizes."""
    sizes = qwen.QwenConfig(**{**SIZES, **changes})  # type: ignore[arg-type]
    return lively_(qwen.Qwen(sizes).bfloat16(), 0).eval().requires_grad_(False)  # type: ignore[return-value]


def scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """``[groups, heads, queries, keys]`` of `attend`'s operands."""
    keys = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    return torch.einsum("gqhd,gkhd->ghqk", query, keys) * scale


def weighted(probs: Tensor, query: Tensor, value: Tensor) -> Tensor:
    """The sum over the keys, in the shape of ``query``."""
    values = value.repeat_interleave(query.shape[2] // value.shape[2], dim=2)
    return torch.einsum("ghqk,gkhd->gqhd", probs.to(value.dtype), values)


def softcap(patch: Patch) -> qwen.Qwen:
    """Scores are bent by tanh, as Gemma 2 does."""
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        bent = 5.0 * torch.tanh(scores(query, key, scale) / 5.0)
        wide = torch.promote_types(bent.dtype, torch.float32)
        return weighted(bent.masked_fill(~mask[:, None], -torch.inf).softmax(-1, dtype=wide), query, value)

    patch.setattr(qwen, "attend", attend)
    return model()


def sliding_window(patch: Patch) -> qwen.Qwen:
    """Keys further back than eight are masked."""
    once = qwen.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        last = mask.sum(-1, keepdim=True) - 1
        near = torch.arange(key.shape[1]) > last - 8
        return once(query, key, value, mask & near, scale)

    patch.setattr(qwen, "attend", attend)
    return model()


def sinks(patch: Patch) -> qwen.Qwen:
    """A learned score per head takes part in the softmax and has no value (gpt-oss)."""
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        found = scores(query, key, scale).masked_fill(~mask[:, None], -torch.inf)
        sink = torch.tensor([0.5, -0.25], dtype=found.dtype).view(1, -1, 1, 1).expand(*found.shape[:3], 1)
        wide = torch.promote_types(found.dtype, torch.float32)
        probs = torch.cat((found, sink), dim=-1).softmax(-1, dtype=wide)[..., :-1]
        return weighted(probs, query, value)

    patch.setattr(qwen, "attend", attend)
    return model()


def alibi(patch: Patch) -> qwen.Qwen:
    """A slope per head times the distance is added to the scores."""
    once = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        distance = (torch.arange(key.shape[1]) - (mask.sum(-1, keepdim=True) - 1)).to(query.dtype)
        slopes = torch.tensor([0.25, 0.0625], dtype=query.dtype).view(1, -1, 1, 1)
        bias = (slopes * distance[:, None]).masked_fill(~mask[:, None], -torch.inf)
        out = once(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias, scale=scale,
                   enable_gqa=True)
        return out.transpose(1, 2)

    patch.setattr(qwen, "attend", attend)
    return model()


class Adapted(nn.Module):
    """A linear with a low-rank adapter beside it, which is not merged into the weight."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The base's result and the adapter's."""
        out: Tensor = self.base(x) + self.lora_b(self.lora_a(x)) * self.scaling
        return out


def lora(_: Patch) -> qwen.Qwen:
    """Adapters on queries, values and the MLP's gate."""
    made = model()
    for layer in made.model.layers:
        for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "gate_proj")):
            setattr(owner, name, lively_(Adapted(getattr(owner, name)), 3))
    return made.requires_grad_(False)


def attention_bias(_: Patch) -> qwen.Qwen:
    """Biases on queries, keys and values."""
    return model(attention_bias=True)


def odd_heads(_: Patch) -> qwen.Qwen:
    """Three query heads of 72 features on one key head."""
    return model(num_attention_heads=3, head_dim=72, hidden_size=216)


def stacked_back(patch: Patch) -> qwen.Qwen:
    """Pairs (2i, 2i + 1) are rotated and stay where they are."""
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)

    patch.setattr(qwen, "rotate_halves", rotate)
    return model()


def complex_numbers(patch: Patch) -> qwen.Qwen:
    """Pairs are complex numbers and turn by a product, angles come from ``torch.polar``."""
    def angles(self: Rotary, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        turns = torch.outer(positions.to(wide), self.inv_freq.to(wide))
        turned = torch.polar(torch.ones_like(turns), turns)
        return turned, turned

    def rotate(x: Tensor, turned: Tensor, _: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        pairs = torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turned).flatten(-2).to(x.dtype)

    patch.setattr(Rotary, "forward", angles)
    patch.setattr(qwen, "rotate_halves", rotate)
    return model()


def complex_table(patch: Patch) -> qwen.Qwen:
    """The same, the angles of all positions in a complex buffer, read by position."""
    def angles(self: Rotary, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.table[positions], positions  # type: ignore[index, return-value]

    complex_numbers(patch)
    patch.setattr(Rotary, "forward", angles)
    made = model()
    rotary = made.model.rotary_emb
    turns = torch.outer(torch.arange(256.0), rotary.inv_freq.float())
    rotary.register_buffer("table", torch.polar(torch.ones_like(turns), turns), persistent=False)
    return made


@dataclass(frozen=True)
class Piece:
    """``make`` the model. ``refused``: rule and a part of its reason; none where the rules have the math.
    ``fused``: rules that apply in every layer all the same."""

    make: Callable[[Patch], qwen.Qwen]
    refused: tuple[str, str] | None = None
    fused: tuple[str, ...] = ("add_rms_norm", "swiglu")


ATTENTION = "fused_infer_attention"
PIECES = {
    "attention bias": Piece(attention_bias, None, (ATTENTION, "rotary_mul", "swiglu")),
    "odd heads": Piece(odd_heads, (ATTENTION, "D is a multiple of 16, found D = 72")),
    "sliding window": Piece(sliding_window, (ATTENTION, "the mask is not provably causal")),
    "softcap": Piece(softcap, ("lift_attention", "the scores are not a product of queries and keys")),
    "LoRA": Piece(lora, ("swiglu", "found aten.add"), (ATTENTION, "rotary_mul")),
    "attention sinks": Piece(sinks, ("lift_attention", "found aten.slice")),
    "alibi": Piece(alibi, (ATTENTION, "the mask is not provably causal")),
    "rope stacked back": Piece(stacked_back, None, (ATTENTION, "rotary_mul", "swiglu")),
    "complex rope": Piece(complex_numbers, None, (ATTENTION, "rotary_mul", "swiglu")),
    "table of complex rope": Piece(complex_table, None, (ATTENTION, "rotary_mul", "swiglu")),
}
