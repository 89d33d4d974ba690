"""A small stock DeepSeek-V3.2, captured once per form, and a way to run a program as it is between two passes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cannopy.frontend.capture import capture
from cannopy.frontend.state import prepare_state
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.engine.apply import Log, apply
from cannopy.fusion_rules.engine.rule import Context, Rule
from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.verifier import Verifier

SIZES = {
    "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "index_topk": 16, "index_n_heads": 4, "index_head_dim": 128,
    "first_k_dense_replace": 1, "num_hidden_layers": 1, "max_position_embeddings": 512,
}


@dataclass
class Case:
    """A captured call: ``args`` and ``kwargs`` are the example, ``program`` the normalised graph."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    program: Program


def build(dtype: torch.dtype = torch.bfloat16, seed: int = 0, **sizes: Any) -> torch.nn.Module:
    """A stock model with lively weights: gammas around 1, activations of order one."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    attention = sizes.pop("attn_implementation", "sdpa")
    experts = sizes.pop("experts_implementation", "grouped_mm")
    config = DeepseekV32Config(**{**SIZES, **sizes})
    torch.manual_seed(seed)
    model = DeepseekV32ForCausalLM._from_config(
        config, dtype=dtype, attn_implementation=attention, experts_implementation=experts
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
            else:
                noise = 1 + 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.3 if name.endswith("bias") else 1))
    return model


def inputs(model: torch.nn.Module, tokens: int, batch: int = 1, past: int = 0, length: int = 64,
           seed: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with a StaticCache that already holds ``past`` tokens."""
    from transformers import StaticCache

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, past + tokens), generator=generator)
    cache = StaticCache(config=model.config, max_cache_len=length)
    if past:
        with torch.no_grad():
            model(ids[:, :past], cache=cache, use_cache=True)
    return (ids[:, past:],), {"cache": cache, "use_cache": True}


def case(model: torch.nn.Module, tokens: int, batch: int = 1, past: int = 0, length: int = 64, **extra: Any) -> Case:
    """Capture and normalise one call."""
    args, kwargs = inputs(model, tokens, batch, past, length)
    kwargs.update(extra)
    prepare_state(model, args, kwargs)
    dialect.register_all()
    program = capture(model, "forward", args, kwargs)
    normalise.run(program)
    return Case(model, args, kwargs, program)


@functools.cache
def stock(tokens: int, batch: int = 1, past: int = 0, dtype: torch.dtype = torch.bfloat16, length: int = 64) -> Case:
    """A captured call of the one-layer model; do not change it (see `fresh`)."""
    return case(build(dtype), tokens, batch, past, length)


def fresh(c: Case) -> Program:
    """A copy of the case's program that a test may rewrite."""
    return copy.deepcopy(c.program)


def fuse(program: Program, rules: Sequence[Rule], block_size: int | None = None, target: str = "atlas-a3") -> Log:
    """Apply ``rules`` one after the other with normalisation in between; the program is verified after each."""
    log = Log()
    verifier = Verifier(program)
    for rule in rules:
        apply((rule,), Context(program, Editor(program.gm), target, block_size), log)
        normalise.run(program)
        verifier.verify(program)
    program.gm.recompile()
    return log


def run(c: Case, program: Program) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """(outputs, state afterwards by source path) of ``program`` on copies of the case's state."""
    values: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for spec in program.inputs:
        tensor = compile_path(spec.source)(c.model, c.args, c.kwargs)
        if spec.mutated:
            tensor = state[spec.source] = tensor.clone()
        values[spec.name] = tensor if spec.view is None else tensor.view(spec.view)
    raw = {s.name: compile_path(s.source)(c.model, c.args, c.kwargs) for s in program.inputs}
    for entry in program.weights:
        raw[entry.name] = values[entry.name] = entry.build([raw[s] for s in entry.sources])
    names = [n.name for n in program.gm.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        outputs = program.gm(*(values[n] for n in names))
    return list(outputs), state


def targets(program: Program) -> list[str]:
    """The names of the called operations in graph order."""
    return [str(n.target) for n in program.gm.graph.nodes if n.op == "call_function"]
