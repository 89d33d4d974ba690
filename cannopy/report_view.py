"""Tables of a `CompileReport` for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cannopy.pipeline_text import DEFAULT
from cannopy.report import CompileReport


def render(report: CompileReport) -> RenderableType:
    """Everything of the report that a person reads first."""
    parts: list[RenderableType] = [Text(headline(report))]
    for title, table in (
        ("Fusions", fusions_table(report)),
        ("Came near and did not apply", misses_table(report.misses)),
        ("Device kernels per layer", kernels_table(report)),
        ("Device kernels as torchair submits them", counts_table("kernel", report.kernels)),
        ("Seconds", seconds_table(report.timings)),
    ):
        if table.row_count:
            parts += [Text(f"\n{title}", style="bold"), table]
    return Group(*parts)


def headline(report: CompileReport) -> str:
    """A few lines: nodes, kernels, full-cache copies, the pipeline if it is not the usual one, the compile cache."""
    nodes = report.nodes
    text = f"{nodes.get('captured', '?')} nodes captured, {nodes.get('final', '?')} left"
    if report.kernels:
        text += f", {sum(report.kernels.values())} device kernels"
    if report.cache_copies is not None:
        text += f", {report.cache_copies} full-cache copies"
    if report.pipeline not in ("", DEFAULT):
        text += f"\npipeline: {report.pipeline}"
    if report.regions.get("captured", 0) < report.regions.get("layers", 0):
        known = report.regions
        text += f"\n{known['captured']} of {known['layers']} layers captured, the others are copies of them"
    line = plan_line(report.schedule)
    if line:
        text += f"\n{line}"
    line = memory_line(report.memory)
    if line:
        text += f"\n{line}"
    text += "".join(f"\n{experts_line(each)}" for each in report.experts)
    cache = report.cache
    if cache:
        reason = f" ({_shortened(cache['reason'])})" if cache.get("reason") else ""
        text += f"\ncompile cache: {cache.get('status', '?')}{reason}"
    return text


def plan_line(schedule: Mapping[str, Any]) -> str:
    """What a plan takes, what that wins, and what it is made of; "" without a prediction."""
    predicted, bound, serial = (schedule.get(f"{name}_us") for name in ("predicted", "lower_bound", "serial"))
    if not predicted or not bound:
        return ""
    text = f"predicted: {predicted / 1000:.3g} ms a call with full caches, {bound / 1000:.3g} ms is the lower bound"
    if schedule.get("streams") is None or not serial:
        return text
    parts = [f"{schedule['streams']} streams" if schedule["streams"] > 1 else "",
             f"core limits {', '.join(schedule['core_limits'])}" if schedule["core_limits"] else "",
             _several(schedule["prefetches"], "prefetch", "prefetches"),
             _several(schedule["super_kernels"], "SuperKernel", "SuperKernels")]
    made = ", ".join(part for part in parts if part) or "one stream, nothing else gains"
    return f"{text}, {serial / 1000:.3g} ms on one stream\nplan: {made}"


def _several(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}" if count else ""


def memory_line(found: Mapping[str, Any]) -> str:
    """What the graph takes of the HBM of a die; "" without figures."""
    if not found:
        return ""
    parts = [f"{name} {found[name] / 1e9:.3g}" for name in ("weights", "caches", "buffers", "activations", "reserved")]
    text = (f"memory per die, GB: {', '.join(parts)}; {found['total'] / 1e9:.3g} of {found['capacity'] / 1e9:.3g}, "
            f"{'fits' if found['fits'] else 'does not fit'}")
    sizes = [f"{kind} {mb}" for kind, mb in found["buffsize_mb"].items()]
    return text + (f"\nHCCL_BUFFSIZE of each group, MB: {', '.join(sizes)}" if sizes else "")


def experts_line(each: Mapping[str, Any]) -> str:
    """How one kind of routed experts is spread over dies."""
    way = "dispatch and combine" if each["way"] == "dispatch" else "all-to-alls of static size"
    text = f"experts: {each['experts']} on each of {each['dies']} dies, {each['tokens']} tokens per die by {way}"
    if len(each["chunks"]) > 1:
        text += f" in {len(each['chunks'])} chunks"
    if each["bytes_per_buffer"]:
        text += f", {each['bytes_per_buffer'] / 2**20:.3g} MB per buffer"
    if each["repeated"] > 1:
        text += f"; {each['repeated']} dies send the same tokens"
    return text + (f"; not dispatch: {each['why']}" if each["why"] else "")


def layer_kinds(hits: Iterable[Mapping[str, Any]]) -> list[tuple[str, dict[str, int]]]:
    """(layers, {rule: times per layer}), layers with the same fusions together; what is in no layer comes last."""
    by_layer: dict[int | None, Counter[str]] = {}
    for hit in hits:
        by_layer.setdefault(hit.get("layer"), Counter())[hit["rule"]] += 1
    return _kinds(by_layer)


def _kinds(by_layer: Mapping[int | None, Mapping[str, int]]) -> list[tuple[str, dict[str, int]]]:
    kinds: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for layer in sorted(key for key in by_layer if key is not None):
        kinds.setdefault(tuple(sorted(by_layer[layer].items())), []).append(layer)
    found = [(ranges(layers), dict(rules)) for rules, layers in kinds.items()]
    if None in by_layer:
        found.append(("outside layers", dict(sorted(by_layer[None].items()))))
    return found


def fusion_rows(report: CompileReport) -> tuple[list[str], list[list[str]]]:
    """Layer kinds, and per rule its name, its number in a layer of each kind, and the total.

    Rules that only lift spellings into the dialect (``lift_…``) are left out: they give no device op by themselves.
    """
    kinds = [(name, rules) for name, rules in layer_kinds(report.hits) if any(map(is_fusion, rules))]
    rows = [
        [rule, *(str(rules.get(rule, "")) for _, rules in kinds), str(total)]
        for rule, total in sorted(report.fusions.items())
        if is_fusion(rule)
    ]
    return [name for name, _ in kinds], rows


def is_fusion(rule: str) -> bool:
    """Whether the rule of this name ends in a device op."""
    return not rule.startswith("lift_")


def fusions_table(report: CompileReport) -> Table:
    """Rules by layer kind."""
    kinds, rows = fusion_rows(report)
    table = _table("rule", *kinds, "total", numbers=True)
    for row in rows:
        table.add_row(*row)
    return table


def misses_table(misses: Sequence[Mapping[str, Any]]) -> Table:
    """One row per rule and reason, with the layers it holds for and where it stopped."""
    table = _table("rule", "layers", "reason", "at")
    for rule, reason, layers, places in grouped_misses(misses):
        table.add_row(rule, layers, escape(reason), escape(places))
    return table


def grouped_misses(misses: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(rule, reason and what would help, layers, source lines), the same refusal of many layers once."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for miss in misses:
        remedy = f"\n→ {miss['remedy']}" if miss.get("remedy") else ""
        groups.setdefault((miss["rule"], miss["reason"] + remedy), []).append(miss)
    found = []
    for (rule, reason), members in groups.items():
        layers = sorted({m["layer"] for m in members if m.get("layer") is not None})
        places = list(dict.fromkeys(m["source"] or m["node"] for m in members))
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        found.append((rule, reason, ranges(layers) if layers else "", "\n".join(places[:3]) + more))
    return found


def kernel_rows(report: CompileReport) -> tuple[list[str], list[list[str]]]:
    """Layer kinds, and per op its name, its number in a layer of each kind and over all; the last row sums up.

    Layers with the same kernels are one kind.
    """
    columns = _kinds({entry["layer"]: entry["kernels"] for entry in report.layers})
    total: Counter[str] = Counter()
    for entry in report.layers:
        total.update(entry["kernels"])
    rows = [
        [op, *(str(ops.get(op, "")) for _, ops in columns), str(count)]
        for op, count in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]
    if rows:
        rows.append(["all", *(str(sum(ops.values())) for _, ops in columns), str(sum(total.values()))])
    return [name for name, _ in columns], rows


def kernels_table(report: CompileReport) -> Table:
    """Device kernels by layer kind."""
    kinds, rows = kernel_rows(report)
    table = _table("kernel", *kinds, "total", numbers=True)
    for row in rows[:-1]:
        table.add_row(*row)
    if rows:
        table.add_section()
        table.add_row(*rows[-1])
    return table


def counts_table(name: str, counts: Mapping[str, int]) -> Table:
    """Names with their counts, most first."""
    table = _table(name, "count", numbers=True)
    for key, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(key, str(count))
    return table


def seconds_table(seconds: Mapping[str, float]) -> Table:
    """Steps with their wall time."""
    table = _table("step", "seconds", numbers=True)
    for key, value in seconds.items():
        table.add_row(key, f"{value:.3f}" if value < 10 else f"{value:.1f}")
    return table


def _table(*columns: str, numbers: bool = False) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and i else "left", overflow="fold")
    return table


def _shortened(text: str, most: int = 160) -> str:
    """``text`` on one line of at most ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def ranges(layers: Sequence[int]) -> str:
    """``layers 0, 2-4`` for [0, 2, 3, 4]."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer {text}" if len(layers) == 1 else f"layers {text}"
