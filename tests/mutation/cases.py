"""Models cut to one layer, captured once per process: what is mutated."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cannopy import pipeline
from cannopy.backend.host import kernels, target
from cannopy.frontend.capture import capture
from cannopy.frontend.generation import Phase, cache_argument
from cannopy.frontend.state import prepare_state
from cannopy.fusion_rules import dialect
from cannopy.fx_passes import normalise
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program
from cannopy.models import zoo
from cannopy.models.requests import Requests
from cannopy.options import Options
from cannopy.parity.serving import fill
from cannopy.pipeline_text import STAGES
from tests.mutation import oracle

Tensor = torch.Tensor
TARGET = "atlas-a3"
UNPLANNED = ",".join(name for name in STAGES if name != "schedule")
"""Up to the lowered graph: what a plan writes into it (waits, scopes, prefetches) runs on a device only."""

V32 = {
    "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 96, "moe_intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 16, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "index_topk": 16, "index_n_heads": 4, "index_head_dim": 128,
    "first_k_dense_replace": 0, "num_hidden_layers": 1, "max_position_embeddings": 512,
}
QWEN = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 1, "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Case:
    """A captured call. ``values``: its tensors by placeholder; ``nodes``: float64 values of all nodes by name.

    ``fusions``: how often each rule applies to the unchanged program; ``result``: what its lowered graph gives.
    """

    name: str
    program: Program
    values: dict[str, Tensor]
    nodes: dict[str, Any]
    fusions: dict[str, int]
    result: oracle.Results

    def fresh(self) -> Program:
        """A copy of the program to mutate."""
        return copy.deepcopy(self.program)


FUSIONS = {
    "deepseek_v32": {"sparse_flash_attention": 1, "mla_prolog": 1, "moe_gating_top_k": 1, "moe_experts": 1, "swiglu": 1,
                     "add_rms_norm": 2, "rms_norm": 1, "rotary_mul": 2},
    "deepseek_v32_dense_batch": {"sparse_flash_attention": 1, "mla_prolog": 1, "swiglu": 1, "add_rms_norm": 2,
                                 "rms_norm": 1, "rotary_mul": 2},
    "serving_v32_decode": {"sparse_flash_attention": 1, "mla_prolog": 1, "moe_gating_top_k": 1, "moe_experts": 1,
                           "swiglu": 1, "add_rms_norm": 2, "rms_norm": 1, "rotary_mul": 2},
    "serving_v32_prefill": {"sparse_flash_attention": 1, "mla_prolog": 1, "moe_gating_top_k": 1, "moe_experts": 1,
                            "swiglu": 1, "add_rms_norm": 2, "rms_norm": 1, "rotary_mul": 2},
    "qwen3": {"fused_infer_attention": 1, "swiglu": 1, "add_rms_norm": 2, "rms_norm": 3, "rotary_mul": 2},
    "qwen3_eager": {"fused_infer_attention": 1, "swiglu": 1, "add_rms_norm": 2, "rms_norm": 3, "rotary_mul": 2},
    "qwen3_moe": {"moe_gating_top_k": 1, "moe_experts": 1, "add_rms_norm": 2, "rms_norm": 3, "rotary_mul": 2},
    "moe_block": {"moe_gating_top_k": 1, "moe_experts": 1, "swiglu": 1},
    "moe_block_batched": {"moe_gating_top_k": 1, "moe_experts": 1, "swiglu": 1},
}
"""What the unchanged programs fuse: mutants are measured against it."""


def compiled(program: Program, verify: bool = True) -> pipeline.Compilation:
    """All passes on ``program`` in place, for `TARGET`."""
    with target.using(TARGET):
        return pipeline.run(program, Options(target=TARGET, verify=verify, pipeline=UNPLANNED))


def lively(model: torch.nn.Module, seed: int) -> None:
    """Weights that expose differences: gammas around 1, biases and activations of order one, nothing symmetric."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith("bias"))]
    with torch.no_grad():
        for name, tensor in tensors:
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5 * (3 if name.endswith("mlp.gate.weight") else 1))
            elif name.endswith("bias"):
                tensor.copy_(0.3 * noise)
            else:
                tensor.copy_(1 + 0.4 * noise)


def case_of(name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
            method: str = "forward") -> Case:
    """Capture, normalise, lower and run one call."""
    kernels.register()
    dialect.register_all()
    prepare_state(model, args, kwargs)
    program = capture(model, method, args, kwargs)
    normalise.run(program)
    program.gm.recompile()
    values = {s.name: compile_path(s.source)(model, args, kwargs).detach().clone() for s in program.inputs}
    lowered = copy.deepcopy(program)
    done = compiled(lowered)
    counts = {rule: n for rule, n in done.log.counts().items() if not rule.startswith("lift")}
    assert counts == FUSIONS[name], f"{name} fuses {counts}, not {FUSIONS[name]}: {done.log.misses}"
    result, _ = oracle.lowered(lowered, values)
    return Case(name, program, values, oracle.node_values(program, values), counts, result)


def _cached(model: torch.nn.Module, tokens: int, batch: int, past: int, length: int = 64) -> tuple[Any, Any]:
    from transformers import StaticCache

    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, model.config.vocab_size, (batch, past + tokens), generator=generator)
    cache = StaticCache(config=model.config, max_cache_len=length)
    name = cache_argument(model)
    with torch.no_grad():
        model(ids[:, :past], use_cache=True, **{name: cache})
    return (ids[:, past:],), {name: cache, "use_cache": True}


def _model(kind: str, sizes: dict[str, Any], dtype: torch.dtype, attention: str = "sdpa",
           experts: str | None = "grouped_mm") -> torch.nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    extra = {"experts_implementation": experts} if experts else {}
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, dtype=dtype, attn_implementation=attention, **extra).eval()
    lively(model, 11)
    return model


def _deepseek() -> Case:
    model = _model("DeepseekV32", V32, torch.bfloat16)
    return case_of("deepseek_v32", model, *_cached(model, 3, 1, 24))


def _deepseek_batch() -> Case:
    model = _model("DeepseekV32", {**V32, "first_k_dense_replace": 1}, torch.bfloat16, attention="eager")
    return case_of("deepseek_v32_dense_batch", model, *_cached(model, 2, 2, 20))


def _serving(phase: Phase) -> Case:
    """Our own model: two requests of 20 and 37 tokens with a draft each, or one prompt (keys count from its start)."""
    preset = zoo.preset("deepseek-v3.2", "tiny")
    sizes = {**preset.config, **{k: V32[k] for k in ("vocab_size", "intermediate_size", "moe_intermediate_size",
                                                     "num_hidden_layers", "first_k_dense_replace", "index_topk")}}
    model = zoo.build_serving(replace(preset, config=sizes)).requires_grad_(False)
    lively(model, 11)
    requests = Requests(model, 2 if phase == "decode" else 1, blocks_each=3, block_size=16)
    fill(requests.cache, 3)
    ids = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(5))
    if phase == "decode":
        requests.lengths = [18, 35]
        args: tuple[Any, ...] = (*requests.decode_inputs(ids[:4].view(2, 2)), requests.cache)
    else:
        args = (*requests.prefill_inputs([ids]), requests.cache)
    return case_of(f"serving_v32_{phase}", model, args, {}, phase)


def _qwen(name: str, attention: str) -> Case:
    model = _model("Qwen3", QWEN, torch.bfloat16, attention, experts=None)
    return case_of(name, model, *_cached(model, 3, 2, 9))


def _qwen_moe() -> Case:
    sizes = {**QWEN, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}
    model = _model("Qwen3Moe", sizes, torch.float32, experts="batched_mm")
    return case_of("qwen3_moe", model, *_cached(model, 3, 1, 9))


def moe_block(dtype: torch.dtype, experts: str) -> tuple[torch.nn.Module, Tensor]:
    """The stock MoE block of DeepSeek-V3.2 and an input; the router's bias is fp32 as in a loaded model."""
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32MoE

    sizes = {**V32, "hidden_size": 64, "moe_intermediate_size": 32}
    config = DeepseekV32Config(**sizes)
    config._experts_implementation = experts
    module = DeepseekV32MoE(config)
    with torch.no_grad():  # the names of a whole model, by which `lively` knows the router
        lively(torch.nn.ModuleDict({"mlp": module}), 3)
    bias = module.gate.e_score_correction_bias.detach().float().clone()
    module.to(dtype)
    module.gate.e_score_correction_bias = bias
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    return module.eval(), x


def _block(dtype: torch.dtype, experts: str, name: str) -> Case:
    module, x = moe_block(dtype, experts)
    return case_of(name, module, (x,), {})


CASES: dict[str, Callable[[], Case]] = {
    "deepseek_v32": _deepseek,
    "deepseek_v32_dense_batch": _deepseek_batch,
    "qwen3": lambda: _qwen("qwen3", "sdpa"),
    "qwen3_eager": lambda: _qwen("qwen3_eager", "eager"),
    "qwen3_moe": _qwen_moe,
    "moe_block": lambda: _block(torch.bfloat16, "grouped_mm", "moe_block"),
    "moe_block_batched": lambda: _block(torch.float32, "batched_mm", "moe_block_batched"),
}

SERVING: dict[str, Callable[[], Case]] = {
    "serving_v32_decode": lambda: _serving("decode"),
    "serving_v32_prefill": lambda: _serving("prefill"),
}
"""Drawn when they are asked for only."""


@functools.cache
def case(name: str) -> Case:
    """The case ``name``, built once per process."""
    return (CASES | SERVING)[name]()
