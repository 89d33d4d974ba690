"""Counts of ops, kernels and copies; the record of loaded graphs; the profile; life times."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cannopy.backend.ge_graph import Summary, summary
from cannopy.backend.host import engine
from cannopy.backend.host.engine.plan import build
from tests.engine.by_hand import Graph
from tests.engine.fused_cases import FUSED


def test_constant_ops_are_not_kernels(compiled: Callable[..., Any]) -> None:
    case = next(c for c in FUSED if c.id == "GroupedMatmul")
    torch.manual_seed(0)
    compiled(case.fn)(*case.make())
    found = engine.recorded()[-1].summary()
    assert found.ge_ops["Fill"] == 5  # torchair's five empty lists
    assert found.ge_ops["Cast"] == 5
    assert found.kernels == {"GroupedMatmul": 1}


def test_casts_without_effect_are_not_kernels(compiled: Callable[..., Any]) -> None:
    """torchair casts a product by a number to the dtype that it has; a cast to another dtype counts."""
    compiled(lambda x: (x * 3).exp().half())(torch.randn(2, 4))
    found = engine.recorded()[-1].summary()
    assert found.ge_ops["Cast"] == 2
    assert found.kernels == {"Cast": 1, "Exp": 1, "Mul": 1}


def test_metadata_ops_are_not_kernels(compiled: Callable[..., Any]) -> None:
    compiled(lambda x: x.unsqueeze(0).squeeze(0).view(4, 2).exp().view(8))(torch.randn(2, 4))
    assert engine.recorded()[-1].summary().kernels == {"Exp": 1}


def _moved(elements: int, type_: str = "TensorMove") -> Summary:
    g = Graph()
    data = g.data(0, torch.empty(elements, dtype=torch.bfloat16))
    g.op("Reshape", "view", (data, g.const(torch.tensor([-1]))), ("x", "shape"), 1)
    g.op(type_, "copy", ("view:0",), ("x",), 1)
    return summary(g.outputs("copy:0"))


@pytest.mark.usefixtures("activated")
def test_copies_of_large_inputs() -> None:
    assert _moved(1 << 19).copied == (("copy", "arg0"),)
    assert _moved((1 << 19) - 1).cache_copies == 0
    assert _moved(1 << 19, "Neg").cache_copies == 0


@pytest.mark.usefixtures("activated")
def test_copies_of_small_inputs_that_are_overwritten() -> None:
    g = Graph()
    data = g.data(0, torch.empty(4))
    g.op("ConcatV2", "join", (data, data, g.const(torch.tensor(0))), ("x0", "x1", "concat_dim"), 1)
    graph = g.outputs("join:0")
    assert summary(graph).cache_copies == 0
    assert summary(graph, {0: 0}).copied == (("join", "arg0"),)


def test_recorded_graphs_live_as_long_as_their_callers(compiled: Callable[..., Any]) -> None:
    gc.collect()
    before = len(engine.recorded())
    fn = compiled(lambda x: x * 3)
    fn(torch.ones(2))
    graphs = engine.recorded()
    assert len(graphs) == before + 1
    assert graphs[-1].summary().kernels == {"Mul": 1}
    del fn, graphs
    torch._dynamo.reset()
    gc.collect()
    assert len(engine.recorded()) <= before


def test_profile(compiled: Callable[..., Any]) -> None:
    fn = compiled(lambda x: x.exp().sin())
    fn(torch.ones(2))
    with engine.profiling() as seconds:
        fn(torch.ones(2))
    assert seconds.keys() == {"Exp", "Sin"}
    assert all(0 < s < 5 for s in seconds.values())
    held = dict(seconds)
    fn(torch.ones(2))
    assert seconds == held


@pytest.mark.usefixtures("activated")
def test_values_are_freed_after_their_last_use() -> None:
    g = Graph()
    g.op("Neg", "a", (g.data(0, torch.ones(2)),), ("x",), 1)
    g.op("Neg", "b", ("a:0",), ("x",), 1)
    g.op("Add", "c", ("a:0", "b:0"), ("x1", "x2"), 1)
    plan = build(g.outputs("c:0"))
    a, b, c = (step.outs[0] for step in plan.steps)
    assert [set(step.free) for step in plan.steps] == [{plan.inputs[0].slot}, set(), {a, b}]
    assert plan.outputs == [c]
