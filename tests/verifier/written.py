"""A small plain model with two branches and a cache, lowered, with a plan that uses everything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cannopy import api
from cannopy.fx_passes.program import Program
from cannopy.options import Options
from cannopy.pipeline_text import DEFAULT
from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.graph_cost import schedule_of
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.plan.model import Placement, Plan, PlannedPrefetch, SuperKernelRegion, Wait
from cannopy.stream_scheduler.simulator import Schedule

WIDTH = 64
OPTIONS = Options(use_cache=False, pipeline=DEFAULT.removesuffix(",schedule"))


class Branches(nn.Module):
    """``x -> norm -> (up, act, down) + (side_1, side_2)``, and the sum is added to a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("up", "down", "side_1", "side_2", "head"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.register_buffer("seen", torch.zeros(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = self.down(torch.tanh(self.up(x)))
        side = self.side_2(torch.relu(self.side_1(x)))
        joined = main + side
        self.seen.add_(joined)
        return self.head(joined)


def lowered() -> tuple[Branches, torch.Tensor, Program]:
    torch.manual_seed(3)
    model = Branches().eval().to(torch.bfloat16)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    program, _ = api.lower(model, "forward", (x,), {}, OPTIONS, {})
    return model, x, program


def schedule(program: Program) -> Schedule:
    return schedule_of(program, Pricing(load_hardware("atlas-a3"), load_constants())).schedule


def plan(program: Program) -> Plan:
    """The side branch in a stream of its own with a third of the cores; up … down in a SuperKernel."""
    names: dict[str, str] = {}
    for task in schedule(program).tasks:
        node = next(n for n in program.gm.graph.nodes if n.name == task.name)
        weight = next((w.name for w in task.weights), "")
        key = next((k for k in ("up", "down", "side_1", "side_2", "head") if f"_{k}_" in weight), str(node.target))
        names.setdefault(key, task.name)
    side = {names["side_1"], names["aten.relu.default"], names["side_2"]}
    inside = {names["up"], names["aten.tanh.default"], names["down"]}
    placed = [Placement(t.name, "side" if t.name in side else "main",
                        (8, 16) if t.name in side else (16, 32) if t.name in inside else None,
                        "sk" if t.name in inside else None) for t in schedule(program).tasks]
    weight = next(w.name for t in schedule(program).tasks if t.name == names["down"] for w in t.weights)
    fetch = PlannedPrefetch(weight, WIDTH * WIDTH, names["up"], names["down"])
    return Plan("atlas-a3", tuple(placed), (Wait(names["side_2"], names["up"]),), (fetch,),
                (SuperKernelRegion("sk", "strict-scope-check=abort"),))


def names_of(found: list[Any]) -> set[str]:
    return {one.check for one in found}
