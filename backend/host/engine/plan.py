"""A GE graph made ready to run: ops in order, kernels chosen, constants computed, life times known."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cannopy.backend.cache.agree import RankError
from cannopy.backend.ge_graph import proto
from cannopy.backend.ge_graph.op_types import GRAPH_INPUTS, REF_OUTPUTS
from cannopy.backend.host.engine.constants import constant
from cannopy.backend.host.ge_ops import collectives
from cannopy.backend.host.ge_ops.op import Kernel, Op, OpError
from cannopy.backend.host.ge_ops.table import OPS

Expectation = tuple[tuple[int, ...] | None, torch.dtype | None, bool]
"""Declared shape, declared dtype, and whether the shape is exact or only its element count."""

Tensor = torch.Tensor
CONSTANTS = frozenset({"Const", "Constant"})
ORDER_ONLY = frozenset({"NoOp", "Cmo"})
"""Ops without a value on the host: Cmo is an L2 prefetch."""

_AT_RUN_TIME = frozenset({*REF_OUTPUTS, *collectives.OPS})
"""Ops that have to run in every call, also when all that they read is constant."""

LAZY_VIEWS = frozenset({"Reshape", "Transpose"})
"""torchair does views late: it writes a view's shape over the note on the viewed op, then adds one of these ops
where the view is used. So the noted shape of an op that feeds one is exact in its element count only. The same holds
for an op that writes a view of a cache in place: its note can be of a view that nobody uses any more."""


@dataclass(frozen=True)
class Step:
    """One op to run: ``kernel`` over the values in ``slots`` (-1: None) into ``outs``; ``free`` are the slots that
    nobody reads afterwards; ``expect`` what the graph declares per output."""

    op: Op
    kernel: Kernel
    slots: tuple[int, ...]
    outs: tuple[int, ...]
    free: tuple[int, ...]
    expect: tuple[Expectation, ...]


@dataclass(frozen=True)
class Input:
    """Graph input ``index`` goes to ``slot``; ``shape`` None when it has symbols."""

    index: int
    slot: int
    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


@dataclass
class Plan:
    """What `build` makes of a graph. ``outputs`` are the slots of NetOutput's data inputs, ``initial`` the values at
    the start of a run: constants and what depends on constants only."""

    steps: list[Step] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    initial: list[Tensor | None] = field(default_factory=list)


def order(ops: Sequence[Any]) -> list[int]:
    """Positions of ``ops`` in an order that respects data and control edges, the graph's own where it is free.

    Raises OpError when an edge comes from an op that the graph does not have, or for a cycle.
    """
    position = {op.name: i for i, op in enumerate(ops)}
    users: list[list[int]] = [[] for _ in ops]
    waiting = [0] * len(ops)
    for i, op in enumerate(ops):
        data, control = proto.edges(op)
        for edge in {e.source for e in (*data, *control) if e is not None}:
            if edge not in position:
                raise OpError(f"GE op {op.type} {op.name!r}: its input {edge!r} is not in the graph")
            users[position[edge]].append(i)
            waiting[i] += 1
    ready = [i for i, n in enumerate(waiting) if n == 0]
    done: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        done.append(i)
        for user in users[i]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, user)
    if len(done) != len(ops):
        stuck = ", ".join(ops[i].name for i, n in enumerate(waiting) if n > 0)
        raise OpError(f"the GE graph has a cycle through: {stuck}")
    return done


class _Builder:
    def __init__(self, graph: Any) -> None:
        self.plan = Plan()
        self.slot_of: dict[tuple[str, int], int] = {}
        self.known: dict[int, Tensor] = {}
        self.pending: list[tuple[Op, Kernel, tuple[int, ...], tuple[int, ...], Any]] = []
        self.ops = list(graph.op)
        self.viewed = {e for op in self.ops if op.type in LAZY_VIEWS for e in proto.edges(op)[0][:1]}

    def run(self) -> Plan:
        for i in order(self.ops):
            self._add(self.ops[i])
        self._finish()
        return self.plan

    def _new_slot(self, name: str, index: int) -> int:
        slot = len(self.plan.initial)
        self.plan.initial.append(None)
        self.slot_of[(name, index)] = slot
        return slot

    def _slots(self, op: Any) -> tuple[int, ...]:
        data, _ = proto.edges(op)
        slots: list[int] = []
        for edge in data:
            if edge is None:
                slots.append(-1)
            elif (edge.source, edge.index) in self.slot_of:
                slots.append(self.slot_of[(edge.source, edge.index)])
            else:
                raise OpError(f"GE op {op.type} {op.name!r}: {edge.source!r} has no output {edge.index}")
        return tuple(slots)

    def _add(self, op: Any) -> None:
        if op.type in GRAPH_INPUTS:
            slot = self._new_slot(op.name, 0)
            shape, dtype = proto.declared_input(op)
            self.plan.inputs.append(Input(int(op.attr["index"].i), slot, op.name, shape, dtype))
        elif op.type in CONSTANTS:
            self._know(self._new_slot(op.name, 0), constant(op))
        elif op.type == "NetOutput":
            self.plan.outputs = list(self._slots(op))
        elif op.type not in ORDER_ONLY:
            self._add_kernel(op)

    def _know(self, slot: int, value: Tensor) -> None:
        self.known[slot] = value
        self.plan.initial[slot] = value

    def _add_kernel(self, op: Any) -> None:
        slots = self._slots(op)
        noted = [proto.expected_output(d) for d in op.output_desc]
        expect: tuple[Expectation, ...] = tuple(
            (shape, dtype, op.type not in REF_OUTPUTS and proto.Edge(op.name, i) not in self.viewed)
            for i, (shape, dtype) in enumerate(noted)
        )
        view = Op(
            type=op.type,
            name=op.name,
            inputs=tuple(d.name for d in op.input_desc),
            attrs=op.attr,
            consts={i: self.known[s] for i, s in enumerate(slots) if s in self.known},
            out_dtypes=tuple(dtype for _, dtype in noted),
            origin=proto.fx_name(op),
        )
        if op.type not in OPS:
            raise view.error("the host engine does not know this type; add it to backend/host/ge_ops/table.py")
        kernel = OPS[op.type](view)
        outs = tuple(self._new_slot(op.name, i) for i in range(max(1, len(op.output_desc))))
        foldable = all(s < 0 or s in self.known for s in slots) and op.type not in _AT_RUN_TIME
        if foldable:
            for slot, value in zip(
                outs, run_kernel(view, kernel, slots, [*self.plan.initial, None], expect), strict=False
            ):
                if value is not None:
                    self._know(slot, value)
            return
        if op.type in REF_OUTPUTS:
            kernel = _on_own_constants(kernel, slots, self.known)
        self.pending.append((view, kernel, slots, outs, expect))

    def _finish(self) -> None:
        last: dict[int, int] = {}
        for i, (_, _, slots, outs, _) in enumerate(self.pending):
            last.update((s, i) for s in (*slots, *outs) if s >= 0)
        kept = set(self.plan.outputs) | set(self.known)
        free: list[list[int]] = [[] for _ in self.pending]
        for slot, i in last.items():
            if slot not in kept:
                free[i].append(slot)
        for (op, kernel, slots, outs, expect), dead in zip(self.pending, free, strict=True):
            self.plan.steps.append(Step(op, kernel, slots, outs, tuple(dead), expect))


def _on_own_constants(kernel: Kernel, slots: tuple[int, ...], known: dict[int, Tensor]) -> Kernel:
    """``kernel`` of an op that writes its inputs, on copies of those that are constants."""
    constant = [i for i, s in enumerate(slots) if s in known]
    if not constant:
        return kernel

    def on_copies(*args: Any) -> Any:
        own = list(args)
        for i in constant:
            own[i] = own[i].clone()
        return kernel(*own)

    return on_copies


def run_kernel(
    op: Op,
    kernel: Kernel,
    slots: Sequence[int],
    values: Sequence[Tensor | None],
    expect: Sequence[Expectation],
) -> Sequence[Tensor | None]:
    """The outputs of one op, checked against what the graph declares. OpError names the op on any failure.

    The last of ``values`` is None, so that slot -1 is an input that is not fed.
    """
    args = [values[s] for s in slots]
    try:
        result = kernel(*args)
    except (OpError, RankError):
        raise
    except Exception as e:  # whatever the kernel raises gets the op's name
        raise op.error(f"{type(e).__name__}: {e} (inputs: {describe(op, args)})") from e
    outputs: Sequence[Tensor | None] = (result,) if isinstance(result, torch.Tensor) else result or ()
    for index, ((shape, dtype, exact), value) in enumerate(zip(expect, outputs, strict=False)):
        if value is None or (value.dtype is dtype and value.shape == shape):
            continue
        same = shape is None or value.shape == shape or (not exact and value.numel() == math.prod(shape))
        if not same or (dtype is not None and value.dtype != dtype):
            raise op.error(
                f"output {index} is {value.dtype} {list(value.shape)}, the graph declares {dtype} "
                f"{'a symbolic shape' if shape is None else list(shape)}"
            )
    return outputs


def describe(op: Op, args: Sequence[Tensor | None]) -> str:
    """``name: dtype [shape]`` of each input, for messages."""
    names = list(op.inputs) + [f"#{i}" for i in range(len(op.inputs), len(args))]
    return ", ".join(
        f"{n}: none" if a is None else f"{n}: {a.dtype} {list(a.shape)}" for n, a in zip(names, args, strict=False)
    )


def build(graph: Any) -> Plan:
    """The plan of a GE graph (torchair's GraphDef or GeGraph). OpError for anything the engine cannot run."""
    return _Builder(graph).run()
