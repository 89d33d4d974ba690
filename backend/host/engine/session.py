"""The object that torchair takes for its GE session."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from cannopy.backend.ge_graph import Summary, summary
from cannopy.backend.host import target
from cannopy.backend.host.engine.plan import Plan, build, run_kernel
from cannopy.backend.host.ge_ops.op import OpError

Tensor = torch.Tensor

_profile: ContextVar[dict[str, float] | None] = ContextVar("cannopy_engine_profile", default=None)
_loaded: list[weakref.ref[HostGraph]] = []


class HostGraph:
    """Stands for ``torchair.core._backend.TorchNpuGraph``: runs a lowered GE graph on the CPU.

    ``aliases``, known from the first run on, is graph output to graph input for the outputs that torchair assigned to
    a caller's tensor.
    """

    is_host_engine = True

    def __init__(self, name: str = "") -> None:
        self.name = str(name)
        self.ge_graph: Any = None
        self.options: dict[str, str] = {}
        self.aliases: dict[int, int] = {}
        self._plan: Plan | None = None
        self._target: target.Target | None = None

    def load(self, ge_graph: Any, options: Mapping[str, str] | None = None) -> None:
        """Take the lowered graph; it is planned at once, so that an unknown GE type is an error here."""
        self.ge_graph = getattr(ge_graph, "_proto", ge_graph)
        self.options = dict(options or {})
        self._plan = build(self.ge_graph)
        self._target = target.current()
        _loaded.append(weakref.ref(self))

    def compile(self) -> None:
        """Nothing is left to do after `load`."""
        if self._plan is None:
            raise OpError(f"graph {self.name!r}: compile() before load()")

    def auto_tune(self, example_inputs: Sequence[Tensor] = (), stream: Any = None) -> None:
        """No tuning on a host."""

    def run(
        self, inputs: Sequence[Tensor], assigned_outputs: Sequence[Tensor | None] = (), stream: Any = None
    ) -> list[Tensor]:
        """Outputs of the graph. Where ``assigned_outputs`` has a tensor, the result is written into it and it is
        returned. Other outputs share memory with nothing."""
        if self._plan is None:
            raise OpError(f"graph {self.name!r}: run() before load()")
        with torch.no_grad(), target.using(self._target) if self._target else nullcontext():
            produced = _execute(self._plan, inputs)
            if assigned_outputs and not self.aliases:
                self.aliases = _alias_map(inputs, assigned_outputs)
            return _deliver(produced, inputs, assigned_outputs, self._plan)

    def summary(self) -> Summary:
        """Ops, kernels and copies of the loaded graph."""
        if self.ge_graph is None:
            raise OpError(f"graph {self.name!r}: summary() before load()")
        return summary(self.ge_graph, self.aliases)


def recorded() -> list[HostGraph]:
    """The loaded graphs that are still in use, in the order in which they were loaded."""
    _loaded[:] = [r for r in _loaded if r() is not None]
    return [g for r in _loaded if (g := r()) is not None]


@contextmanager
def profiling() -> Iterator[dict[str, float]]:
    """Seconds by GE type of everything that runs inside the block, filled in as it runs."""
    seconds: dict[str, float] = {}
    token = _profile.set(seconds)
    try:
        yield seconds
    finally:
        _profile.reset(token)


def _execute(plan: Plan, inputs: Sequence[Tensor]) -> list[Tensor]:
    values = [*plan.initial, None]
    _feed(plan, inputs, values)
    seconds = _profile.get()
    for step in plan.steps:
        begin = time.perf_counter() if seconds is not None else 0.0
        outputs = run_kernel(step.op, step.kernel, step.slots, values, step.expect)
        for slot, value in zip(step.outs, outputs, strict=False):
            values[slot] = value
        for slot in step.free:
            values[slot] = None
        if seconds is not None:
            seconds[step.op.type] = seconds.get(step.op.type, 0.0) + time.perf_counter() - begin
    produced: list[Tensor] = []
    for i, slot in enumerate(plan.outputs):
        last = values[slot]
        if last is None:
            raise OpError(f"NetOutput: nothing computed its input {i}")
        produced.append(last)
    return produced


def _feed(plan: Plan, inputs: Sequence[Tensor], values: list[Tensor | None]) -> None:
    for expected in plan.inputs:
        value = inputs[expected.index]
        if (expected.shape is not None and value.shape != expected.shape) or value.dtype != expected.dtype:
            raise OpError(
                f"graph input {expected.index} ({expected.name}) is {value.dtype} {list(value.shape)}, "
                f"the graph declares {expected.dtype} {expected.shape}"
            )
        values[expected.slot] = value


def _alias_map(inputs: Sequence[Tensor], assigned: Sequence[Tensor | None]) -> dict[int, int]:
    position = {id(t): i for i, t in enumerate(inputs)}
    return {k: position[id(t)] for k, t in enumerate(assigned) if t is not None and id(t) in position}


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _in_place(value: Tensor, target: Tensor) -> bool:
    return value.data_ptr() == target.data_ptr() and value.stride() == target.stride() and value.shape == target.shape


def _deliver(
    produced: list[Tensor], inputs: Sequence[Tensor], assigned: Sequence[Tensor | None], plan: Plan
) -> list[Tensor]:
    targets = list(assigned) + [None] * (len(produced) - len(assigned))
    taken = {_memory(t) for t in inputs} | {_memory(t) for t in plan.initial if t is not None}
    results: list[Tensor] = []
    writes: list[tuple[Tensor, Tensor]] = []
    for value, destination in zip(produced, targets, strict=True):
        if destination is not None:
            if not _in_place(value, destination):
                writes.append((destination, value.clone() if _memory(value) in taken else value))
            results.append(destination)
            continue
        if _memory(value) in taken or not value.is_contiguous():
            value = value.clone(memory_format=torch.contiguous_format)
        taken.add(_memory(value))
        results.append(value)
    for destination, value in writes:
        destination.copy_(value.reshape(destination.shape))
    return results
