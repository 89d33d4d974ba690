"""Models of like layers that can be made irregular, and equality of programs up to names and order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cannopy import Options, api, pipeline
from cannopy.frontend import regions
from cannopy.fx_passes import dump
from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.program import Program
from cannopy.pipeline_text import DEFAULT

WIDTH, SLOTS = 16, 8
UNPLANNED = DEFAULT.removesuffix(",schedule")
"""A plan depends on the order of the graph, in which stamped and whole graphs may differ."""


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Mixer(nn.Module):
    """Writes its input into a cache and reads the mean of all that is there."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.scale = 0.5
        self.window = SLOTS
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("memory", torch.zeros(SLOTS, WIDTH))

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        cache.index_copy_(0, at, x * self.scale)
        self.memory.index_copy_(0, at, x)
        return self.up(cache[: self.window].mean(0, keepdim=True) + self.memory.mean(0, keepdim=True))


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.mixer, self.after = Norm(), Mixer(index), Norm()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x), at, cache)
        gate, up = self.gate(self.after(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Stack(nn.Module):
    """``count`` layers. ``change`` may make one of them different."""

    def __init__(self, count: int = 9, change: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(32, WIDTH))
        self.layers = nn.ModuleList(Layer(i) for i in range(count))
        self.norm = Norm()
        self.eval()
        if change is not None:
            change(self)

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        x = self.embed[ids]
        for i, layer in enumerate(self.layers):
            x = layer(x, at, caches[i])
        return self.norm(x)


def stack_call(count: int = 9) -> tuple[Any, ...]:
    """Arguments of `Stack`: token ids ``[1]``, slot ``[1]``, a cache ``[SLOTS, WIDTH]`` per layer."""
    torch.manual_seed(1)
    return torch.tensor([3]), torch.tensor([2]), [torch.randn(SLOTS, WIDTH) for _ in range(count)]


def lower(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
    """(program, what the passes did) of ``model.forward``."""
    options = {"pipeline": UNPLANNED, **options}
    return api.lower(model, "forward", args, kwargs or {}, Options(**options), {})


def found(program: Program) -> Any:
    """The `Regions` of ``program``."""
    return program.facts[regions.REGIONS]


def assert_same(a: Program, b: Program) -> None:
    """Both programs are one graph up to names and the order of independent nodes."""
    assert a.output == b.output
    pairs: dict[fx.Node, fx.Node] = {}
    _pair_inputs(a, b, pairs)
    written = [{n.args[0]: n for n in p.gm.graph.nodes if is_call(n, aten.copy_.default)} for p in (a, b)]
    assert len(written[0]) == len(written[1])
    roots = [(a.gm.graph.output_node(), b.gm.graph.output_node())]
    roots += [(node, written[1][pairs[target]]) for target, node in written[0].items()]
    for x, y in roots:
        _pair(x, y, pairs)
    assert len(pairs) == len(a.gm.graph.nodes) == len(b.gm.graph.nodes)
    assert len(set(pairs.values())) == len(pairs)


def _pair_inputs(a: Program, b: Program, pairs: dict[fx.Node, fx.Node]) -> None:
    nodes = [{n.name: n for n in p.gm.graph.find_nodes(op="placeholder")} for p in (a, b)]
    specs = {s.source: s for s in b.inputs}
    assert {s.source for s in a.inputs} == set(specs)
    names: dict[str, str] = {}
    for spec in a.inputs:
        twin = specs[spec.source]
        assert [getattr(spec, f) for f in _FIELDS] == [getattr(twin, f) for f in _FIELDS]
        names[spec.name] = twin.name
        pairs[nodes[0][spec.name]] = nodes[1][twin.name]
    entries = {(e.sources, e.recipe, e.nz): e for e in b.weights}
    assert len(entries) == len(a.weights) == len(b.weights)
    for entry in a.weights:
        other = entries[tuple(names[s] for s in entry.sources), entry.recipe, entry.nz]
        names[entry.name] = other.name
        pairs[nodes[0][entry.name]] = nodes[1][other.name]


_FIELDS = ("kind", "shape", "stride", "dtype", "view", "mutated")
_META = ("source", "module_path", "layer", "rule")


def _pair(x: fx.Node, y: fx.Node, pairs: dict[fx.Node, fx.Node]) -> None:
    pending = [(x, y)]
    while pending:
        x, y = pending.pop()
        if x in pairs:
            assert pairs[x] is y, f"{x.name} is {pairs[x].name} and {y.name}"
            continue
        pairs[x] = y
        assert (x.op, x.target) == (y.op, y.target) or x.op == "output", f"{x.format_node()} / {y.format_node()}"
        (text, operands), (other_text, others) = _call(x), _call(y)
        assert text == other_text
        assert dump.kind(x.meta.get("val")) == dump.kind(y.meta.get("val"))
        metas = [{k: n.meta.get(k) for k in _META} for n in (x, y)]
        assert metas[0] == metas[1], f"{x.format_node()} / {y.format_node()}: {metas}"
        pending += zip(operands, others, strict=True)


def _call(node: fx.Node) -> tuple[str, list[fx.Node]]:
    """The arguments of ``node`` without its operands, and these."""
    operands: list[fx.Node] = []
    return repr(fx.node.map_arg((node.args, node.kwargs), operands.append)), operands


def counts(program: Program, done: pipeline.Compilation) -> dict[str, Any]:
    """What the report counts."""
    from cannopy.fx_passes import kernels

    return {
        "nodes": done.nodes, "fusions": done.log.counts(), "layers": kernels.by_layer(program.gm.graph),
        "passes": [(r.name, r.nodes_before, r.nodes_after) for r in done.records],
        "hits": sorted((h.rule, str(h.layer), h.module_path, h.lines) for h in done.log.hits),
        "misses": sorted((m.rule, str(m.layer), m.module_path, m.reason, m.source) for m in done.log.misses),
    }  # fmt: skip
