"""Changes in the source of stock modules: one text replaced in one method."""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.mutation.cases import lively, moe_block

Tensor = torch.Tensor


@dataclass(frozen=True)
class SourceMutant:
    """``old`` becomes ``new`` in ``method`` of the module that ``module`` names; ``fuses`` are fusions that remain.

    A reason with one of ``words`` names the mutated thing.
    """

    module: str
    old: str
    new: str
    fuses: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


def norm() -> tuple[torch.nn.Module, Tensor, type]:
    """Qwen3's RMSNorm in bf16."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    module = Qwen3RMSNorm(128)
    lively(module, 2)
    return module.to(torch.bfloat16).eval(), _tokens(128), Qwen3RMSNorm


def mlp() -> tuple[torch.nn.Module, Tensor, type]:
    """Qwen3's MLP in bf16."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    module = Qwen3MLP(Qwen3Config(hidden_size=128, intermediate_size=96))
    lively(module, 2)
    return module.to(torch.bfloat16).eval(), _tokens(128), Qwen3MLP


def router() -> tuple[torch.nn.Module, Tensor, type]:
    """The MoE block of DeepSeek-V3.2, whose router changes."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter

    return (*moe_block(torch.bfloat16, "grouped_mm"), DeepseekV32TopkRouter)


def _tokens(width: int) -> Tensor:
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)


MODULES = {"norm": norm, "mlp": mlp, "router": router}

_NORM, _MLP, _ROUTER = ("rms_norm",), ("swiglu",), ("moe_gating_top_k", "moe_experts", "swiglu")
_TEXT = "self.act_fn(self.gate_proj(x)) * self.up_proj(x)"
MUTANTS = (
    SourceMutant("norm", "self.variance_epsilon", "0.6", _NORM),
    SourceMutant("norm", " + self.variance_epsilon", "", _NORM),
    SourceMutant("norm", "* torch.rsqrt(", "/ torch.sqrt(", _NORM),
    SourceMutant("norm", "pow(2)", "abs()", (), ("abs", "pow")),
    SourceMutant("norm", "mean(-1", "mean(-2", (), ("dim -2",)),
    SourceMutant("norm", "mean(-1", "sum(-1", (), ("sum",)),
    SourceMutant("norm", "self.weight *", "(1.0 + self.weight) *", _NORM),
    SourceMutant("norm", "self.weight * hidden_states", "self.weight[:1] * hidden_states", _NORM),
    SourceMutant("norm", "self.weight * hidden_states.to(input_dtype)", "(self.weight * hidden_states).to(input_dtype)",
                 _NORM),
    SourceMutant("norm", "hidden_states.pow(2)", "(hidden_states - hidden_states.mean(-1, keepdim=True)).pow(2)", (),
                 ("sub",)),
    SourceMutant("mlp", _TEXT, "self.up_proj(x) * self.act_fn(self.gate_proj(x))", _MLP),
    SourceMutant("mlp", _TEXT, "self.act_fn(self.up_proj(x)) * self.gate_proj(x)", _MLP),
    SourceMutant("mlp", _TEXT, "self.act_fn(self.gate_proj(x)).clamp(max=0.2) * self.up_proj(x)", (), ("clamp",)),
    SourceMutant("mlp", _TEXT, "torch.nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x)", (), ("gelu",)),
    SourceMutant("mlp", _TEXT, "self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1)", (), ("add",)),
    SourceMutant("mlp", _TEXT, "self.act_fn(self.gate_proj(x).float()).to(x.dtype) * self.up_proj(x)", _MLP),
    SourceMutant("router", "router_logits.sigmoid()", "router_logits.softmax(-1)", (), ("softmax",)),
    SourceMutant("router", "topk_weights = scores.gather", "topk_weights = scores_for_choice.gather", (), ("bias",)),
    SourceMutant("router", ".topk(2, dim=-1)[0]\n        .sum(dim=-1)", ".amax(dim=-1)", _ROUTER),
    SourceMutant("router", 'float("-inf")', "0.0", (), ("0.0",)),
    SourceMutant("router", "+ 1e-20", "+ 0.7", _ROUTER),
    SourceMutant("router", "* self.routed_scaling_factor", "* 0.3", _ROUTER),
    SourceMutant("router", "topk_weights /= denominator", "pass", (), ("sum", "divided")),
    SourceMutant("router", "+ self.e_score_correction_bias", "- self.e_score_correction_bias", (), ("bias", "sub")),
)


@contextmanager
def mutated(cls: Any, old: str, new: str) -> Iterator[None]:
    """``cls.forward`` with ``old`` replaced by ``new`` in its source, which must occur once."""
    original = cls.forward
    text = textwrap.dedent(inspect.getsource(original))
    assert text.count(old) >= 1, f"{cls.__name__}.forward has no {old!r}"
    file = f"<mutant of {cls.__name__} {abs(hash((old, new)))}>"
    text = text.replace(old, new, 1)
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope: dict[str, Any] = {}
    exec(compile(text, file, "exec"), original.__globals__, scope)
    cls.forward = scope["forward"]
    try:
        yield
    finally:
        cls.forward = original
