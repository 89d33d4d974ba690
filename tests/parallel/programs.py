"""A method with every collective in its graph, written by hand: what the cache and torchair make of it."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives
import torch.utils._pytree as pytree
from torch import fx

from cannopy.backend import process_groups
from cannopy.backend.build import build
from cannopy.backend.options import BuildOptions
from cannopy.backend.runtime import CompiledModel
from cannopy.fx_passes.parallel import Layout, Parallel
from cannopy.fx_passes.program import OutputSpec, Program, WeightEntry
from tests.backend.programs import look, make_output, spec

aten, c10d, npu = torch.ops.aten, torch.ops._c10d_functional, torch.ops.npu
TOKENS, HIDDEN, EXPERTS = 4, 1024, 8


class Whole(torch.nn.Module):
    """The plain model: a linear layer, whose result is shared out again by every collective, and experts that scale."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.nn.functional.linear(x, self.proj.weight)
        return y, (y.float()[:, None] * scales[..., None]).sum(1).to(y.dtype)


def model() -> Whole:
    """Seeded alike on all ranks."""
    torch.manual_seed(0)
    return Whole().eval()


def call(rank: int, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    """One rank's own requests; every expert is chosen by somebody or by nobody, as it happens."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:2] for _ in range(tokens)]).int()
    return torch.randn(tokens, HIDDEN, generator=g).bfloat16(), ids, torch.rand(tokens, 2, generator=g)


def program(whole: Whole, layout: Layout, args: tuple[torch.Tensor, ...]) -> Program:
    """A rank's part of ``whole(*args)``: gather, matmul by a part of the weight, reduce-scatter, an exchange and back,
    dispatch and combine around experts that do nothing."""
    graph, tp, ep = fx.Graph(), layout.group("dense_tp"), layout.group("ep")
    part, x, ids, scales = (graph.placeholder(n) for n in ("part", "x", "ids", "scales"))

    def waited(op: Any, *given: Any) -> fx.Node:
        return graph.call_function(c10d.wait_tensor.default, (graph.call_function(op, given),))

    every = waited(c10d.all_gather_into_tensor.default, x, tp.size, tp.name)
    width = HIDDEN // tp.size
    start = layout.position("dense_tp") * width
    cut = graph.call_function(aten.slice.Tensor, (every, 1, start, start + width))
    partial = graph.call_function(aten.mm.default, (cut, part))
    y = waited(c10d.reduce_scatter_tensor.default, partial, "sum", tp.size, tp.name)
    splits = [len(args[0]) // tp.size] * tp.size
    for _ in range(2):
        y = waited(c10d.all_to_all_single.default, y, splits, splits, tp.name)
    where = (ep.name, ep.size, layout.position("ep"), EXPERTS)
    sent = graph.call_function(npu.npu_moe_distribute_dispatch_v2.default, (y, ids, *where))
    rows, assist, counts = (graph.call_function(operator.getitem, (sent, i)) for i in (0, 2, 4))
    out = graph.call_function(npu.npu_moe_distribute_combine_v2.default, (rows, ids, assist, counts, scales, *where))
    graph.output((y, out))
    named = [("x", 0), ("ids", 1), ("scales", 2)]
    return Program(
        gm=fx.GraphModule(torch.nn.Module(), graph),
        inputs=[spec("weight", "parameter", "self.proj.weight", whole.proj.weight),
                *(spec(name, "argument", f"args[{i}]", args[i]) for name, i in named)],
        output=OutputSpec(pytree.treespec_dumps(pytree.tree_structure((0, 0))), (("tensor", 0), ("tensor", 1))),
        weights=[WeightEntry("part", ("weight",), f"w[0][:, {start}:{start + width}].t()")],
    )


def compiled(layout: Layout, args: tuple[torch.Tensor, ...], cache: Path | None, whole: Whole | None = None,
             **options: Any) -> CompiledModel:
    """``Whole`` for this rank, from the cache or built."""
    whole = whole or model()
    building = replace(BuildOptions(cache_dir=cache, use_cache=cache is not None, cache_timeout=30.0, layout=layout),
                       **options)
    found = look(whole, args, building)
    if found.compiled is not None:
        return found.compiled
    with found:
        return build(program(whole, layout, args), whole, "forward", args, {}, building, found, {}, make_output)


def layout(rank: int, text: str) -> Layout:
    """With its groups."""
    found = Layout(Parallel.parse(text), rank)
    process_groups.ensure(found, 20.0, 20.0)
    return found
