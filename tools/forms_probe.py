"""Fusion counts and numbers of tiny stock models under the transformers that this process imports; JSON on stdout.

    PYTHONPATH=DIR python tools/forms_probe.py [MODEL …]

`tools/forms.py` runs it once per version. ``MODELS`` and ``counts`` are also what the tests expect of the present one.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cannopy.environment import import_torch

import_torch()

import torch  # noqa: E402  (after the environment has been prepared)
import transformers  # noqa: E402

from cannopy import api  # noqa: E402
from cannopy.backend.host import kernels  # noqa: E402
from cannopy.backend.host.activate import activate  # noqa: E402
from cannopy.frontend.generation import GenerationCase, Phase  # noqa: E402
from cannopy.frontend.state import prepare_state  # noqa: E402
from cannopy.fx_passes.paths import compile_path  # noqa: E402
from cannopy.fx_passes.program import Program  # noqa: E402
from cannopy.models.lively import lively_  # noqa: E402
from cannopy.options import Options  # noqa: E402
from cannopy.pipeline_text import STAGES  # noqa: E402

MAJOR = int(transformers.__version__.partition(".")[0])
BASE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                        "intermediate_size": 96, "max_position_embeddings": 128}
MLA = {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
       "v_head_dim": 128 if MAJOR < 5 else 64, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
       "num_experts_per_tok": 4, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
INDEXER = {"hidden_size": 1024, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128,
           "num_attention_heads": 2, "num_key_value_heads": 2, "index_topk": 16, "index_n_heads": 4,
           "index_head_dim": 128}
GQA = {"head_dim": 64}
MOE = {**GQA, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}

UNPLANNED = ",".join(name for name in STAGES if name != "schedule")
"""Up to the lowered graph, which runs here op by op; what a plan writes into it runs on a device only."""
Counts = Callable[[int], dict[str, int]]


@dataclass(frozen=True)
class Model:
    """A class of transformers, its tiny configuration, and ``counts(layers)``: where it has the math of a rule."""

    architecture: str
    about: str
    sizes: dict[str, Any]
    counts: Counts
    attention: str | None = None


def _decoder(per_layer: dict[str, int], outside: dict[str, int] | None = None) -> Counts:
    """Counts of a decoder: the norms before attention and MLP, the last one, and ``per_layer`` of the rest."""

    def counts(layers: int) -> dict[str, int]:
        norms = {"add_rms_norm": 2 * layers, "rms_norm": 1}
        rest = {rule: n * layers for rule, n in per_layer.items()}
        return {rule: norms.get(rule, 0) + rest.get(rule, 0) + (outside or {}).get(rule, 0)
                for rule in dict.fromkeys((*norms, *rest, *(outside or {})))}

    return counts


def _caches_latents() -> bool:
    """Whether this DeepSeek-V3.2 caches latents; that of transformers 5.14 caches keys and values of every head."""
    if not hasattr(transformers, "DeepseekV32Config"):
        return True
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

    return hasattr(DeepseekV32Attention, "expand_kv")


LATENTS = _caches_latents()
POSITIONS_GIVEN = MAJOR < 5
"""Calls pass ``cache_position``: nothing proves that the mask of several queries is causal."""
ROUTED = {"moe_gating_top_k": 1, "moe_experts": 1}
GROUPED = {"rotary_mul": 2, "fused_infer_attention": 1}
FIRST_DENSE = {"moe_gating_top_k": -1, "moe_experts": -1}
MODELS = {
    "deepseek_v3": Model("DeepseekV3", "The first layer is dense; every other one has a router, experts and a shared "
                         "expert.", MLA, _decoder({"rms_norm": 2, "interleave_rope": 2, "swiglu": 1, **ROUTED},
                                                  FIRST_DENSE)),
    "deepseek_v32": Model("DeepseekV32", "As deepseek_v3, with the indexer: norms and rotary of the latents are "
                          "part of the prolog.", {**MLA, **INDEXER},
                          _decoder({"sparse_flash_attention": int(LATENTS), "mla_prolog": int(LATENTS),
                                    "rms_norm": 0 if LATENTS else 2, "interleave_rope": 0 if LATENTS else 2,
                                    "rotary_mul": 2, "swiglu": 1, **ROUTED}, FIRST_DENSE),
                          None if LATENTS else "eager"),
    "llama": Model("Llama", "Dense, grouped queries.", GQA, _decoder({**GROUPED, "swiglu": 1})),
    "qwen2": Model("Qwen2", "Dense, bias in q, k and v.", {}, _decoder({**GROUPED, "swiglu": 1})),
    "qwen3": Model("Qwen3", "Dense, norms of q and k.", GQA, _decoder({"rms_norm": 2, **GROUPED, "swiglu": 1})),
    "qwen3_moe": Model("Qwen3Moe", "Experts in every layer; softmax routing.", MOE,
                       _decoder({"rms_norm": 2, **GROUPED, **ROUTED})),
}


def build(model: Model, layers: int, seed: int = 0) -> torch.nn.Module:
    """The tiny model in bf16 with lively weights and correction biases that are nowhere negative."""
    sizes = {**BASE, **model.sizes, "num_hidden_layers": layers}
    config = getattr(transformers, f"{model.architecture}Config")(**sizes)
    if hasattr(config, "rope_scaling") and MAJOR < 5:
        config.rope_scaling = None
    made: torch.nn.Module = getattr(transformers, f"{model.architecture}ForCausalLM")._from_config(
        config, dtype=torch.bfloat16, **({"attn_implementation": model.attention} if model.attention else {}))
    lively_(made.eval(), seed)
    with torch.no_grad():
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.abs_()
    return made.requires_grad_(False)


def row(model: Model, phase: Phase, layers: int, run: bool = True) -> dict[str, Any]:
    """Counts of one model and phase, and with ``run`` the errors of its fused graph and of plain bf16."""
    module = build(model, layers)
    case = GenerationCase(module, 2, 24, 64, 0)
    args, kwargs = _call(case, phase)
    prepare_state(module, args, kwargs)
    program, done = api.lower(module, "forward", args, kwargs, Options(phase=phase, pipeline=UNPLANNED), {})
    expected = model.counts(layers)
    if POSITIONS_GIVEN and phase == "prefill" and "fused_infer_attention" in expected:
        expected["fused_infer_attention"] = 0
    counts = done.log.counts()
    found: dict[str, Any] = {
        "about": f"{model.about} {layers} layers.", "expected": expected,
        "found": {rule: counts.get(rule, 0) for rule in expected},
    }
    if run:
        fused = _outputs(program, module, args, kwargs)
        plain, exact = _eager(module, args, kwargs), _eager(module.float(), args, kwargs)
        found |= {"fused": _error(fused, exact), "plain": _error(plain, exact)}
    return found


def _call(case: GenerationCase, phase: Phase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call of a phase; a decode call's cache holds what an eager prefill left."""
    cache = case.new_cache()
    args, kwargs = case.prefill(case.ids("prefill"), cache)
    if phase == "prefill":
        return args, kwargs
    with torch.no_grad():
        case.model(*args, **kwargs)
    return case.decode(case.ids("decode"), cache)


def _eager(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Logits of the model on copies of its inputs, with a cache in fp32 when the model is in fp32."""
    args, kwargs = copy.deepcopy((args, kwargs))
    if next(module.parameters()).dtype == torch.float32:
        for value in kwargs.values():
            for layer in getattr(value, "layers", ()):
                for name in ("keys", "values", "indexer_keys"):
                    if isinstance(getattr(layer, name, None), torch.Tensor):
                        setattr(layer, name, getattr(layer, name).float())
                layer.dtype = torch.float32
    with torch.no_grad():
        logits: torch.Tensor = module(*args, **kwargs).logits
    return logits


def _outputs(program: Program, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Logits of the lowered graph with the CPU kernels, on copies of what it writes."""
    kernels.register()
    values: dict[str, torch.Tensor] = {}
    raw: dict[str, torch.Tensor] = {}
    for spec in program.inputs:
        tensor = compile_path(spec.source)(module, args, kwargs)
        raw[spec.name] = tensor = tensor.clone() if spec.mutated else tensor
        values[spec.name] = tensor if spec.view is None else tensor.view(spec.view)
    for entry in program.weights:
        raw[entry.name] = values[entry.name] = entry.build([raw[s] for s in entry.sources])
    program.gm.recompile()
    names = [n.name for n in program.gm.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        logits: torch.Tensor = program.gm(*(values[n] for n in names))[0]
    return logits


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Median over the tokens of the relative error."""
    exact = exact.double()
    return float(((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())


def main(names: Sequence[str]) -> None:
    """Print {model: {phase: row}}; all models that this transformers has when none is named."""
    activate()
    phases: tuple[Phase, ...] = ("prefill", "decode")
    found: dict[str, dict[str, Any]] = {}
    for name in names or MODELS:
        model = MODELS[name]
        if not hasattr(transformers, f"{model.architecture}Config"):
            continue
        for phase in phases:
            try:
                found.setdefault(name, {})[phase] = row(model, phase, 3)
            except Exception as e:  # noqa: BLE001 one model that fails is a row of the table
                found.setdefault(name, {})[phase] = {"error": f"{type(e).__name__}: {e}".splitlines()[0],
                                                     "about": model.about}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
