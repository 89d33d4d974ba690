"""Collects the kernels of a step as tasks with their data dependencies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cannopy.stream_scheduler.network.model import Model
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.network.setting import Load, Parallel, Placement, Quantisation
from cannopy.stream_scheduler.simulator import Prefetch, Task, Weight
from cannopy.stream_scheduler.simulator.schedule import MAIN


@dataclass(frozen=True)
class Scene:
    """Everything that decides which kernels a step has."""

    model: Model
    load: Load
    parallel: Parallel
    quant: Quantisation

    @property
    def tokens(self) -> int:
        """Query tokens of this die (of this group where dies have the same ones)."""
        return self.load.tokens

    @property
    def group_tokens(self) -> float:
        """Query tokens of all dies among which experts are spread."""
        return max(1.0, self.tokens * self.parallel.ep / self.same * self.load.group_share)

    @property
    def same(self) -> int:
        """Dies that have the same tokens."""
        return self.parallel.attn_tp * self.parallel.kvp

    @property
    def heads(self) -> int:
        """Query heads of attention on this die: all of them where it attends to a part of a cache."""
        return self.own_heads if self.load.phase == "prefill" else self.model.attention.heads // self.parallel.attn_tp

    @property
    def own_heads(self) -> int:
        """Heads of this die in the output projection."""
        return self.model.attention.heads // self.same

    def cut(self, kind: str) -> int:
        """Dies with the same tokens that cut the matrices of ``kind`` (``dense_tp``) and add or gather their results:
        all that cut heads, of those with a part of the caches as many as the layout says; 1 where tokens differ."""
        if self.parallel.attn_tp > 1:
            return self.parallel.attn_tp
        return int(getattr(self.parallel, kind)) if self.parallel.kvp > 1 else 1

    def dtype(self, matrix: str) -> str:
        """bf16, int8 or int4."""
        return self.quant.of(matrix, self.model)

    def is_int8(self, matrix: str) -> bool:
        """Whether the activations of ``matrix`` are int8."""
        return self.dtype(matrix) != "bf16"


@dataclass
class Builder:
    """Adds tasks in program order. Names are ``<layer>.<label>``, made unique."""

    pricing: Pricing
    placement: Placement
    tasks: list[Task] = field(default_factory=list)
    prefetches: list[Prefetch] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _prefix: str = ""
    _layer: int | None = None
    _stream: str = MAIN
    _cores: tuple[int, int] | None = None

    def call(self, label: str, kernel: str, *deps: str, **sizes: float) -> str:
        """Add one kernel that needs the results of ``deps`` (empty names are none); returns its name."""
        return self._add(label, kernel, deps, False, sizes)

    def call_int32(self, label: str, kernel: str, *deps: str, **sizes: float) -> str:
        """As `call`, for an int8 product that leaves int32 to the next kernel and takes no vector cores."""
        return self._add(label, kernel, deps, True, sizes)

    def _add(self, label: str, kernel: str, deps: tuple[str, ...], cube_only: bool, sizes: Mapping[str, float]) -> str:
        name = self._unique(f"{self._prefix}{label}")
        load = self.pricing.price(kernel, cube_only, **sizes)
        amount = load.work.weight_bytes
        weights = (Weight(name, amount),) if amount else ()
        self.tasks.append(Task(name, load, self._stream, tuple(filter(None, deps)), self._cores, weights, label=label,
                               layer=self._layer))
        return name

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return f"{name}.{count}" if count else name

    def order(self, name: str) -> str:
        """A task that this placement puts first although no data flows from it; nothing where all is one stream."""
        return name if self.placement.side_stream else ""

    def prefetch(self, label: str, after: str) -> None:
        """Weights of the kernel that will be called ``label`` go into L2 once ``after`` has ended; see `resolve`."""
        if self.placement.prefetch:
            self.prefetches.append(Prefetch(f"{self._prefix}{label}", 0.0, after))

    def prefetch_next(self, name: str, after: str) -> None:
        """As `prefetch`, for a kernel of another layer by its full name."""
        if self.placement.prefetch:
            self.prefetches.append(Prefetch(name, 0.0, after))

    @contextlib.contextmanager
    def layer(self, index: int | None, prefix: str) -> Iterator[None]:
        """Tasks of one layer."""
        before = self._layer, self._prefix
        self._layer, self._prefix = index, prefix
        try:
            yield
        finally:
            self._layer, self._prefix = before

    @contextlib.contextmanager
    def stream(self, name: str, cores: tuple[int, int] | None = None) -> Iterator[None]:
        """Tasks of a branch; on the main stream where the placement has no side streams."""
        before = self._stream, self._cores
        if self.placement.side_stream:
            self._stream, self._cores = name, cores
        try:
            yield
        finally:
            self._stream, self._cores = before

    def resolve(self) -> tuple[Prefetch, ...]:
        """Prefetches with their sizes: the whole weight; without those whose kernel is not part of the step."""
        amounts = {w.name: w.bytes for task in self.tasks for w in task.weights}
        return tuple(Prefetch(p.weight, amounts[p.weight], p.after) for p in self.prefetches if p.weight in amounts)


def linear(b: Builder, scene: Scene, label: str, matrix: str, x: str, m: float, k: float, n: float, *,
           quantised: bool = False, int32: bool = False) -> str:
    """x[m, k] @ W[k, n]; an int8 matrix quantises its input per token first unless it is ``quantised`` already.
    ``int32``: dequantisation is left to the next kernel."""
    if not scene.is_int8(matrix):
        return b.call(label, "bf16_matmul", x, m=m, k=k, n=n)
    if not quantised:
        x = b.call(f"{label}_quant", "dynamic_quant", x, rows=m, width=k)
    call = b.call_int32 if int32 else b.call
    return call(label, "int8_matmul", x, m=m, k=k, n=n)
