"""One mutant: mutate, lower, compare, and ask for the reason where something no longer fuses."""

from __future__ import annotations

import copy
import random
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from cannopy.fusion_rules import catalog
from cannopy.fusion_rules.engine.record import Log, Miss
from cannopy.fx_passes.graph import aten, is_call, shape
from cannopy.fx_passes.program import Program
from cannopy.parity.picks import Pick, ReplayError
from tests.mutation import oracle
from tests.mutation.cases import CASES, Case, case, compiled
from tests.mutation.operators import MARK, Edit, NotHereError, Operator, mutate
from tests.mutation.residuals import residuals
from tests.mutation.table import OPERATORS

BEHIND: dict[str, tuple[str, ...]] = {
    "rms_norm": ("lift_rms_norm",),
    "add_rms_norm": ("lift_rms_norm", "rms_norm"),
    "rotary_mul": ("lift_rotary", "lift_rotary_half"),
    "sparse_flash_attention": ("lift_attention", "lift_rotary", "lift_rotary_half"),
    "fused_infer_attention": ("lift_attention",),
    "mla_prolog": ("sparse_flash_attention", "lift_attention", "lift_rms_norm", "lift_rotary", "lift_rotary_half"),
    "moe_experts": ("moe_gating_top_k", "swiglu"),
    "swiglu": ("moe_experts",),
}
"""Rules without which another has nothing to match: a reason of theirs is the reason."""

WRITTEN_OUT = "aten._softmax.default of 4 dims"
KEYS: dict[str, tuple[str, ...]] = {
    "sparse_flash_attention": ("cannopy.attention.default", "aten.relu.default"),
    "fused_infer_attention": ("cannopy.attention.default", WRITTEN_OUT),
    "mla_prolog": ("cannopy.attention.default", "aten.relu.default"),
    "rms_norm": ("aten.rsqrt.default",),
    "add_rms_norm": ("aten.rsqrt.default",),
    "rotary_mul": ("aten.neg.default",),
    "moe_gating_top_k": ("aten.sigmoid.default", "aten._softmax.default", "aten.gather.default"),
    "moe_experts": ("aten.silu.default",),
    "swiglu": ("aten.silu.default",),
}
"""Operations without which there is nothing for a rule: those that a mutation leaves without readers are no loss."""


@dataclass
class Outcome:
    """What became of one mutant.

    ``wrong``: what the lowered graph computes otherwise. ``lost``: fusions that the unchanged program has and the
    mutant has not. ``silent``: those of them without a reason that names the mutated thing. ``exposed``: the
    mutation changes the result by more than rounding (None where it is meant to keep the function).
    """

    operator: str
    case: str
    seed: int
    made: bool = False
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    legal: bool = False
    exposed: bool | None = None
    touched: str = ""

    @property
    def command(self) -> str:
        """What runs this mutant again."""
        return f"python tools/mutate.py --case {self.case} --operator {self.operator} --seed {self.seed}"


WEIGHTS = {"deepseek_v32": 2, "deepseek_v32_dense_batch": 2, "qwen3": 3, "qwen3_eager": 2, "qwen3_moe": 3,
           "moe_block": 6, "moe_block_batched": 6}
"""How often a case is drawn among those where an operator has a place: small graphs more often."""
PLAIN_NORM = ("norm_one_plus_gamma_fp32", "norm_gamma_fp32")
"""npu_add_rms_norm takes no fp32 gamma beside 16-bit values, npu_rms_norm does."""
MOVES = 8
"""Runs of the graph as it is, with values one rounding off, before a result is called wrong."""
VERIFIED = 4
"""One in so many mutants is lowered with the verifier between passes, which takes half of the time."""


def drawn(seed: int, cases: Sequence[str] = (), operators: Sequence[str] = ()) -> Outcome:
    """The mutant number ``seed``: operator, case, place and numbers follow from it."""
    rng = random.Random(seed)
    operator = OPERATORS[rng.choice(list(operators or OPERATORS))]
    names = list(cases or CASES)
    while names:
        name = rng.choices(names, [WEIGHTS.get(n, 1) for n in names])[0]
        if operator.sites(case(name).program):
            return one(case(name), operator, seed)
        names.remove(name)
    return Outcome(operator.name, "", seed)


def one(c: Case, operator: Operator, seed: int) -> Outcome:
    """Mutate ``c`` by ``operator`` at a place that ``seed`` chooses, and judge the result."""
    outcome = Outcome(operator.name, c.name, seed, legal=operator.legal)
    program = c.fresh()
    edit = Edit(program, random.Random(seed), c.nodes, dict(c.values))
    site = edit.rng.choice(operator.sites(program))
    outcome.touched = str(site)
    try:
        mutate(operator, edit, site)
    except NotHereError:
        return outcome
    _judge(outcome, c, operator, edit)
    return outcome


def _judge(outcome: Outcome, c: Case, operator: Operator, edit: Edit) -> None:
    before = edit.program
    after = copy.deepcopy(before)
    try:
        alone = oracle.plain(before, edit.values)
    except (RuntimeError, IndexError, ValueError):  # the mutated graph itself cannot run
        return
    if any(t.isnan().any() for t in alone.tensors if t.is_floating_point()) and _chooses(before):
        return  # picks among NaN mean nothing
    outcome.made = True
    try:
        done = compiled(after, verify=outcome.seed % VERIFIED == 0)
        ours, recorder = oracle.lowered(after, edit.values)
    except Exception:  # noqa: BLE001 any failure of the compiler is a finding
        outcome.wrong = [traceback.format_exc(limit=-3)]
        return
    try:
        as_is, wide = (run(before, edit.values, recorder.picks) for run in (oracle.plain, oracle.exact))
        outcome.wrong = oracle.wrong(ours, as_is, wide)
        if outcome.wrong:
            outcome.wrong = oracle.wrong(ours, as_is, wide, _moved(before, edit, recorder.picks))
    except ReplayError:
        as_is, wide, outcome.wrong = _picked_twice(before, edit, ours, recorder.picks)
    if outcome.wrong:  # picks among candidates that are all -inf cannot be replayed; equal without replay is equal
        own = [run(before, edit.values) for run in (oracle.plain, oracle.exact)]
        outcome.wrong = outcome.wrong if oracle.wrong(ours, *own) else []
    if not operator.same:
        outcome.exposed = _exposed(c, as_is, wide)
    counts = done.log.counts()
    names = catalog.groups()
    dead = {n.name: _key(n) for n in c.program.gm.graph.nodes}
    for node in before.gm.graph.nodes:
        dead.pop(node.name, None)
    gone = {name: sum(key in KEYS.get(name, ()) for key in dead.values()) for name in names}
    outcome.lost = [name for name in names if counts.get(name, 0) < c.fusions.get(name, 0) - gone[name]]
    if {"rms_norm", "add_rms_norm"} & set(outcome.lost):
        _either_norm(outcome, operator, c, counts, _sums_taken(c, done.log))
    for name in outcome.lost:
        misses = [m for m in done.log.misses if m.rule in (name, *BEHIND.get(name, ()))]
        outcome.reasons += [f"{m.rule}: {m.reason} [{m.node}, {m.source}]" for m in misses]
        if not any(_names(m, operator) or _points(m, edit) for m in misses):
            outcome.silent.append(name)


def _key(node: fx.Node) -> str:
    written = is_call(node, aten._softmax.default) and len(shape(node)) == 4
    return WRITTEN_OUT if written else str(node.target)


def _chooses(program: Program) -> bool:
    return any(is_call(n, aten.topk.default) for n in program.gm.graph.nodes)


def _moved(before: Program, edit: Edit, picks: Sequence[Pick]) -> list[oracle.Pair]:
    """Results for values that are one rounding off: how much the error of the graph as it is scatters."""
    sets = [oracle.moved(edit.values, seed) for seed in range(MOVES)]
    return [(oracle.plain(before, values, picks), oracle.exact(before, values, picks)) for values in sets]


def _picked_twice(
    before: Program, edit: Edit, ours: oracle.Results, picks: Sequence[Pick]
) -> tuple[oracle.Results, oracle.Results, list[str]]:
    """Where a fused op picks and the captured topk stays as well (its ids are a result), the two may break ties
    differently: floats are compared with the picks of the op, integers with those of the topk, both must be fair."""
    fused = [p for p in picks if p.kind in ("keys", "experts")]
    kept = [p for p in picks if p.kind == "topk"]
    found: list[str] = []
    for chosen, integers in ((fused, False), (kept, True)):
        try:
            as_is, wide = (run(before, edit.values, chosen) for run in (oracle.plain, oracle.exact))
        except ReplayError:
            as_is, wide = (run(before, edit.values) for run in (oracle.plain, oracle.exact))
        texts = oracle.wrong(ours, as_is, wide)
        found += [t for t in texts if not t.startswith("result") or ("integers differ" in t) == integers]
    return as_is, wide, found


def _sums_taken(c: Case, log: Log) -> bool:
    """Whether experts took a residual sum into their last kernel, as they do where nothing else reads its term."""
    sums = {r.total.name for r in residuals(c.program)}
    return any(sums & set(hit.nodes) for hit in log.hits if hit.rule == "moe_experts")


def _either_norm(outcome: Outcome, operator: Operator, c: Case, counts: dict[str, int], taken: bool) -> None:
    """One kind of norm for the other is no loss of a norm, unless the residual sum could have stayed in it."""
    both = ("rms_norm", "add_rms_norm")
    if sum(counts.get(n, 0) for n in both) >= sum(c.fusions.get(n, 0) for n in both):
        keep_sum = operator.legal and operator.name not in PLAIN_NORM and not taken
        outcome.lost = [n for n in outcome.lost if n not in both or (keep_sum and n == "add_rms_norm")]


def _names(miss: Any, operator: Operator) -> bool:
    text = f"{miss.reason} {miss.node} {miss.source}"
    return MARK in text or any(word in text for word in operator.words)


def _points(miss: Miss, edit: Edit) -> bool:
    """Whether a reason is at, or writes out, the value that is read where another one was."""
    instead = miss.kind == "operand" and miss.node in edit.instead
    written = any(re.search(rf" at {re.escape(line)}(?!\d)", miss.reason) for line in edit.lines - {"None"})
    return instead or miss.node in edit.read or written


def _exposed(c: Case, as_is: oracle.Results, wide: oracle.Results) -> bool:
    """Whether the unchanged program's result would be wrong for the mutant."""
    shared = len(c.result.tensors)
    if len(as_is.tensors) != shared:
        return True
    return bool(oracle.wrong(oracle.Results(c.result.tensors), oracle.Results(as_is.tensors),
                             oracle.Results(wide.tensors)))
