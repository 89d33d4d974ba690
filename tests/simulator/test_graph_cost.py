"""A lowered graph as a schedule: operations onto kernels, dependencies, weights."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from cannopy.fx_passes.program import InputSpec, OutputSpec, Program
from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.graph_cost import schedule_of
from cannopy.stream_scheduler.graph_cost.build import TABLE, call_of
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.network.report import estimate_schedule
from cannopy.stream_scheduler.simulator import Machine

aten = torch.ops.aten
A3 = load_hardware("atlas-a3")
PRICING = Pricing(A3, load_constants())


class Graph:
    """Builds nodes with metadata on the meta device."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[InputSpec] = []

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, kind: str = "argument") -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        spec = InputSpec(name, kind, f"args[{len(self.inputs)}]", shape, (), dtype)  # type: ignore[arg-type]
        self.inputs.append(spec)
        return node

    def op(self, target: object, *args: object, **kwargs: object) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])  # type: ignore[operator]
        return node

    def program(self, *outputs: fx.Node) -> Program:
        self.graph.output(outputs)
        return Program(fx.GraphModule({}, self.graph), self.inputs, OutputSpec("", ()))


def test_matmul_norm_and_views_become_kernels_with_their_shapes() -> None:
    g = Graph()
    x, w = g.tensor("x", 8, 1, 512), g.tensor("w", 512, 2048, kind="parameter")
    product = g.op(aten.mm.default, g.op(aten.reshape.default, x, [8, 512]), w)
    soft = g.op(aten._softmax.default, g.op(aten.reshape.default, product, [8, 4, 512]), -1, False)
    found = schedule_of(g.program(soft), PRICING)
    first, second = found.schedule.tasks
    assert (first.load.kernel, dict(first.load.work.sizes)) == (  # type: ignore[attr-defined]
        "bf16_matmul", {"m": 8, "k": 512, "n": 2048})
    assert [(weight.name, weight.bytes) for weight in first.weights] == [("w", 512 * 2048 * 2)]
    assert second.load.work.sizes == {"rows": 32, "width": 512}  # type: ignore[attr-defined]
    assert second.deps == (first.name,)
    assert not found.unmapped


def test_a_matmul_of_heads_is_a_product_per_head() -> None:
    g = Graph()
    heads, weights = g.tensor("heads", 16, 4, 512), g.tensor("weights", 16, 512, 128, kind="parameter")
    (task,) = schedule_of(g.program(g.op(aten.matmul.default, heads, weights)), PRICING).schedule.tasks
    assert (task.load.kernel, dict(task.load.work.sizes)) == (  # type: ignore[attr-defined]
        "batch_matmul", {"batch": 16, "m": 4, "k": 512, "n": 128})


def test_an_operation_without_a_formula_is_priced_by_its_bytes_and_named() -> None:
    g = Graph()
    y = g.op(aten.hardtanh.default, g.tensor("x", 64, 1024))
    found = schedule_of(g.program(y), PRICING)
    (task,) = found.schedule.tasks
    assert found.unmapped == {"aten.hardtanh": 1}
    assert task.load.work.bytes == pytest.approx(2 * 64 * 1024 * 2)  # type: ignore[attr-defined]


def test_constants_and_copy_backs_cost_nothing() -> None:
    g = Graph()
    cache, x = g.tensor("cache", 128, 64), g.tensor("x", 128, 64)
    steps = g.op(aten.arange.default, 128, device="meta")
    total = g.op(aten.add.Tensor, x, cache)
    back = g.op(aten.copy_.default, cache, total)
    found = schedule_of(g.program(back, steps), PRICING)
    assert [task.label for task in found.schedule.tasks] == ["aten.add.Tensor"]


def test_independent_branches_do_not_depend_on_each_other() -> None:
    g = Graph()
    x = g.tensor("x", 16, 256)
    a, b = g.op(aten.relu.default, x), g.op(aten.neg.default, x)
    schedule = schedule_of(g.program(g.op(aten.add.Tensor, a, b)), PRICING).schedule
    tasks = schedule.tasks
    assert tasks[1].deps == ()
    assert set(tasks[2].deps) == {tasks[0].name, tasks[1].name}
    step = estimate_schedule(schedule, Machine.of(A3, PRICING.constants))
    assert step.bounds.us < step.us == step.serial_us


def test_a_form_that_the_formula_does_not_take_is_priced_by_bytes() -> None:
    g = Graph()
    scalar = g.tensor("x", dtype=torch.float32)
    assert not call_of(g.op(aten.sum.default, scalar)).known
    assert call_of(g.op(aten.add.Tensor, scalar, scalar)).kernel == "elementwise"


def test_fused_operators_that_the_rules_emit_have_formulas() -> None:
    from cannopy.fusion_rules import catalog

    emitted = {str(rule.kernel) for rule in catalog.fusions() if rule.kernel}
    assert "npu_rms_norm" in {name.removeprefix("npu.") for name in emitted}
    names = {f"npu.{name.removeprefix('npu.')}" for name in emitted if not name.startswith("aten")}
    assert not names - set(TABLE)


def test_collectives_have_the_size_of_their_group() -> None:
    c10d, name = torch.ops._c10d_functional, "cannopy.o_proj_tp.8.1.8"
    g = Graph()
    x = g.tensor("x", 16, 512)

    def call(target: object, shape: tuple[int, ...], *args: object) -> fx.Node:
        node = g.graph.call_function(target, (x, *args, name))  # type: ignore[arg-type]
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return node

    gathered = call(c10d.all_gather_into_tensor.default, (128, 512), 8)
    exchanged = call(c10d.all_to_all_single.default, (16, 512), [2] * 8, [2] * 8)
    summed = call(c10d.all_reduce.default, (16, 512), "sum")
    scattered = call(c10d.reduce_scatter_tensor.default, (2, 512), "sum", 8)
    for node, kernel, rows in ((gathered, "all_gather", 16), (exchanged, "all_to_all", 16), (summed, "all_reduce", 16),
                               (scattered, "reduce_scatter", 2)):
        found = call_of(node)
        assert (found.kernel, found.sizes) == (kernel, {"ranks": 8, "bytes_per_rank": rows * 512 * 2}), kernel
        assert found.known


def test_both_exchanges_of_experts_have_the_size_of_their_group_wherever_it_stands() -> None:
    """Dispatch has ``ep_world_size`` fourth, combine seventh behind two tensors of counts."""
    g = Graph()
    x, ids, scales = g.tensor("x", 4, 512), g.tensor("ids", 4, 8, dtype=torch.int32), g.tensor("scales", 4, 8)
    rows, assist, counts = g.tensor("rows", 64, 512), g.tensor("assist", 512), g.tensor("counts", 16)

    def call(target: str, args: tuple[object, ...], **kwargs: object) -> fx.Node:
        node = g.graph.call_function(getattr(torch.ops.npu, target).default, args, kwargs)  # type: ignore[arg-type]
        node.meta["val"] = torch.empty(4, 512, dtype=torch.bfloat16, device="meta")
        return node

    sizes = {"tokens": 4, "top_k": 8, "hidden": 512, "ranks": 16, "payload_bytes": 2}
    combined = (rows, ids, assist, counts, scales)
    for node, kernel in (
        (call("npu_moe_distribute_dispatch_v2", (x, ids, "ep", 16, 0, 256)), "moe_dispatch"),
        (call("npu_moe_distribute_combine_v2", (*combined, "ep", 16, 0, 256)), "moe_combine"),
        (call("npu_moe_distribute_combine_v2", combined, group_ep="ep", ep_world_size=16), "moe_combine"),
    ):
        found = call_of(node)
        assert (found.kernel, found.sizes, found.known) == (kernel, sizes, True)
