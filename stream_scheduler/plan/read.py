"""Plan files read back, with errors that name the line, its block and the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cannopy.stream_scheduler.plan import marked
from cannopy.stream_scheduler.plan.apply import known
from cannopy.stream_scheduler.plan.keys import Keys, region_prefix
from cannopy.stream_scheduler.plan.model import (
    FEATURES,
    SWITCHES,
    Cores,
    Decision,
    Pin,
    Pins,
    Placement,
    Plan,
    PlanError,
    PlannedPrefetch,
    SuperKernelRegion,
    Wait,
)
from cannopy.stream_scheduler.simulator import Schedule
from cannopy.stream_scheduler.simulator.schedule import MAIN

_TOP = ("target", "predicted_us", "serial_us", "lower_bound_us", "super_kernels", "layers", "pins", "decisions")
_BLOCK = ("layers", "kernels", "prefetch", "super_kernels")
_KERNEL = ("stream", "cores", "super_kernel", "wait")
_FETCH = ("before", "weight", "bytes", "after")
_PIN = ("layers", "kernel", "stream", "cores", "super_kernel", "prefetch")
_DECISION = ("feature", "where", "applied", "gain_us", "worst_gain_us", "reason")
_CORES = re.compile(r"c([0-9]{1,6})v([0-9]{1,6})")
_LABEL = re.compile(r"[\w.-]+")


def from_yaml(text: str, schedule: Schedule) -> Plan:
    """The plan in ``text`` for the graph of ``schedule`` (graph order). `PlanError` says where the text is wrong and
    what would fit; whether the plan is safe is for the verifier to say."""
    top = _mapping(marked.load(text), _TOP, "plan")
    target = _text(top.get("target"), _at(top, "target", "plan"))
    reader = _reader(top, schedule)
    times = {name: _number(top[name], f"plan: {name}") for name in _TOP[1:4] if name in top}
    decisions = [_decision(d, f"decision {n + 1}") for n, d in enumerate(_sequence(top.get("decisions"), "decisions"))]
    placed = reader.placements()
    options = {**reader.spread, **reader.regions}
    used = dict.fromkeys(p.super_kernel for p in placed if p.super_kernel is not None)
    regions = tuple(SuperKernelRegion(name, options[name]) for name in {**used, **dict.fromkeys(options)})
    plan = Plan(target, tuple(placed), tuple(reader.waits), tuple(reader.fetches()), regions,
                decisions=tuple(decisions), pins=reader.pins(top.get("pins")), **times)
    if plan.complete and (missing := [t.name for t in schedule.tasks if t.name not in plan.by_node]):
        number, key = reader.keys.place[missing[0]]
        raise PlanError(f"plan: layer {reader.keys.parts[number].name} has no {key!r}, and {len(missing) - 1} more are "
                        "missing; a plan has every kernel, or pins only")
    return plan


def places(text: str, schedule: Schedule) -> dict[str, str]:
    """{kernel of ``schedule``: ``line 12 (layer 3, aten.mm)``} of the plan in ``text``, which `from_yaml` takes; of a
    kernel that is pinned and placed, where it is placed."""
    top = _mapping(marked.load(text), _TOP, "plan")
    reader = _reader(top, schedule)
    reader.pins(top.get("pins"))
    found = {}
    for node, line in reader.lines.items():
        number, key = reader.keys.place[node]
        found[node] = f"line {line} (layer {reader.keys.parts[number].name}, {key})"
    return found


def _reader(top: Mapping[str, Any], schedule: Schedule) -> _Reader:
    reader = _Reader(Keys.of(schedule), _options(top.get("super_kernels"), _at(top, "super_kernels", "plan")))
    for n, (line, block) in enumerate(_items(top.get("layers"), _at(top, "layers", "plan"))):
        reader.block(block, marked.at(f"block {n + 1}", line))
    return reader


@dataclass
class _Reader:
    """What the blocks so far have said."""

    keys: Keys
    spread: dict[str, str]
    placed: dict[int, list[Placement]] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    fetched: list[tuple[int, PlannedPrefetch]] = field(default_factory=list)
    regions: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def placements(self) -> list[Placement]:
        """In the order of the graph's parts."""
        return [p for _, placed in sorted(self.placed.items()) for p in placed]

    def fetches(self) -> list[PlannedPrefetch]:
        """In the order of the parts that they are issued in, in the stream of what they follow."""
        streams = {p.node: p.stream for placed in self.placed.values() for p in placed}
        ordered = sorted(self.fetched, key=lambda one: one[0])
        return [PlannedPrefetch(f.weight, f.bytes, f.after, f.before, streams.get(f.after, MAIN)) for _, f in ordered]

    def block(self, data: object, where: str) -> None:
        """One block, for each of its layers."""
        block = _mapping(data, _BLOCK, where)
        where = f"{where} (layers {block.get('layers')})"
        options = _options(block.get("super_kernels"), f"{where}, super_kernels")
        for number in self.keys.numbers(block.get("layers", ""), where):
            if number in self.placed:
                raise PlanError(f"{where}: layer {self.keys.parts[number].name} has a block already")
            prefix = region_prefix(self.keys.parts[number].segment)
            here = {name: prefix + name for name in options}
            self.regions |= {prefix + name: text for name, text in options.items()}
            self.placed[number] = [
                self._kernel(kernel, number, {**{name: name for name in self.spread}, **here}, where, line)
                for line, kernel in _items(block.get("kernels"), _at(block, "kernels", where))
            ]
            for n, (line, fetch) in enumerate(_items(block.get("prefetch"), _at(block, "prefetch", where))):
                fetched = self._fetch(fetch, number, marked.at(f"{where}, prefetch {n + 1}", line))
                self.fetched.append((number, fetched))

    def _kernel(self, data: object, number: int, regions: Mapping[str, str], where: str, line: int) -> Placement:
        where = marked.at(where, line)
        if isinstance(data, dict) and len(data) > 1:
            raise PlanError(f"{where}: expected one kernel, found {', '.join(map(str, data))}; what is said of a "
                            "kernel stands in braces behind its name, or further in")
        key, more = next(iter(data.items())) if isinstance(data, dict) and data else (data, {})
        task = self.keys.find(_text(key, f"{where}, kernel"), number, where)
        where = f"{where}, {key}"
        if task.name in self.lines:
            raise PlanError(f"{where}: the kernel is placed already, in line {self.lines[task.name]}; a plan has each "
                            "kernel once")
        self.lines[task.name] = line
        said = _mapping(more, _KERNEL, where)
        region = said.get("super_kernel")
        if region is not None:
            known("SuperKernel region", str(region), regions, where)
        for on in _sequence(said.get("wait"), f"{where}, wait"):
            self.waits.append(Wait(task.name, self.keys.find(_text(on, f"{where}, wait"), number, where).name))
        stream = _label(said.get("stream", MAIN), f"{where}, stream")
        cores = cores_of(said["cores"], where) if "cores" in said else None
        return Placement(task.name, stream, cores, None if region is None else regions[str(region)])

    def _fetch(self, data: object, number: int, where: str) -> PlannedPrefetch:
        said = _mapping(data, _FETCH, where)
        before = self.keys.find(_text(said.get("before"), f"{where}, before"), number, where)
        after = self.keys.find(_text(said.get("after"), f"{where}, after"), number, where)
        index, size = said.get("weight", 0), said.get("bytes")
        if not isinstance(index, int) or not 0 <= index < len(before.weights):
            raise PlanError(f"{where}: {said['before']} has {len(before.weights)} weights, found number {index!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanError(f"{where}: bytes: expected a whole number above 0, found {size!r}")
        return PlannedPrefetch(before.weights[index].name, size, after.name, before.name)

    def pins(self, data: object) -> Pins:
        """The pins of the file."""
        said = _mapping(data or {}, ("features", "kernels"), "pins")
        features = _mapping(said.get("features") or {}, FEATURES, _at(said, "features", "pins"))
        for feature, switch in features.items():
            known(f"switch of {feature}", str(switch), SWITCHES, _at(features, feature, "pins, features"))
        nodes: dict[str, Pin] = {}
        lines: dict[str, int] = {}
        for n, (line, entry) in enumerate(_items(said.get("kernels"), _at(said, "kernels", "pins"))):
            where = marked.at(f"pins, kernel {n + 1}", line)
            one = _mapping(entry, _PIN, where)
            for number in self.keys.numbers(one.get("layers", ""), where):
                task = self.keys.find(_text(one.get("kernel"), f"{where}, kernel"), number, where)
                if task.name in nodes:
                    raise PlanError(f"{where}: {one.get('kernel')} of layer {self.keys.parts[number].name} is pinned "
                                    f"already, in line {lines[task.name]}; say all of it there")
                nodes[task.name], lines[task.name] = _pin(task.name, one, where), line
                self.lines.setdefault(task.name, line)
        return Pins(dict(features), tuple(nodes.values()))


def cores_of(value: object, where: str) -> Cores:
    """(16, 32) for ``c16v32``."""
    found = _CORES.fullmatch(str(value))
    if found is None:
        raise PlanError(f"{where}: cores: expected cube and vector cores as in c16v32, found {value!r}")
    return int(found[1]), int(found[2])


def _pin(node: str, said: Mapping[str, Any], where: str) -> Pin:
    cores: Cores | Literal["whole"] | None = None
    if "cores" in said:
        cores = "whole" if said["cores"] == "whole" else cores_of(said["cores"], where)
    for name in ("super_kernel", "prefetch"):
        if not isinstance(said.get(name), bool | None):
            raise PlanError(f"{where}: {name}: expected true or false, found {said[name]!r}")
    stream = _label(said["stream"], f"{where}, stream") if "stream" in said else None
    return Pin(node, stream, cores, said.get("super_kernel"), said.get("prefetch"))


def _decision(data: object, where: str) -> Decision:
    said = _mapping(data, _DECISION, where)
    gains = [None if said.get(name) is None else _number(said[name], f"{where}, {name}")
             for name in ("gain_us", "worst_gain_us")]
    if not isinstance(said.get("applied"), bool):
        raise PlanError(f"{where}, applied: expected true or false, found {said.get('applied')!r}")
    return Decision(_text(said.get("feature"), where), _text(said.get("where"), where), said["applied"],
                    _text(said.get("reason"), where), *gains)


def _at(said: Mapping[str, Any], key: str, where: str) -> str:
    """``where, key`` in the line of ``key``."""
    lines = getattr(said, "lines", {})
    return marked.at(f"{where}, {key}", lines.get(key))


def _mapping(value: object, names: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: expected {', '.join(names)}, found {value!r}")
    for name in value:
        known("key", str(name), names, marked.at(where, getattr(value, "lines", {}).get(name)))
    return value


def _items(value: object, where: str) -> list[tuple[int, Any]]:
    """(line, item) of a list."""
    found = _sequence(value, where)
    return list(zip(getattr(found, "lines", [0] * len(found)), found, strict=True))


def _sequence(value: object, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise PlanError(f"{where}: expected a list, found {value!r}")
    return value


def _options(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PlanError(f"{where}: expected options by name, found {value!r}")
    return {_label(name, where): "" if options in (None, "") else _text(options, f"{where}, {name}")
            for name, options in value.items()}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise PlanError(f"{where}: expected a name, found {value!r}")
    return str(value)


def _label(value: object, where: str) -> str:
    """The name of a stream or a region, which becomes an attribute of GE ops."""
    text = _text(value, where)
    if not _LABEL.fullmatch(text):
        raise PlanError(f"{where}: expected letters, digits, '.', '-' and '_', found {text!r}")
    return text


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise PlanError(f"{where}: expected a number, found {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise PlanError(f"{where}: expected a number, found one that is too large") from None
