"""What many layers cost: capture, passes and torch._inductor's pattern matcher on one call of DeepSeek-V3.2.

    python -m benchmarks.layers [--layers 61] [--phase decode] [--alone] [--json]

Widths are tiny, the number of layers and the graph of each layer are those of the real model. Everything runs in this
process on one thread. CPU seconds are those of the process, so other load on the machine counts little, and the ratios,
which are of CPU seconds, hold on any machine; wall seconds are printed beside them. Takes some minutes, because Dynamo
and AOTAutograd see every layer once for comparison; ``--alone`` leaves that out.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

import cannopy
from cannopy import api, explain, pipeline
from cannopy.backend.host.activate import activate
from cannopy.frontend import regions, state
from cannopy.frontend.capture import capture
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.engine.record import Log
from cannopy.fusion_rules.engine.stamped import expand
from cannopy.fx_passes import regions as fx_regions
from cannopy.fx_passes import stamp
from cannopy.fx_passes.manager import Pass, PassManager
from cannopy.fx_passes.program import Program
from cannopy.models import zoo

T = TypeVar("T")
FEW = {"vocab_size": 512, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
       "num_experts_per_tok": 2, "first_k_dense_replace": 3}  # fmt: skip
"""Sizes below those of the tiny preset, which only make tensors smaller."""
TOKENS = {"decode": 1, "prefill": 32}
SMALLEST = 0.01
"""Seconds below which a cost is the clock's grain."""


@dataclass(frozen=True)
class Cost:
    """Seconds: of CPU time of the process, and by the clock on the wall."""

    cpu: float
    wall: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu + other.cpu, self.wall + other.wall)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.cpu - other.cpu, self.wall - other.wall)


@dataclass
class Result:
    """Costs by name.

    ``prepare``: the tensors of the static cache. ``capture``: of the few layers, comparison of all layers included.
    ``passes``: all from capture to the lowered graph, verification included. It consists of ``stamp``, which copies the
    missing layers, ``verification`` and ``match and rewrite``: every other pass, the notes for a roll-back and the log
    of all layers. ``explain``: the whole of `cannopy.explain`. ``…, twice``: with twice the layers. ``capture of all
    layers``: Dynamo and AOTAutograd; ``one rule of inductor``: `PatternMatcherPass.apply` with one pattern.
    """

    phase: str
    layers: int
    captured_layers: int
    nodes: int
    nodes_final: int
    costs: dict[str, Cost] = field(default_factory=dict)
    inductor_matches: int = 0

    def ratios(self) -> dict[str, float]:
        """The figures that do not depend on the machine, of CPU seconds; none of costs too small to compare."""
        pairs = [("capture of all layers", "capture"), ("one rule of inductor", "passes"),
                 *((f"{name}, twice", name) for name in (*PARTS, "passes", "capture"))]  # fmt: skip
        return {f"{a} / {b}": self.costs[a].cpu / self.costs[b].cpu for a, b in pairs
                if a in self.costs and self.costs[b].cpu > SMALLEST}


PARTS = ("match and rewrite", stamp.NAME, "verification")


def timed(work: Callable[[], T]) -> tuple[T, Cost]:
    """The result of ``work`` and its cost."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, Cost(time.process_time() - cpu, time.perf_counter() - wall)


def model_of(layers: int) -> nn.Module:
    """DeepSeek-V3.2 of ``layers`` layers."""
    import transformers

    preset = zoo.preset("deepseek-v3.2", "tiny")
    config = transformers.DeepseekV32Config(**{**preset.config, **FEW, "num_hidden_layers": layers})
    torch.manual_seed(0)
    return transformers.DeepseekV32ForCausalLM(config).to(torch.bfloat16).eval()


def call_of(model: nn.Module, phase: str) -> dict[str, Any]:
    """The arguments of one call for two sequences, with a static cache that has no tensors yet."""
    import transformers

    tokens, config = TOKENS[phase], model.config
    start = 5 if phase == "decode" else 0
    return {
        "input_ids": torch.zeros(2, tokens, dtype=torch.long),
        "position_ids": torch.arange(start, start + tokens).expand(2, tokens).contiguous(),
        "cache": transformers.StaticCache(config=config, max_cache_len=128),
        "use_cache": True,
    }


def decode(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the arguments of one decode step whose cache has its tensors."""
    model = model_of(layers)
    call = call_of(model, "decode")
    state.prepare_state(model, (), call)
    return model, call


def measured(step: Pass, costs: dict[str, Cost]) -> Pass:
    """``step``, which notes its cost in ``costs``."""

    def run(program: Program) -> int:
        changes, costs[step.name] = timed(lambda: step.run(program))
        return changes

    return replace(step, run=run)


def run_passes(program: Program, options: cannopy.Options, verify: bool) -> dict[str, Cost]:
    """Take ``program`` through the pipeline up to the lowered graph, log of all layers included.

    Gives the costs of all ``passes`` and of ``regions``.
    """
    log, by_pass = Log(), dict[str, Cost]()
    steps = [step for step in pipeline.passes(pipeline.plan(options), log) if step.name != "schedule"]
    manager = PassManager([measured(step, by_pass) for step in steps], verify=verify)

    def work() -> None:
        manager.run(program)
        expand(log, fx_regions.of(program))

    _, whole = timed(work)
    return {"passes": whole, stamp.NAME: by_pass[stamp.NAME]}


def ours(layers: int, phase: str) -> Result:
    """The costs of Cannopy's part for ``layers`` layers."""
    model, options, costs = model_of(layers), cannopy.Options(phase=phase), {}
    call = call_of(model, phase)
    with api.target_of(options):
        _, costs["prepare"] = timed(lambda: state.prepare_state(model, (), call))
        program, costs["capture"] = timed(lambda: regions.capture(model, "forward", (), call))
        nodes = fx_regions.size(program)
        twin = replace(program, gm=copy.deepcopy(program.gm), inputs=list(program.inputs),
                       weights=list(program.weights), facts=dict(program.facts))  # fmt: skip
        quick = run_passes(twin, options, verify=False)
        full = run_passes(program, options, verify=True)
    costs["passes"], costs[stamp.NAME] = full["passes"], full[stamp.NAME]
    costs["verification"] = full["passes"] - quick["passes"]
    costs["match and rewrite"] = quick["passes"] - quick[stamp.NAME]
    captured = fx_regions.of(program).captured
    return Result(phase, layers, captured, nodes, len(program.gm.graph.nodes), costs)


def one_rule(program: Program) -> tuple[int, Cost]:
    """Matches of an RMSNorm pattern by torch._inductor's matcher, and its cost; on a copy of the graph."""
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

    matches, cost = timed(lambda: matcher.apply(gm.graph))
    return int(matches), cost


def measure(layers: int, phase: str, alone: bool) -> Result:
    """All figures for ``layers`` layers."""
    ours(8, phase)  # what is loaded and built on first use is no part of the comparison
    once, twice = ours(layers, phase), ours(2 * layers, phase)
    once.costs |= {f"{name}, twice": cost for name, cost in twice.costs.items()}
    model, options = model_of(layers), cannopy.Options(phase=phase)
    call = call_of(model, phase)
    _, once.costs["explain"] = timed(lambda: explain.explain(model, "forward", (), call, options))
    if not alone:
        with api.target_of(options):
            program, once.costs["capture of all layers"] = timed(lambda: capture(model, "forward", (), call))
        once.inductor_matches, once.costs["one rule of inductor"] = one_rule(program)
    return once


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=61, help="layers of the model (61, as DeepSeek-V3.2)")
    parser.add_argument("--phase", choices=sorted(TOKENS), default="decode", help="which call (decode)")
    parser.add_argument("--alone", action="store_true", help="without torch's own capture and matcher beside it")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    activate()
    dialect.register_all()
    result = measure(args.layers, args.phase, args.alone)
    if args.json:
        print(json.dumps({**asdict(result), "ratios": result.ratios()}, indent=2))
        return
    for name, value in asdict(result).items():
        if name != "costs":
            print(f"{name:28} {value:>9}")
    print(f"\n{'seconds':28} {'CPU':>9} {'wall':>9}")
    for name, cost in result.costs.items():
        print(f"{name:28} {cost.cpu:9.2f} {cost.wall:9.2f}")
    print("\nratios of CPU seconds")
    for name, ratio in result.ratios().items():
        print(f"{ratio:9.2f}  {name}")


if __name__ == "__main__":
    main()
