"""What a compilation did, as data, as JSON and as tables."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

from cannopy.errors import CannopyError, unknown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cannopy.fusion_rules.engine.record import Hit, Miss
    from cannopy.fx_passes.manager import PassRecord

_SCHEDULE = ("streams", "core_limits", "prefetches", "super_kernels", "predicted_us", "lower_bound_us", "serial_us")
_DISTRIBUTIONS = ("torch", "torch_npu", "transformers")


def _no_schedule() -> dict[str, Any]:
    return dict.fromkeys(_SCHEDULE)


@dataclass
class CompileReport:
    """The result of one `cannopy.compile`.

    ``fusions`` {rule: applications}. ``misses``: where a rule came near and did not apply: {rule, anchor, reason,
    node, source, layer, module_path, matched, total, kind, expected, found, remedy, clause, source_text}, see
    `fusion_rules.engine.record.Miss`. ``hits``: where it applied: {rule, node, layer, module_path, lines}.
    ``nodes`` {captured, normalised, final}: nodes of the graph. ``kernels`` {op: count}: device kernels of the final
    graph, without data, constants and metadata ops. ``ge_ops`` {GE type: count}: everything torchair submitted.
    ``cache_copies``: ops that copy a whole cache, None when unknown. ``schedule``: predicted_us, lower_bound_us and
    serial_us of the graph on its target, in microseconds; streams, prefetches and super_kernels are numbers,
    core_limits are texts (c16v32), decisions {feature, where, applied, gain_us, worst_gain_us, reason}; those are
    None where the pipeline has no stage schedule.
    ``cache`` {status: hit|miss|rebuilt, key, reason}. ``timings`` {step: seconds}. ``layers``: [{layer,
    kernels {op: count}}], the device kernels of the final graph by layer, outside of layers last (layer None);
    counted before torchair, so an op that it splits is one here. ``device``: ``npu`` or ``host``. ``versions``
    {package: version}. ``pipeline``: its text (`cannopy.pipeline_text`). ``passes``: {name, seconds, nodes_before,
    nodes_after, changes} in order. ``regions`` {layers, captured, reason}: layers in lists of layers, how many of them
    were captured, and why all of them where some could have been left out. ``weights`` {derived, bytes, shared_bytes,
    source_bytes}: weights made from the model's at load time, their memory, what of it another compiled method had
    already, and what they were made from. ``memory``: bytes of one die (`cannopy.memory.DieMemory`): weights, caches,
    inputs, buffers, activations, reserved, total, capacity, fits, and buffsize_mb {group: HCCL_BUFFSIZE}.
    ``experts``: how routed experts are spread over dies, one entry per way: {way: dispatch|routing, why, dies, tokens,
    experts, rows, hccl_buffsize_mb, bytes_per_buffer, chunks, repeated, source}; see `fusion_rules.parallel.experts`.
    """

    fusions: dict[str, int] = field(default_factory=dict)
    misses: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    ge_ops: dict[str, int] = field(default_factory=dict)
    cache_copies: int | None = None
    schedule: dict[str, Any] = field(default_factory=_no_schedule)
    cache: dict[str, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    device: str = "host"
    versions: dict[str, str] = field(default_factory=dict)
    hits: list[dict[str, Any]] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    pipeline: str = ""
    regions: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    experts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        fusions: Mapping[str, int],
        hits: Sequence[Hit],
        misses: Sequence[Miss],
        nodes: Mapping[str, int],
        device: str,
        timings: Mapping[str, float],
        passes: Sequence[PassRecord],
        layers: Mapping[int | None, Mapping[str, int]],
        pipeline: str = "",
        regions: Mapping[str, Any] | None = None,
    ) -> CompileReport:
        """The report of what the passes did, before torchair has compiled anything."""
        return cls(
            fusions=dict(fusions),
            misses=_plain(misses, without=("nodes", "near")),
            nodes=dict(nodes),
            timings=dict(timings),
            device=device,
            versions=versions(),
            hits=_plain(hits, without=("nodes", "made")),
            passes=_plain(passes),
            layers=[{"layer": layer, "kernels": dict(kernels)} for layer, kernels in layers.items()],
            pipeline=pipeline,
            regions=dict(regions or {}),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompileReport:
        """The inverse of `to_dict`; `CannopyError` for a key that a report does not have."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in names:
                raise CannopyError(unknown("key of a report", key, names))
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON takes; a copy."""
        return dataclasses.asdict(self)

    def __rich__(self) -> RenderableType:
        from cannopy.report_view import render

        return render(self)


def versions() -> dict[str, str]:
    """Python and the installed packages that decide what a compilation gives; absent ones are left out."""
    from cannopy import __version__

    found = {"cannopy": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _plain(values: Iterable[Any], without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Dataclass instances as dicts with lists for tuples, as JSON would give them back; fields ``without`` left out."""
    found = []
    for value in values:
        plain = dataclasses.asdict(cast("Any", value))
        kept = {k: v for k, v in plain.items() if k not in without}
        found.append({k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()})
    return found
