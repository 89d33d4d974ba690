"""Why each fusion matched or did not: the log of the rules, put together by kind of layer, and where a node went."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cannopy.errors import CannopyError, unknown
from cannopy.fusion_rules.engine.absent import absence
from cannopy.fusion_rules.engine.record import Hit, Miss, by_layer, kinds_of
from cannopy.fusion_rules.engine.rule import Rule
from cannopy.fusion_rules.engine.stop import describe, short
from cannopy.fx_passes import kernels, regions
from cannopy.fx_passes.program import Program
from cannopy.options import Options

BEST = 3
"""Attempts that are shown of a rule that came near nowhere."""


@dataclass(frozen=True)
class Applied:
    """One kind of place where a rule applied: ``places`` in ``layers``; ``kernels`` are the device ops it made."""

    rule: str
    layers: tuple[int, ...]
    places: int
    module_path: str
    node: str
    lines: tuple[str, ...]
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """One kind of place where a rule did not apply; the fields are those of `Miss`, of the first of ``places``."""

    rule: str
    layers: tuple[int, ...]
    places: int
    reason: str
    kind: str
    matched: int
    total: int
    anchor: str
    node: str
    expected: str
    found: str
    remedy: str
    clause: str
    source: str
    source_text: str
    module_path: str
    near: bool


@dataclass(frozen=True)
class Fate:
    """What became of a node: ``steps`` in words, from the captured graph to the final one."""

    node: str
    what: str
    source: str
    source_text: str
    steps: tuple[str, ...]
    kernels: tuple[str, ...]


@dataclass
class Explanation:
    """The answer of `explain`.

    ``applied`` and ``refused`` are in the order in which rules ran; ``absent`` {rule: why it came near nowhere};
    ``off``: rules that the options switch off; ``unmet``: rules that the options require and that applied nowhere.
    """

    applied: list[Applied]
    refused: list[Refused]
    absent: dict[str, str]
    off: list[str]
    unmet: list[str]
    lineage: Lineage = field(repr=False)

    def of_rule(self, rule: str) -> Explanation:
        """Only what concerns ``rule``, with the best of the attempts that ended early where none came near.

        `CannopyError` with the nearest name for a rule that there is not.
        """
        names = sorted(self.lineage.rules)
        if rule not in names:
            raise CannopyError(unknown("rule", rule, names))
        refused = [r for r in self.refused if r.rule == rule]
        if not refused:
            attempts = sorted((m for m in self.lineage.misses if m.rule == rule), key=lambda m: -m.matched)
            refused = _refused(attempts)[:BEST]
        return Explanation(
            [a for a in self.applied if a.rule == rule], refused,
            {k: v for k, v in self.absent.items() if k == rule}, [r for r in self.off if r == rule],
            [r for r in self.unmet if r == rule], self.lineage,
        )

    def at_node(self, node: str, rule: str | None = None) -> Explanation:
        """Only the places that ``node`` is part of, of one rule or of all; see `Lineage.places`."""
        hits, misses = self.lineage.places(node)
        if rule is not None:
            hits, misses = [h for h in hits if h.rule == rule], [m for m in misses if m.rule == rule]
        return Explanation(_applied(hits, self.lineage), _refused(misses), {}, [], [], self.lineage)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"hits": [plain(a) for a in self.applied], "misses": [plain(r) for r in self.refused],
                "absent": dict(self.absent), "off": list(self.off), "unmet": list(self.unmet)}


@dataclass
class Lineage:
    """Names of nodes before, in and after the passes, and what connects them."""

    rules: Mapping[str, Sequence[Rule]]
    hits: Sequence[Hit]
    misses: Sequence[Miss]
    captured: Mapping[str, tuple[str, str, str, tuple[str, ...]]]
    replaced: Mapping[str, str]
    final: Mapping[str, fx.Node]
    copied: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._taken: dict[str, list[Hit]] = {}
        self._made: dict[str, Hit] = {}
        for hit in self.hits:
            for name in (*hit.nodes, hit.node):
                if hit not in self._taken.setdefault(name, []):
                    self._taken[name].append(hit)
            self._made.update(dict.fromkeys(hit.made, hit))
        self._before: dict[str, list[str]] = {}
        for old, new in self.replaced.items():
            self._before.setdefault(new, []).append(old)

    def kernels(self, hit: Hit) -> tuple[str, ...]:
        """Names of the device ops of the final graph that come from ``hit``."""
        found = [n for name in hit.made for n in self._ends(name) if _is_device(self.final[n])]
        fused = [n for n in found if short(self.final[n].target).startswith(("npu.", "air."))]
        return tuple(dict.fromkeys(fused or found))

    def _ends(self, name: str, seen: set[str] | None = None) -> list[str]:
        """The nodes of the final graph that ``name`` ended in, through replacements, rules and readers."""
        seen = seen if seen is not None else set()
        if name in seen:
            return []
        seen.add(name)
        if name in self.final:
            return [name]
        following = [self.replaced[name]] if name in self.replaced else []
        following += [m for hit in self._taken.get(name, []) for m in hit.made]
        if not following and name in self.captured:
            following = list(self.captured[name][3])
        return [end for one in following for end in self._ends(one, seen)]

    def _origins(self, name: str) -> list[Hit]:
        """The hits that led to ``name``, the last one first."""
        found: list[Hit] = []
        todo, seen = [name], {name}
        while todo:
            here = todo.pop(0)
            hit = self._made.get(here)
            before = list(self._before.get(here, ()))
            if hit is not None and hit not in found:
                found.append(hit)
                before += hit.nodes
            for one in before:
                if one not in seen:
                    seen.add(one)
                    todo.append(one)
        return found

    def named(self, node: str) -> list[str]:
        """Nodes that ``node`` may mean: a name, or the device op of final nodes (``npu_rms_norm``).

        `CannopyError` where layers are ``copied``: their nodes have no history of their own.
        """
        if self.copied:
            raise CannopyError(f"{node!r} cannot be followed: {len(self.copied)} layers were copied from others",
                               "explain with Options(regions=False), or `cannopy explain --node`")
        if node in self.final or node in self.captured or node in self._taken or node in self._made:
            return [node]
        if any(node in (m.node, m.anchor) for m in self.misses):
            return [node]
        wanted = node.removeprefix("npu::").removeprefix("npu.").removesuffix(".default")
        names = {n: short(f.target).rpartition(".")[2] for n, f in self.final.items() if f.op == "call_function"}
        found = [n for n, op in names.items() if op == wanted or op == f"{wanted}_functional"]
        if not found:
            known = [*self.final, *self.captured, *dict.fromkeys(names.values())]
            close = difflib.get_close_matches(node, known, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise CannopyError(f"no node and no device op {node!r} in the captured or the final graph{hint}",
                               "`cannopy dump` writes the graphs with the names of all nodes")
        return found

    def places(self, node: str) -> tuple[list[Hit], list[Miss]]:
        """The hits that ``node`` went into or came from and the misses that it is part of."""
        names = self.named(node)
        hits = [h for name in names for h in (*self._taken.get(name, ()), *self._origins(name))]
        around = {old for name in names for old in (name, *self._chain(name))}
        misses = [m for m in self.misses if around & {m.node, m.anchor, *m.nodes}]
        return list(dict.fromkeys(hits)), misses

    def _chain(self, name: str) -> list[str]:
        found = []
        while name in self.replaced and self.replaced[name] not in found:
            name = self.replaced[name]
            found.append(name)
        return found

    def fate(self, node: str) -> Fate:
        """What became of the first node that ``node`` names, and of which lines it is made when it is a kernel."""
        name = self.named(node)[0]
        ends = self._ends(name)
        ops = tuple(dict.fromkeys(e for e in ends if _is_device(self.final[e])))
        node_of = self.final.get(name)
        if name in self.captured:
            what, source, text, _ = self.captured[name]
        else:
            what = describe(node_of) if node_of is not None else "made and consumed by the passes"
            source = str(node_of.meta.get("source") or "") if node_of is not None else ""
            text = str(node_of.meta.get("source_text") or "").strip() if node_of is not None else ""
        return Fate(name, what, source, text, tuple(self._steps(name, ends)), ops)

    def _steps(self, name: str, ends: Sequence[str]) -> list[str]:
        steps = []
        for hit in self._origins(name) if name in self.final else ():
            steps.append(f"made by {hit.rule} from {len(hit.nodes)} operations")
        here, seen = name, {name}
        while here not in self.final:
            hits = self._taken.get(here, [])
            if hits:
                steps.append(f"part of a match of {hits[-1].rule}")
                here = next((m for m in reversed(hits[-1].made) if m not in seen), "")
            elif here in self.replaced:
                here = self.replaced[here]
                steps.append(f"rewritten as {here}")
            else:
                readers = self.captured[here][3] if here in self.captured else ()
                here = next((r for r in readers if r not in seen), "")
                if here:
                    steps.append(f"goes into {here}, which reads it")
            if not here or here in seen:
                break
            seen.add(here)
        if not ends:
            steps.append("not in the final graph: nothing that the method returns or writes needs it")
        elif ends != [name]:
            steps.append("ends in " + ", ".join(f"{e} ({describe(self.final[e])})" for e in dict.fromkeys(ends)))
        return steps


def plain(value: Applied | Refused | Fate) -> dict[str, Any]:
    """A dataclass as JSON has it, with lists for tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(value).items()}


def explain(
    model: torch.nn.Module,
    method: str = "forward",
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> Explanation:
    """Capture ``model.<method>``, run all passes, and say of each fusion rule where it applied and where not, and why.

    Nothing is emitted and nothing cached. The arguments and errors are those of `cannopy.compile`, except that a fusion
    which is required and does not apply is no error but in ``unmet``.
    """
    from cannopy import pipeline

    options = options or Options()
    made = pipeline.plan(options)
    wanted = {name for name, switch in options.fusions.items() if switch == "require"}
    captured, program, done = _lower(model, method, example_inputs, dict(example_kwargs or {}), options)
    groups: dict[str, list[Rule]] = {}
    for name in made.order:
        for rule in made.groups[name]:
            groups.setdefault(rule.name, []).append(rule)
    final = {n.name: n for n in program.gm.graph.nodes}
    replaced = program.gm.meta.get("replaced", {})
    copied = frozenset(name for region in regions.of(program).found for copy in region.copies
                       for name in copy.prefixes.values())
    lineage = Lineage(groups, done.log.hits, done.log.places(), captured, replaced, final, copied)
    off = [name for name, switch in options.fusions.items() if switch is False]
    return _explanation(lineage, done.log.seen, off, sorted(wanted))


def _lower(model: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any],
           options: Options) -> tuple[dict[str, Any], Any, Any]:
    from cannopy import api, pipeline_text, planning
    from cannopy.backend.torchair import have_npu
    from cannopy.frontend import state

    relaxed = {name: True if switch == "require" else switch for name, switch in options.fusions.items()}
    stages = tuple(s for s in pipeline_text.parse(options.pipeline).stages if s.name != planning.STAGE)
    options = dataclasses.replace(options, fusions=relaxed, pipeline=str(pipeline_text.Pipeline(stages)))
    if not have_npu():
        from cannopy.backend.host.activate import activate

        activate()
    state.prepare_state(model, args, kwargs, method=method)
    captured: dict[str, Any] = {}

    def note(program: Program) -> None:
        captured.clear()
        captured.update({
            n.name: (describe(n), str(n.meta.get("source") or ""), str(n.meta.get("source_text") or "").strip(),
                     tuple(u.name for u in n.users))
            for n in program.gm.graph.nodes
        })

    program, done = api.lower(model, method, args, kwargs, options, {}, seen=note)
    return captured, program, done


def _explanation(lineage: Lineage, seen: Mapping[str, frozenset[str]], off: list[str],
                 wanted: list[str]) -> Explanation:
    applied = _applied(lineage.hits, lineage)
    refused = _refused([m for m in lineage.misses if m.near])
    fired = {a.rule for a in applied}
    told = fired | {r.rule for r in refused}
    absent: dict[str, str] = {}
    for rule, variants in lineage.rules.items():
        if rule in told or rule in off:
            continue
        if rule in seen:
            others = {r: v for r, v in lineage.rules.items() if r not in fired and r != rule}
            absent[rule] = absence(variants, seen[rule], functools.partial(_maker, rules=others))
    order = {rule: i for i, rule in enumerate(lineage.rules)}
    refused.sort(key=lambda r: (order.get(r.rule, 0), -r.matched))
    unmet = [w for w in wanted if w not in fired]
    return Explanation(applied, refused, absent, off, unmet, lineage)


def _maker(op: str, rules: Mapping[str, Sequence[Rule]]) -> str:
    """The rule that makes the operation ``op`` (``cannopy.rotary``, ``npu.npu_swiglu``), or ""."""
    space, _, name = op.partition(".")
    for rule, variants in rules.items():
        if (space in ("npu", "air") and any(v.kernel == name for v in variants)) or (
            space == "cannopy" and rule in (f"lift_{name}", name)
        ):
            return rule
    return ""


def _applied(hits: Sequence[Hit], lineage: Lineage) -> list[Applied]:
    return [
        Applied(hit.rule, layers, places, hit.module_path, hit.node, hit.lines,
                tuple(dict.fromkeys(short(lineage.final[k].target).rpartition(".")[2] for k in lineage.kernels(hit))))
        for hit, layers, places in kinds_of(hits)
    ]


def _refused(misses: Sequence[Miss]) -> list[Refused]:
    return [
        Refused(m.rule, layers, places, m.reason, m.kind, m.matched, m.total, m.anchor, m.node, m.expected, m.found,
                m.remedy, m.clause, m.source, m.source_text, m.module_path, m.near)
        for m, layers, places in by_layer(misses)
    ]


def _is_device(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target not in kernels.RENAMES
