"""What many layers cost: capture, passes and torch._inductor's pattern matcher on one DeepSeek-V3.2 decode step.

    python -m benchmarks.layers [--layers 61] [--json]

Widths are tiny, the number of layers and the graph of each layer are those of the real model. Everything runs in this
process on one thread; seconds are CPU time of the process, so other load on the machine counts little, and the ratios
hold on any machine. Takes some minutes: Dynamo and AOTAutograd see every layer once for comparison.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

import cannopy
from cannopy import api, pipeline
from cannopy.backend.host.activate import activate
from cannopy.frontend import regions, state
from cannopy.frontend.capture import capture
from cannopy.fx_passes.program import Program
from cannopy.models import zoo

T = TypeVar("T")
FEW = {"vocab_size": 512, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
       "num_experts_per_tok": 2, "first_k_dense_replace": 3}  # fmt: skip
"""Sizes below those of the tiny preset, which only make tensors smaller."""


@dataclass(frozen=True)
class Result:
    """Seconds of CPU time and numbers of nodes and layers.

    ``capture_all``: Dynamo and AOTAutograd on all layers; ``capture``: what Cannopy does instead, comparison of layers
    included. ``passes``: everything from capture to the lowered graph, verification included; ``rewrite``: the same
    without it. ``…_twice``: with twice the layers. ``inductor_one_rule``: `PatternMatcherPass.apply` with one pattern.
    """

    layers: int
    captured_layers: int
    nodes_all: int
    nodes: int
    nodes_final: int
    capture_all: float
    capture: float
    passes: float
    passes_twice: float
    rewrite: float
    rewrite_twice: float
    inductor_one_rule: float
    inductor_matches: int

    def ratios(self) -> dict[str, float]:
        """The figures that do not depend on the machine."""
        return {
            "capture of all layers / capture": self.capture_all / self.capture,
            "passes / one rule of inductor": self.passes / self.inductor_one_rule,
            "passes with twice the layers / passes": self.passes_twice / self.passes,
            "match and rewrite with twice the layers / match and rewrite": self.rewrite_twice / self.rewrite,
        }


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of ``work`` and its seconds of CPU time."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def decode(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """DeepSeek-V3.2 of ``layers`` layers and the arguments of one decode step for two sequences."""
    import transformers

    preset = zoo.preset("deepseek-v3.2", "tiny")
    config = transformers.DeepseekV32Config(**{**preset.config, **FEW, "num_hidden_layers": layers})
    torch.manual_seed(0)
    model = transformers.DeepseekV32ForCausalLM(config).to(torch.bfloat16).eval()
    call = {
        "input_ids": torch.zeros(2, 1, dtype=torch.long),
        "position_ids": torch.tensor([[5], [5]]),
        "cache": transformers.StaticCache(config=config, max_cache_len=128),
        "use_cache": True,
    }
    state.prepare_state(model, (), call)
    return model, call


@dataclass(frozen=True)
class Lowered:
    """A final program, what the passes did, and seconds: of capture, of the passes with and without verification."""

    program: Program
    done: pipeline.Compilation
    capture: float
    passes: float
    rewrite: float


def lowered(layers: int) -> Lowered:
    """The model of ``layers`` layers captured, and taken through the passes twice: without and with verification."""
    model, call = decode(layers)
    options = cannopy.Options(phase="decode")
    made = pipeline.plan(options)
    with api.target_of(options):
        program, captured = timed(lambda: regions.capture(model, "forward", (), call))
        twin = replace(program, gm=copy.deepcopy(program.gm), inputs=list(program.inputs),
                       weights=list(program.weights), facts=dict(program.facts))
        _, rewritten = timed(lambda: pipeline.run(twin, replace(options, verify=False), made))
        done, passed = timed(lambda: pipeline.run(program, options, made))
    return Lowered(program, done, captured, passed, rewritten)


def one_rule(program: Program) -> tuple[int, float]:
    """Matches of an RMSNorm pattern by torch._inductor's matcher, and its seconds; on a copy of the graph."""
    from torch._inductor.pattern_matcher import (
        CallFunction,
        KeywordArg,
        Match,
        PatternMatcherPass,
        register_graph_pattern,
    )

    aten = torch.ops.aten
    x, wide = KeywordArg("x"), {"dtype": torch.float32}
    x = CallFunction(aten._to_copy.default, x, **wide, _users=2)
    mean = CallFunction(aten.mean.dim, CallFunction(aten.pow.Tensor_Scalar, x, 2), [-1], True)
    scale = CallFunction(aten.rsqrt.default, CallFunction(aten.add.Tensor, mean, KeywordArg("eps")))
    normed = CallFunction(aten._to_copy.default, CallFunction(aten.mul.Tensor, x, scale), dtype=torch.bfloat16)
    matcher = PatternMatcherPass()
    gm = copy.deepcopy(program.gm)

    @register_graph_pattern(CallFunction(aten.mul.Tensor, KeywordArg("weight"), normed), pass_dict=matcher)
    def rewrite(match: Match, x: Any, eps: float, weight: Any) -> None:
        with gm.graph.inserting_before(match.output_node()):
            new = gm.graph.call_function(aten.rms_norm.default, (x, [x.meta["val"].shape[-1]], weight, eps))
            new.meta = dict(match.output_node().meta)
        match.output_node().replace_all_uses_with(new)
        match.erase_nodes()

    matches, seconds = timed(lambda: matcher.apply(gm.graph))
    return int(matches), seconds


def measure(layers: int) -> Result:
    """All figures for ``layers`` layers."""
    lowered(8)  # what is loaded and built on first use is no part of the comparison
    once, twice = lowered(layers), lowered(2 * layers)
    model, call = decode(layers)
    with api.target_of(cannopy.Options()):
        everything, whole = timed(lambda: capture(model, "forward", (), call))
    matches, seconds = one_rule(everything)
    return Result(
        layers, once.program.facts[regions.REGIONS].captured, len(everything.gm.graph.nodes),
        once.done.nodes["captured"], once.done.nodes["final"], whole, once.capture, once.passes, twice.passes,
        once.rewrite, twice.rewrite, seconds, matches,
    )  # fmt: skip


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=61, help="layers of the model (61, as DeepSeek-V3.2)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    activate()
    result = measure(args.layers)
    if args.json:
        print(json.dumps({**asdict(result), "ratios": result.ratios()}, indent=2))
        return
    for name, value in asdict(result).items():
        print(f"{name:20} {value:10.2f} s" if isinstance(value, float) else f"{name:20} {value:7}")
    for name, ratio in result.ratios().items():
        print(f"{ratio:6.2f}  {name}")


if __name__ == "__main__":
    main()
