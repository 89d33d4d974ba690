"""Small modules and a small DeepSeek-V3.2 for the frontend's tests."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import fx, nn

from cannopy.frontend import outputs
from cannopy.frontend.capture import capture
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program

MINI = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "max_position_embeddings": 128,
}


def mini_v32(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    """A two-layer DeepSeek-V3.2 (one dense, one with experts) with lively weights."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    from cannopy.models.lively import lively_

    config = DeepseekV32Config(**(MINI | changes))
    return lively_(DeepseekV32ForCausalLM._from_config(config, dtype=dtype).eval(), seed=3)


def marked_line(owner: type) -> int:
    """Number of the line of class ``owner`` that carries the comment ``# HERE``."""
    lines, first = inspect.getsourcelines(owner)
    (at,) = [i for i, text in enumerate(lines) if "# HERE" in text]
    return first + at


class TorchAttention(fx.Interpreter):
    """Runs a graph with PyTorch's own attention in place of the dialect's, as eager does."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.cannopy.attention.default:
            q, k, v, mask, scale, is_causal, enable_gqa = args
            return F.scaled_dot_product_attention(
                q, k, v, mask, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa
            )
        return super().call_function(target, args, kwargs)


def run(program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """The result of ``program`` for one call, state updated."""
    kwargs = kwargs or {}
    tensors = [compile_path(s.source)(model, args, kwargs) for s in program.inputs]
    with torch.no_grad():
        made = TorchAttention(program.gm).run(*tensors)
    return outputs.build(program.output, made, model, args, kwargs)


def captured_and_eager(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, method: str = "forward"
) -> tuple[Program, Any, Any, Any]:
    """The program, its result, eager's result on a copy of everything, and that copy ``(model, args, kwargs)``."""
    kwargs = kwargs or {}
    twin = copy.deepcopy((model, args, kwargs))
    program = capture(model, method, args, kwargs)
    with torch.no_grad():
        expected = getattr(twin[0], method)(*twin[1], **twin[2])
    return program, run(program, model, args, kwargs), expected, twin


def assert_same(found: Any, expected: Any) -> None:
    """Bit equality of tensors, equality of constants, same containers; other leaves must be of the same class."""
    leaves, spec = pytree.tree_flatten(found)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for a, b in zip(leaves, expected_leaves, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        elif isinstance(a, int | float | str | None):
            assert a == b
