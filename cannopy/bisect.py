"""Which single rewrite takes the result out of tolerance: the first n are applied, and n is searched by halving.

A rewrite is one application of one rule; every other pass counts as one as well. The graph is run op by op on the
CPU kernels (on the device where there is one), not through torchair.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from cannopy import api, pipeline
from cannopy.backend.torchair import have_npu
from cannopy.frontend import state
from cannopy.frontend.capture import capture
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.engine.apply import Log
from cannopy.fusion_rules.engine.match import Match
from cannopy.fx_passes import dump, provenance
from cannopy.fx_passes.manager import Pass, PassError, PassManager
from cannopy.fx_passes.program import Program
from cannopy.options import Options
from cannopy.parity.graph import GraphParity
from cannopy.parity.measure import ParityReport


@dataclass(frozen=True)
class Step:
    """One rewrite: a rule at an anchor, or a whole pass (anchor "").

    ``number`` counts from 1 in the order of application, ``place`` is the index of its pass in the pipeline. ``lines``
    are the source lines of the nodes that matched.
    """

    number: int
    name: str
    place: int
    anchor: str = ""
    layer: int | None = None
    module_path: str = ""
    lines: tuple[str, ...] = ()

    @property
    def is_rule(self) -> bool:
        """Whether it is an application of a rule."""
        return bool(self.anchor)

    def __str__(self) -> str:
        if not self.is_rule:
            return f"pass {self.name}"
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"rule {self.name} at {self.anchor}{layer}"


class Steps:
    """A `pipeline.Gate` that lets the first ``limit`` rewrites pass (all when None) and remembers them."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.place = 0
        self.taken: list[Step] = []

    def __call__(self, name: str, match: Match | None) -> bool:
        if self.limit is not None and len(self.taken) >= self.limit:
            return False
        number = len(self.taken) + 1
        if match is None:
            self.taken.append(Step(number, name, self.place))
        else:
            meta = match.anchor.meta
            self.taken.append(Step(number, name, self.place, match.anchor.name, meta.get("layer"),
                                   str(meta.get("module_path") or ""), provenance.lines(match.nodes)))
        return True

    def counted(self, step: Pass, place: int) -> Pass:
        """``step``, number ``place`` of the pipeline, noting when it starts."""

        def run(program: Program) -> int:
            self.place = place
            return step.run(program)

        return replace(step, run=run)


@dataclass(frozen=True)
class Probe:
    """The graph after the first ``len(steps)`` rewrites. ``error`` is what a rewrite, a check or a kernel raised."""

    steps: tuple[Step, ...]
    text: str
    report: ParityReport | None
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether it ran and every limit held."""
        return not self.error and self.report is not None and self.report.passed

    @property
    def problem(self) -> str:
        """What is wrong, "" when nothing is."""
        if self.error or self.report is None:
            return self.error
        return "\n".join(self.report.failures)


@dataclass(frozen=True)
class Bisection:
    """The outcome. ``culprit`` is None when nothing is wrong, or when the captured graph already is (``captured``).

    ``problem`` says what the first wrong graph does, ``origin`` where the culprit is defined (rules from outside),
    ``diff`` what it changed in the graph ("" when it raised before it changed anything). ``probes`` counts the graphs
    that were run, ``steps`` all rewrites of the compilation.
    """

    steps: int
    probes: int
    seconds: float
    culprit: Step | None = None
    captured: bool = False
    problem: str = ""
    origin: str = ""
    diff: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether the result stays in tolerance to the last rewrite."""
        return self.culprit is None and not self.captured

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON takes."""
        plain = asdict(self)
        if self.culprit is not None:
            plain["culprit"]["lines"] = list(self.culprit.lines)
        return {"clean": self.clean, **plain}


class Bisector:
    """Probes of one captured call.

    Args:
        program: the call as it was captured; it stays as it is.
        model, method, args, kwargs: the call.
        options: what is compiled; ``block_size``, ``rules`` and ``pipeline`` count.
    """

    def __init__(self, program: Program, model: torch.nn.Module, method: str, args: tuple[Any, ...],
                 kwargs: Mapping[str, Any], options: Options) -> None:
        self.program = program
        self.plan = pipeline.plan(options)
        self.parity = GraphParity(model, method, args, kwargs, program.inputs)
        self.probes = 0
        self._all: tuple[Step, ...] = ()

    def probe(self, limit: int | None) -> Probe:
        """Apply the first ``limit`` rewrites to a copy of the captured graph, verify, run and compare."""
        program, steps, error = self._rewrite(limit)
        if error:
            return Probe(tuple(steps.taken), dump.text(program), None, error)
        self.probes += 1
        try:
            report = self.parity.check(program)
        except Exception as e:  # noqa: BLE001 whatever a kernel raises on arguments that a wrong rewrite gave it
            return Probe(tuple(steps.taken), dump.text(program), None, f"the graph does not run: {_said(e)}")
        return Probe(tuple(steps.taken), dump.text(program), report)

    def search(self, progress: Callable[[str], None] = lambda text: None) -> Bisection:
        """Find the first rewrite after which the result is wrong: one probe per halving."""
        start = time.perf_counter()
        whole = self.probe(None)
        self._all = whole.steps
        total = len(self._all)
        progress(f"all {total} rewrites: {_verdict(whole)}")
        if whole.good:
            return self._done(start, total, notes=_notes(whole))
        good, bad = self.probe(0), whole
        progress(f"none of them: {_verdict(good)}")
        if not good.good:
            return self._done(start, total, captured=True, problem=good.problem)
        low, high = 0, total
        while high - low > 1:
            middle = (low + high) // 2
            found = self.probe(middle)
            progress(f"the first {middle}: {_verdict(found)}")
            if found.good:
                low, good = middle, found
            else:
                high, bad = middle, found
        culprit = bad.steps[high - 1]
        user = self.plan.user.get(culprit.name)
        after = self._unchecked(high) if bad.error else bad.text
        diff = dump.diff(good.text, after, f"{high - 1} rewrites", f"{high} rewrites") if after else ""
        return self._done(start, total, culprit=culprit, problem=bad.problem, origin=user.origin if user else "",
                          diff=diff)

    def _unchecked(self, limit: int) -> str:
        """The graph after ``limit`` rewrites, verified or not, as text; "" when a rewrite raises."""
        program, _, error = self._rewrite(limit, verify=False)
        return "" if error else dump.text(program)

    def _rewrite(self, limit: int | None, verify: bool = True) -> tuple[Program, Steps, str]:
        program, steps = copy.deepcopy(self.program), Steps(limit)
        dialect.register_all()
        passes = pipeline.passes(self.plan, Log(), steps)
        if limit is not None and limit <= len(self._all):
            passes = passes[: self._all[limit - 1].place + 1] if limit else ()  # nothing happens behind the last step
        try:
            PassManager([steps.counted(p, i) for i, p in enumerate(passes)], verify).run(program)
        except PassError as e:
            return program, steps, str(e)
        return program, steps, ""

    def _done(self, start: float, total: int, **found: Any) -> Bisection:
        return Bisection(total, self.probes, time.perf_counter() - start, **found)


def search(model: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options,
           progress: Callable[[str], None] = lambda text: None) -> Bisection:
    """Capture ``model.method(*args, **kwargs)`` and find the first rewrite after which its result is wrong.

    The arguments and the model stay as they are. Raises `CannopyError` for a model without weights, and what capture
    raises; what a rewrite raises is a finding.
    """
    if not have_npu():
        from cannopy.backend.host.activate import activate

        activate()
    state.prepare_state(model, args, dict(kwargs), method=method)
    with api.target_of(options), _quiet():
        program = capture(model, method, args, kwargs)
        return Bisector(program, model, method, args, kwargs, options).search(progress)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a trace for each call that its fake kernels refuse; here that is a finding and told as one."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _verdict(probe: Probe) -> str:
    return "in tolerance" if probe.good else f"wrong ({probe.problem.splitlines()[0]})"


def _notes(probe: Probe) -> list[str]:
    return list(probe.report.notes) if probe.report else []


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
