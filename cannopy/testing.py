"""Checks of rules of your own: does it apply, and is the result as close to float64 as before?

    from cannopy.testing import check_rule

    def test_my_rule():
        check_rule(my_rule, lambda x, gamma: F.normalize(x, dim=-1) * 8 * gamma,
                   torch.randn(4, 64), torch.randn(64), parameters=(1,))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from cannopy import api, pipeline
from cannopy.backend.torchair import have_npu
from cannopy.errors import CannopyError
from cannopy.frontend.capture import capture
from cannopy.fusion_rules import catalog, dialect
from cannopy.fusion_rules.engine.record import Log
from cannopy.fusion_rules.extension import LIFT, UserRule
from cannopy.fx_passes import dump
from cannopy.fx_passes.manager import PassManager
from cannopy.options import Options, Target
from cannopy.parity.graph import GraphParity
from cannopy.parity.measure import ParityReport

SCALES = (1.0, 8.0, 0.125)
"""Standard deviations of the random inputs, one after the other: a wrong constant shows at one of them."""


class RuleCheckError(CannopyError, AssertionError):
    """The rule did not apply as often as expected, or its result is out of tolerance."""


@dataclass(frozen=True)
class RuleCheck:
    """What one check saw.

    ``applied``: number of applications. ``reasons``: why not, at each place that came near. ``before`` and ``after``:
    the graph around the rule as text. ``reports``: parity per trial.
    """

    applied: int
    reasons: tuple[str, ...]
    before: str
    after: str
    reports: tuple[ParityReport, ...]


class _Holder(torch.nn.Module):
    """``function`` as the forward of a module that owns the arguments numbered in ``parameters``."""

    def __init__(self, function: Callable[..., Any], values: Sequence[Any], parameters: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        self.places = tuple(parameters)
        self.held = torch.nn.ParameterList(torch.nn.Parameter(values[i], requires_grad=False) for i in parameters)

    def forward(self, *values: Any) -> Any:
        arguments = list(values)
        for place, value in zip(self.places, self.held, strict=True):
            arguments.insert(place, value)
        return self.function(*arguments)


def check_rule(
    rule: UserRule,
    function: Callable[..., Any],
    *examples: Any,
    parameters: Sequence[int] = (),
    times: int = 1,
    trials: int = 3,
    seed: int = 0,
    target: Target = "atlas-a3",
) -> RuleCheck:
    """Apply ``rule`` alone to the graph of ``function(*examples)`` and compare the result with eager and float64.

    The graph is normalised and, unless the rule stands before ``lift``, lifted; it is verified after each step.

    Args:
        rule: the value that ``@cannopy.rule`` made.
        function: plain PyTorch; its graph is what a model's would be.
        examples: its arguments. Tensors give shape and dtype; floating ones get new random values per trial, others
            stay as they are.
        parameters: numbers (ascending) of the arguments that are weights of a model.
        times: how often the rule must apply; 0 checks that it refuses, and ``reasons`` says why.
        trials: number of random inputs, with the standard deviations of `SCALES` in turn.
        seed: of the random inputs.
        target: the product whose contracts hold.

    Raises:
        RuleCheckError: the rule applied another number of times, or a result is out of tolerance
            (`cannopy.parity.measure`: 1.25 times the error of plain eager in the median, 1.5 times at the 90th
            percentile; `cannopy.parity.graph` for fewer than 16 rows).
        PassError: the rule raised, or left a graph that does not verify.
    """
    if not have_npu():
        from cannopy.backend.host.activate import activate

        activate()
    options = Options(target=target)
    generator = torch.Generator().manual_seed(seed)
    found: RuleCheck | None = None
    reports: list[ParityReport] = []
    for trial in range(trials):
        values = [_random(value, generator, SCALES[trial % len(SCALES)]) for value in examples]
        holder = _Holder(function, values, parameters).eval()
        args = tuple(value for i, value in enumerate(values) if i not in parameters)
        with api.target_of(options):
            program = capture(holder, "forward", args)
            log, before = _apply(rule, program, options)
            found = RuleCheck(log.counts().get(rule.name, 0), _reasons(rule, log), before,
                              dump.text(program), ())
            _expect(rule, found, times)
            reports.append(GraphParity(holder, "forward", args, {}, program.inputs).check(program))
        if not reports[-1].passed:
            raise RuleCheckError(f"rule {rule.name}: trial {trial + 1} of {trials} is out of tolerance:\n  "
                                 + "\n  ".join(reports[-1].failures) + f"\n{found.after}")
    assert found is not None
    return RuleCheck(found.applied, found.reasons, found.before, found.after, tuple(reports))


def _apply(rule: UserRule, program: Any, options: Options) -> tuple[Log, str]:
    """Normalise, lift and apply ``rule`` in its place; the log and the graph just before it."""
    dialect.register_all()
    log = Log()
    order = (rule.name, LIFT) if rule.before == LIFT else (LIFT, rule.name)
    groups = MappingProxyType({LIFT: catalog.LIFT, rule.name: (rule.rule,)})
    passes = pipeline.passes(pipeline.Plan(options, order, groups, {rule.name: rule}), log)
    at = next(i for i, step in enumerate(passes) if step.name == rule.name)
    first, last = passes[:at], passes[at : at + 2]
    PassManager(first).run(program)
    before = dump.text(program)
    PassManager(last, given=[fact for step in first for fact in step.ensures]).run(program)
    return log, before


def _reasons(rule: UserRule, log: Log) -> tuple[str, ...]:
    return tuple(miss.reason for miss in log.places() if miss.rule == rule.name)


def _expect(rule: UserRule, found: RuleCheck, times: int) -> None:
    if found.applied == times:
        return
    reasons = "\n  ".join(found.reasons) or "nothing in the graph comes near its pattern"
    raise RuleCheckError(f"rule {rule.name} applied {found.applied} times, expected {times}:\n  {reasons}\n"
                         f"the graph that it was given:\n{found.before}")


def _random(value: Any, generator: torch.Generator, scale: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return (scale * torch.randn(value.shape, generator=generator)).to(value.dtype)
