"""For each tensor that a graph writes: does GE write it where it is, or does it make a full copy, and why.

GE writes in place when all of `Condition` hold. torchair wraps a written operand in a TensorMove (the copy) and takes
it out again only then: torchair ``_ge_concrete_graph/graph_pass.py``, optimize_reference_op_redundant_copy, its table
of reference ops, and ``patterns/_recover_view_inplace_pattern.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes import dump
from cannopy.fx_passes.graph import aten, is_call, where
from cannopy.fx_passes.program import InputSpec, Program

IN_PLACE: Mapping[str, Mapping[int, int]] = {
    "npu::npu_scatter_nd_update": {0: 0},
    "npu::scatter_update": {0: 0},
    "npu::npu_quant_scatter": {0: 0},
    "npu::npu_mla_prolog_v3_functional": {5: 9, 6: 10},
    "npu::npu_kv_rmsnorm_rope_cache_v2_functional": {2: 5, 3: 6},
    "npu::npu_scatter_pa_kv_cache_functional": {0: 2, 1: 3},
}
"""Ops that GE runs in place: output → the argument whose next value it is."""
THROUGH_VIEWS = ("npu::npu_scatter_nd_update", "npu::scatter_update", "npu::npu_quant_scatter")
"""Ops that torchair also runs in place between two views of the input."""
MOVES = frozenset({
    "aten::cat", "aten::clone", "aten::index_copy", "aten::index_put", "aten::scatter.src", "aten::scatter.value",
    "aten::select_scatter", "aten::slice_scatter", "aten::where.self",
})
"""Ops that write all of their result although most of it is as before. What any other op writes is new throughout."""
VIEWS = (aten.reshape.default, aten.view.default)
PREFETCH = "npu::npu_prefetch"


@dataclass(frozen=True)
class Condition:
    """One thing that has to hold for a write without a copy; ``found`` says what is there instead."""

    name: str
    holds: bool
    found: str = ""


@dataclass(frozen=True)
class Write:
    """One written input.

    ``input`` is its path, ``kind`` its shape and dtype in the graph, ``bytes`` its size. ``op`` is what makes the new
    value, at ``source``. ``verdict``: "in place"; "copied", a full copy in every call; "rewritten", the model computes
    every element anew; "one element", a counter, whose new value is as cheap as a write.
    """

    input: str
    node: str
    kind: str
    bytes: int
    op: str
    source: str
    layer: int | None
    conditions: tuple[Condition, ...]
    verdict: str

    @property
    def copies(self) -> bool:
        """Whether a full copy of the tensor is made in every call."""
        return self.verdict == "copied"

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON takes."""
        return {**asdict(self), "conditions": [asdict(c) for c in self.conditions], "copies": self.copies}


def report(program: Program) -> list[Write]:
    """Every trailing ``copy_`` of a final graph, in graph order."""
    specs = {spec.name: spec for spec in program.inputs}
    copies = [n for n in program.gm.graph.nodes if is_call(n, aten.copy_.default)]
    return [_write(copy, specs[copy.args[0].name]) for copy in copies if copy.args[0].name in specs]


def text(writes: list[Write]) -> str:
    """The report to read: a line per input, and below one that is copied the conditions that fail."""
    copied = [w for w in writes if w.copies]
    rows = [f"{len(writes)} inputs written, {len(copied)} of them with a full copy in every call"]
    for write in writes:
        rows.append(f"\n{write.input}  {write.kind}  {write.verdict}")
        rows.append(f"    {write.op}, {write.source}")
        if write.copies:
            rows += [f"    not: {c.name}; {c.found}" for c in write.conditions if not c.holds]
    return "\n".join(rows) + "\n"


def _write(copy: fx.Node, spec: InputSpec) -> Write:
    owner, value = copy.args[0], copy.args[1]
    assert isinstance(owner, fx.Node)
    assert isinstance(value, fx.Node)
    fake = owner.meta["val"]
    maker, output, views = _maker(value)
    name = _op_name(maker)
    position = IN_PLACE.get(name, {}).get(output)
    conditions = [Condition("the new value comes from an op that GE runs in place", position is not None,
                            f"{name} makes a new tensor, at {where(maker)}")]
    if position is not None:
        operand = _argument(maker, position)
        conditions += [_direct(operand, owner, name, views), _alone(owner, operand, maker, copy)]
    conditions.append(Condition("the caller's tensor is contiguous", _contiguous(spec),
                                f"strides {list(spec.stride)} for shape {list(spec.shape)}: torchair works on a clone"))
    return Write(spec.source, owner.name, dump.kind(fake), fake.numel() * fake.element_size(), name, where(maker),
                 maker.meta.get("layer"), tuple(conditions), _verdict(fake.numel(), name, conditions))


def _verdict(elements: int, op: str, conditions: list[Condition]) -> str:
    if elements <= 1:
        return "one element"
    if all(condition.holds for condition in conditions):
        return "in place"
    computes = op not in IN_PLACE and op not in MOVES
    return "rewritten" if computes and conditions[-1].holds else "copied"


def _maker(value: fx.Node) -> tuple[fx.Node, int, int]:
    """The op behind ``value``, which of its outputs it is, and the number of views in between."""
    views = output = 0
    while is_call(value, *VIEWS) and isinstance(value.args[0], fx.Node):
        value, views = value.args[0], views + 1
    if is_call(value, operator.getitem):
        output = int(value.args[1])  # type: ignore[arg-type]
        value = value.args[0]  # type: ignore[assignment]
    return value, output, views


def _direct(operand: Any, owner: fx.Node, name: str, views_after: int) -> Condition:
    """The written operand is the graph input itself, or one view of it that torchair sees through."""
    condition = "it writes the graph input itself"
    if operand is owner and not views_after:
        return Condition(condition, True)
    one_view = is_call(operand, *VIEWS) and operand.args[0] is owner and views_after == 1
    if one_view and name in THROUGH_VIEWS and len(operand.users) == 1:
        return Condition(condition, True)
    if not isinstance(operand, fx.Node):
        return Condition(condition, False, f"it writes {operand!r}")
    if operand is owner:
        return Condition(condition, False, "a view of the result stands before it is stored")
    behind, output, _ = _maker(operand)
    if output in IN_PLACE.get(_op_name(behind), {}):
        return Condition(condition, False, f"it writes what an earlier write left, {_op_name(behind)} at "
                                           f"{where(behind)}: two writes of one tensor are two copies")
    return Condition(condition, False, f"it writes {dump.line(operand).partition('  #')[0]} at {where(operand)}")


def _alone(owner: fx.Node, operand: Any, maker: fx.Node, copy: fx.Node) -> Condition:
    """No op but the write uses the value that the input has before; prefetches do not count."""
    others = [n for n in owner.users if n not in (maker, copy, operand) and _op_name(n) != PREFETCH]
    found = "; ".join(f"{_op_name(n)} reads it at {where(n)}" for n in others)
    return Condition("nothing else uses the value from before the write", not others, found)


def _argument(call: fx.Node, position: int) -> Any:
    if position < len(call.args):
        return call.args[position]
    target = call.target
    assert isinstance(target, torch._ops.OpOverload)
    return call.kwargs.get(target._schema.arguments[position].name)


def _op_name(node: fx.Node) -> str:
    target = node.target
    return target.name() if isinstance(target, torch._ops.OpOverload) else str(target)


def _contiguous(spec: InputSpec) -> bool:
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
