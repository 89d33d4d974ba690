"""What the guards cost at each call: a method of 200 tensors in a cache of 100 layers, and 200 watched weights.

    python -m benchmarks.guards [--inputs 200] [--json]

The graph itself is not run. Microseconds of CPU time of the process per call, the best of several rounds: ``same`` with
the tensors of the call before, ``fresh`` with one new tensor (token ids), ``all new`` with every tensor replaced,
``first`` through the guards that explain (once per kind of call), ``weights`` for the check of the weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from cannopy.backend.build import build, lookup
from cannopy.backend.options import BuildOptions
from cannopy.backend.runtime import CompiledModel
from cannopy.fx_passes.program import InputSpec, OutputSpec, Program, WeightEntry

aten = torch.ops.aten


class Layers(nn.Module):
    """``weights`` parameters, and a cache that its caller holds."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(weights))

    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Adds the ids to every tensor of the cache."""
        for layer in cache.layers:
            layer.keys.add_(ids)
            layer.values.add_(ids)
        return ids


def call(inputs: int) -> tuple[torch.Tensor, Any]:
    """Ids and a cache: ``inputs`` tensors together."""
    rest = [torch.zeros(2, 4) for _ in range(inputs - 1)]
    pairs = [SimpleNamespace(keys=rest[i], values=rest[min(i + 1, len(rest) - 1)]) for i in range(0, len(rest), 2)]
    return torch.ones(2, 4), SimpleNamespace(layers=pairs)


def method(inputs: int, weights: int) -> tuple[CompiledModel, tuple[torch.Tensor, Any]]:
    """The compiled method, run op by op, and its arguments; the graph is written by hand."""
    model, (ids, cache) = Layers(weights).eval(), call(inputs)
    graph, specs = fx.Graph(), []

    def placeholder(name: str, kind: Any, source: str, value: torch.Tensor, mutated: bool = False) -> fx.Node:
        shape, stride = tuple(value.shape), tuple(value.stride())
        specs.append(InputSpec(name, kind, source, shape, stride, value.dtype, None, mutated))
        return graph.placeholder(name)

    wanted = [placeholder(f"w{i}", "parameter", f"self.layers[{i}].weight", p)
              for i, p in enumerate(model.parameters())]  # fmt: skip
    added = placeholder("ids", "argument", "args[0]", ids)
    state = {}
    for i in range(inputs - 1):
        name = "values" if i % 2 else "keys"
        source = f"args[1].layers[{i // 2}].{name}"
        state[placeholder(f"s{i}", "state", source, getattr(cache.layers[i // 2], name), True)] = None
    entries = [WeightEntry(f"d{i}", (n.name,), "w[0].t()") for i, n in enumerate(wanted)]
    for entry in entries:
        graph.call_function(aten.neg.default, (graph.placeholder(entry.name),))
    new = {s: graph.call_function(aten.add.Tensor, (s, added)) for s in state}
    for s, value in new.items():
        graph.call_function(aten.copy_.default, (s, value))
    graph.output((added,))
    output = OutputSpec(pytree.treespec_dumps(pytree.tree_structure(0)), (("tensor", 0),))
    program = Program(fx.GraphModule(nn.Module(), graph), specs, output, entries)
    options = BuildOptions(engine="eager", use_cache=False)

    def first(_: OutputSpec) -> Callable[..., Any]:
        return lambda tensors, *_: tensors[0]

    found = lookup(model, "forward", (ids, cache), {}, options, first)
    return build(program, model, "forward", (ids, cache), {}, options, found, {}, first), (ids, cache)


def microseconds(work: Callable[[], Any], repeat: int = 200, rounds: int = 5) -> float:
    """CPU time of one ``work()``, the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeat):
            work()
        best = min(best, (time.process_time() - start) / repeat)
    return best * 1e6


@dataclass(frozen=True)
class Result:
    """Microseconds per call."""

    inputs: int
    weights: int
    same: float
    fresh: float
    all_new: float
    first: float
    weights_us: float


def measure(inputs: int = 200, weights: int = 200) -> Result:
    """All figures."""
    compiled, (ids, cache) = method(inputs, weights)
    others = [torch.ones(2, 4) for _ in range(2)]
    caches = [call(inputs)[1] for _ in range(2)]
    with torch.no_grad():
        first = microseconds(lambda: (compiled._checks.clear(), compiled.checked((ids, cache), {})), 5)
        same = microseconds(lambda: compiled.checked((ids, cache), {}))
        fresh = microseconds(lambda: [compiled.checked((x, cache), {}) for x in others]) / 2
        all_new = microseconds(lambda: [compiled.checked((ids, c), {}) for c in caches]) / 2
        weights_us = microseconds(compiled._weights.changed)
    return Result(inputs, weights, same, fresh, all_new, first, weights_us)


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=200, help="tensors of the call, and weights (200)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = asdict(measure(args.inputs, args.inputs))
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        print(f"{name:12} {value:10.1f} us" if isinstance(value, float) else f"{name:12} {value:8}")


if __name__ == "__main__":
    main()
