"""Seconds of each pass and of verification on a whole DeepSeek-V3.2 decode graph, no layer left out.

    python -m benchmarks.passes [--layers 6 12] [--json]

Seconds are CPU time of the process on one thread. Absolute figures are the machine's; how they divide and how they
grow with the number of layers is Cannopy's. `benchmarks.layers` measures the same with regions and against torch.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import cannopy
from benchmarks.layers import decode
from cannopy import api, pipeline
from cannopy.backend.host.activate import activate
from cannopy.frontend import regions
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.engine.record import Log
from cannopy.fx_passes.manager import Pass, PassManager
from cannopy.fx_passes.program import Program


@dataclass
class Result:
    """Seconds by pass; ``between`` is verification and what is noted for a roll-back, ``passes`` are all of them."""

    layers: int
    captured: int
    final: int = 0
    passes: float = 0.0
    between: float = 0.0
    by_pass: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Everything from the captured graph to the final one."""
        return self.passes + self.between


def measure(layers: int) -> Result:
    """Capture ``layers`` layers and run the pipeline over them."""
    model, call = decode(layers)
    options = cannopy.Options(phase="decode")
    with api.target_of(options):
        program = regions.whole(model, "forward", (), call, "benchmark")
        result = Result(layers, len(program.gm.graph.nodes))
        steps = pipeline.passes(pipeline.plan(options), Log())
        manager = PassManager([_timed(step, result.by_pass) for step in steps])
        start = time.process_time()
        manager.run(program)
        total = time.process_time() - start
    result.passes = sum(result.by_pass.values())
    result.between = total - result.passes
    result.final = len(program.gm.graph.nodes)
    return result


def _timed(step: Pass, seconds: dict[str, float]) -> Pass:
    def run(program: Program) -> int:
        start = time.process_time()
        changes = step.run(program)
        seconds[step.name] = time.process_time() - start
        return changes

    return Pass(step.name, run, step.requires, step.ensures)


def ratios(results: list[Result]) -> dict[str, float]:
    """What does not depend on the machine: the share of verification, and growth beside that of the graph."""
    first, last = results[0], results[-1]
    found = {"verification / all": last.between / last.total}
    if len(results) > 1:
        found["growth of time / growth of nodes"] = last.total / first.total * first.captured / last.captured
    return found


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[6], help="numbers of layers, at least 4 each (6)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    activate()
    dialect.register_all()
    measure(4)  # what is loaded and built on first use is no part of the figures
    results = [measure(layers) for layers in args.layers]
    if args.json:
        found: dict[str, Any] = {"runs": [asdict(r) | {"total": r.total} for r in results], "ratios": ratios(results)}
        print(json.dumps(found, indent=2))
        return
    print(f"{'layers':34}" + "".join(f"{r.layers:9}" for r in results))
    for name in ("captured", "final"):
        print(f"{f'nodes {name}':34}" + "".join(f"{getattr(r, name):9}" for r in results))
    for name in results[0].by_pass:
        print(f"{name:34}" + "".join(f"{r.by_pass[name]:9.3f}" for r in results))
    for label, name in (("all passes", "passes"), ("verification and notes", "between"), ("all", "total")):
        print(f"{label:34}" + "".join(f"{getattr(r, name):9.3f}" for r in results))
    for text, ratio in ratios(results).items():
        print(f"{ratio:6.2f}  {text}")


if __name__ == "__main__":
    main()
