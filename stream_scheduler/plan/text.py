"""Plans as YAML.

    target: atlas-a3
    layers:
    - layers: 3-60
      kernels:                      # in their order; what is not said is: main stream, no limit, no SuperKernel
      - npu.npu_rms_norm#1
      - npu.npu_quant_matmul#1: {stream: side1, cores: c8v16, wait: [npu.npu_rms_norm#1]}
      prefetch:
      - {before: next/npu.npu_mla_prolog_v3, bytes: 18874368, after: npu.npu_quant_matmul#2}
      super_kernels: {sk0: strict-scope-check=bypass}
    pins:                           # what the scheduler may not change; a file of pins alone is completed by it
      features: {prefetch: forbid}
      kernels:
      - {layers: 3-60, kernel: npu.npu_quant_matmul#1, stream: side1}

Layers that are placed alike share a block. `keys` has the names of layers and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cannopy.stream_scheduler.plan.keys import Keys, region_prefix
from cannopy.stream_scheduler.plan.model import Cores, Decision, Pin, Placement, Plan, PlannedPrefetch
from cannopy.stream_scheduler.plan.read import from_yaml, places
from cannopy.stream_scheduler.simulator import Schedule
from cannopy.stream_scheduler.simulator.schedule import MAIN

__all__ = ["from_yaml", "places", "to_yaml"]


def to_yaml(plan: Plan, schedule: Schedule) -> str:
    """The file of ``plan`` for the graph of ``schedule`` (graph order); `read.from_yaml` gives ``plan`` back."""
    keys = Keys.of(schedule)
    lines = [f"target: {plan.target}"]
    lines += [f"{name}: {value:.3f}" for name in ("predicted_us", "serial_us", "lower_bound_us")
              if (value := getattr(plan, name)) is not None]
    spread = _spread(plan, keys)
    if spread:
        lines.append(f"super_kernels: {_flow(spread)}")
    if plan.complete:
        lines += ["layers:", *_blocks(plan, keys, spread)]
    lines += _pins(plan, keys)
    if plan.decisions:
        lines += ["decisions:", *(f"- {_flow(_decision(d))}" for d in plan.decisions)]
    return "\n".join(lines) + "\n"


def _blocks(plan: Plan, keys: Keys, spread: Mapping[str, str]) -> list[str]:
    """One block for all parts that are placed alike."""
    parts: dict[int, list[Placement]] = {}
    for placement in plan.placements:
        parts.setdefault(keys.place[placement.node][0], []).append(placement)
    waits: dict[str, list[str]] = {}
    for wait in plan.waits:
        waits.setdefault(wait.node, []).append(wait.on)
    fetches: dict[int, list[PlannedPrefetch]] = {}
    for fetch in plan.prefetches:
        fetches.setdefault(keys.place[fetch.after][0], []).append(fetch)
    options = {region.name: region.options for region in plan.regions}
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, placed in sorted(parts.items()):
        lines = ["  kernels:", *(f"  - {_kernel(p, keys, number, waits.get(p.node, ()), spread)}" for p in placed)]
        if number in fetches:
            lines += ["  prefetch:", *(f"  - {_flow(_fetch(f, keys, number))}" for f in fetches[number])]
        regions = {_local(p.super_kernel, keys, number): options[p.super_kernel] for p in placed
                   if p.super_kernel is not None and p.super_kernel not in spread}
        if regions:
            lines.append(f"  super_kernels: {_flow(regions)}")
        alike.setdefault(tuple(lines), []).append(number)
    return [line for lines, numbers in alike.items() for line in (f"- layers: {_layers(keys.text(numbers))}", *lines)]


def _kernel(p: Placement, keys: Keys, here: int, waits: Sequence[str], spread: Mapping[str, str]) -> str:
    more: dict[str, Any] = {}
    if p.stream != MAIN:
        more["stream"] = p.stream
    if p.cores is not None:
        more["cores"] = cores_text(p.cores)
    if p.super_kernel is not None:
        more["super_kernel"] = p.super_kernel if p.super_kernel in spread else _local(p.super_kernel, keys, here)
    if waits:
        more["wait"] = [keys.refer(name, here) for name in waits]
    key = keys.place[p.node][1]
    return f"{key}: {_flow(more)}" if more else key


def _fetch(fetch: PlannedPrefetch, keys: Keys, here: int) -> dict[str, Any]:
    weights = [w.name for w in keys.find(keys.refer(fetch.before, here), here, "plan").weights]
    found: dict[str, Any] = {"before": keys.refer(fetch.before, here)}
    if len(weights) > 1:
        found["weight"] = weights.index(fetch.weight)
    return {**found, "bytes": fetch.bytes, "after": keys.refer(fetch.after, here)}


def _spread(plan: Plan, keys: Keys) -> dict[str, str]:
    """Regions that are not of one part alone, by their own names."""
    places: dict[str, set[int]] = {}
    for p in plan.placements:
        if p.super_kernel is not None:
            places.setdefault(p.super_kernel, set()).add(keys.place[p.node][0])
    return {region.name: region.options for region in plan.regions
            if len(found := places.get(region.name, set())) != 1
            or not region.name.startswith(region_prefix(keys.parts[min(found)].segment))}


def _local(name: str | None, keys: Keys, here: int) -> str:
    return (name or "").removeprefix(region_prefix(keys.parts[here].segment))


def _pins(plan: Plan, keys: Keys) -> list[str]:
    if not plan.pins.features and not plan.pins.nodes:
        return []
    lines = ["pins:"]
    if plan.pins.features:
        lines.append(f"  features: {_flow(dict(plan.pins.features))}")
    alike: dict[str, list[int]] = {}
    for pin in plan.pins.nodes:
        number, key = keys.place[pin.node]
        alike.setdefault(_flow({"kernel": key, **_pin(pin)}), []).append(number)
    if alike:
        lines.append("  kernels:")
        lines += [f"  - {{layers: {_flow(keys.text(numbers))}, {text[1:]}" for text, numbers in alike.items()]
    return lines


def _pin(pin: Pin) -> dict[str, Any]:
    found: dict[str, Any] = {"stream": pin.stream, "super_kernel": pin.super_kernel, "prefetch": pin.prefetch}
    if pin.cores is not None:
        found["cores"] = pin.cores if pin.cores == "whole" else cores_text(pin.cores)
    return {name: value for name, value in found.items() if value is not None}


def _decision(d: Decision) -> dict[str, Any]:
    found: dict[str, Any] = {"feature": d.feature, "where": d.where, "applied": d.applied}
    if d.gain_us is not None:
        found |= {"gain_us": d.gain_us, "worst_gain_us": d.worst_gain_us}
    return {**found, "reason": d.reason}


def _layers(text: str) -> str:
    """``text`` of layers; ``7.10`` in quotes, since YAML reads a number, 7.1."""
    return _flow(text) if isinstance(yaml.safe_load(text), float) else text


def cores_text(cores: Cores) -> str:
    """``c16v32``."""
    return f"c{cores[0]}v{cores[1]}"


def _flow(value: object) -> str:
    """One line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return str(text).removesuffix("\n").removesuffix("\n...")
