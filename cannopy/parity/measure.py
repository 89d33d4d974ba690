"""Numbers and limits of a parity check: per-token errors against float64, and how fair each differing pick was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cannopy.parity.picks import Choice

MEDIAN_LIMIT = 1.25
"""Largest ratio of the compiled run's median error to that of the plain run, eager in the model's dtype."""
P90_LIMIT = 1.5
"""The same at the 90th percentile."""
LARGEST_LIMIT = 4.0
"""The same of the largest error. It finds the single wrong row, whose error is of order 1 where bf16's is 0.01. On
correct graphs of DeepSeek-V3.2 (`benchmarks.serving_parity`, results and cache rows) the ratio was 0.7 to 1.0."""
FEW_ROWS = 16
"""Below this many rows two equally good bf16 runs differ in their errors by more than the limits of `measure` allow."""
FEW_ROWS_LIMIT = 2.5
"""Limit for the median error of so few rows. Measured on 14 correct graphs each, rows of 32 values: 0.6 to 1.5 for one
row, 0.8 to 1.2 for four and for twelve."""
SUMMATION_FLOOR = 16 * torch.finfo(torch.float32).eps
"""Errors up to this (1.9e-6) are within any limit. The order in which the CPU's BLAS sums 1000 to 2000 products in
fp32 depends on the layout of the weight, and the error of one product with it (measured: 2.9e-7 to 6.9e-7).
Only fp32 models are that exact."""
BLIND = 0.25
"""Median error of the plain run from which on a comparison with it says nothing: a wrong result is off by as much. On
tiny and small models (`benchmarks.serving_parity`) plain bf16 has 0.003 to 0.03."""
TIE_SIGMAS = 8.0
"""How far apart two scores may be and still count as a tie, in standard deviations of bf16 noise on the scores.

The difference of two scores that each carry noise σ has deviation √2·σ; the largest of some ten thousand of them is
about 4·√2·σ = 5.7σ, and the estimate of σ itself is uncertain where a row has few candidates.
"""


@dataclass(frozen=True)
class Errors:
    """Relative error per token, ``‖y − y64‖ / ‖y64‖``, over ``tokens`` tokens."""

    tokens: int
    median: float
    p90: float
    largest: float

    @classmethod
    def of(cls, values: torch.Tensor) -> Errors:
        """Of the errors ``values`` [tokens]."""
        median, p90 = torch.quantile(values, torch.tensor([0.5, 0.9], dtype=values.dtype)).tolist()
        return cls(values.numel(), median, p90, float(values.max()))


@dataclass(frozen=True)
class ErrorParity:
    """Errors of the compiled and of the plain run on the same picks, for one phase."""

    phase: str
    compiled: Errors
    plain: Errors

    @property
    def failures(self) -> list[str]:
        """What is over its limit, one sentence each."""
        return self.over((("median", MEDIAN_LIMIT), ("p90", P90_LIMIT), ("largest", LARGEST_LIMIT)))

    def over(self, limits: Iterable[tuple[str, float]]) -> list[str]:
        """A sentence for each of ``limits`` (name of an error, largest ratio to the plain run's) that does not hold."""
        found = []
        if not self.plain.median <= BLIND:
            found.append(f"{self.phase}: the plain run itself is {self.plain.median:.2g} from float64 (median), more "
                         f"than {BLIND}: it is no measure for the compiled run")
        for name, limit in limits:
            ours, plain = getattr(self.compiled, name), getattr(self.plain, name)
            if not ours <= max(limit * plain, SUMMATION_FLOOR):  # a NaN fails
                bound = f"{limit} × {plain:.3e} of the plain run"
                found.append(f"{self.phase}: {name} error {ours:.3e} of the compiled run is over {bound}")
        return found


@dataclass(frozen=True)
class _FewRows(ErrorParity):
    """`ErrorParity` of fewer than `FEW_ROWS` rows."""

    @property
    def failures(self) -> list[str]:
        """What is over its limit, one sentence each."""
        return self.over((("median", FEW_ROWS_LIMIT), ("largest", LARGEST_LIMIT)))


def errors_of(name: str, ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> ErrorParity:
    """Errors of three runs of the same rows, float64 [rows, features]; few rows have a wider limit of the median."""
    kind = _FewRows if exact.shape[0] < FEW_ROWS else ErrorParity
    return kind(name, Errors.of(token_errors(ours, exact)), Errors.of(token_errors(plain, exact)))


@dataclass(frozen=True)
class WriteParity:
    """Bits of a cache around the steps of one phase.

    ``name``: of the tensors, over all layers. ``rows``: rows that the steps write, ``outside``: all others, both summed
    over layers and steps; ``changed``: rows outside whose bits are not what they were before the step.
    """

    phase: str
    name: str
    rows: int
    outside: int
    changed: int

    @property
    def failures(self) -> list[str]:
        """What is wrong, one sentence each."""
        where = f"rows of the cache ({self.name}) outside of the step's slots"
        return [f"{self.phase}: {self.changed} of {self.outside} {where} have changed"] if self.changed else []


@dataclass(frozen=True)
class PickParity:
    """Picks of one kind in one phase.

    ``tokens``: picks made, one per token and layer. ``differ``: those where plain bf16, given the same picks before,
    would have picked otherwise. ``worst``: the largest amount by which a picked candidate's float64 score lies under
    one that was left, in units of the tie limit; at most 1 is a tie. ``invalid``: picks with a masked, missing or
    repeated candidate.
    """

    phase: str
    kind: str
    tokens: int
    differ: int
    worst: float
    invalid: int

    @property
    def failures(self) -> list[str]:
        """What is wrong, one sentence each."""
        found = []
        if not self.worst <= 1:
            apart = f"the scores at the cut differ by {self.worst:.1f} times what the plain run's noise explains"
            found.append(f"{self.phase}: a pick of {self.kind} is no tie: {apart}")
        if self.invalid:
            share = f"{self.invalid} of {self.tokens} picks of {self.kind}"
            found.append(f"{self.phase}: {share} have a masked, missing or repeated candidate")
        return found


@dataclass(frozen=True)
class ParityReport:
    """The outcome of one parity check; ``notes`` say what was not checked and why, ``dtype`` is the plain run's."""

    errors: list[ErrorParity]
    picks: list[PickParity] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    writes: list[WriteParity] = field(default_factory=list)
    dtype: str = ""

    @property
    def plain(self) -> str:
        """The plain run in words: ``plain bf16``."""
        return f"plain {self.dtype}".rstrip()

    @property
    def failures(self) -> list[str]:
        """Every limit that was missed, one sentence each."""
        parts: list[ErrorParity | PickParity | WriteParity] = [*self.errors, *self.picks, *self.writes]
        return [sentence for part in parts for sentence in part.failures]

    @property
    def passed(self) -> bool:
        """Whether nothing is over its limit."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON takes."""
        limits = {"median": MEDIAN_LIMIT, "p90": P90_LIMIT, "largest": LARGEST_LIMIT, "tie_sigmas": TIE_SIGMAS}
        return {"passed": self.passed, "failures": self.failures, "limits": limits, **asdict(self)}


def token_errors(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative error per row of ``result`` against ``exact``, both float64 [tokens, features].

    Entries that are NaN or the same infinity in both count as 0 (a softmax of hidden keys only); in one, as NaN.
    """
    alike = (result.isnan() & exact.isnan()) | (exact.isinf() & (result == exact))
    result, exact = result.masked_fill(alike, 0.0), exact.masked_fill(alike, 0.0)
    scale = torch.linalg.vector_norm(exact, dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    errors: torch.Tensor = torch.linalg.vector_norm(result - exact, dim=-1) / scale
    return errors


def compare_picks(phase: str, plain: Sequence[Choice], exact: Sequence[Choice]) -> list[PickParity]:
    """One `PickParity` per kind from the choices of the bf16 and the float64 run at the same recorded picks."""
    kinds = list(dict.fromkeys(choice.kind for choice in exact))
    pairs = list(zip(plain, exact, strict=True))
    return [_of_kind(phase, kind, [pair for pair in pairs if pair[1].kind == kind]) for kind in kinds]


def _of_kind(phase: str, kind: str, pairs: Iterable[tuple[Choice, Choice]]) -> PickParity:
    tokens = differ = invalid = 0
    worst = 0.0
    for plain, exact in pairs:
        tokens += exact.scores.shape[0]
        differ += int(plain.differs.sum())
        invalid += int(_invalid(exact).sum())
        worst = max(worst, float(_gap(exact).div(_tie_limit(plain, exact)).max()))
    return PickParity(phase, kind, tokens, differ, worst, invalid)


def _gap(choice: Choice) -> torch.Tensor:
    """[rows]: best score that was left minus worst that was picked, at least 0; masked candidates do not count."""
    scores = choice.scores.double()
    left = scores.masked_fill(choice.picked | ~choice.valid, -torch.inf).amax(-1)
    taken = scores.masked_fill(~(choice.picked & choice.valid), torch.inf).amin(-1)
    return (left - taken).clamp_min(0).nan_to_num(nan=0.0)


def _tie_limit(plain: Choice, exact: Choice) -> torch.Tensor:
    """[rows]: `TIE_SIGMAS` deviations of plain bf16's scores from float64's, at least one bf16 step of the scores."""
    valid = plain.valid & exact.valid
    scores = exact.scores.double().masked_fill(~valid, 0)
    noise = plain.scores.double().masked_fill(~valid, 0) - scores
    sigma = (noise.square().sum(-1) / valid.sum(-1).clamp_min(1)).sqrt()
    step = scores.abs().amax(-1) * torch.finfo(torch.bfloat16).eps
    return torch.maximum(TIE_SIGMAS * sigma, step).clamp_min(torch.finfo(torch.float64).tiny)


def _invalid(choice: Choice) -> torch.Tensor:
    """Bool [rows]: the recorded picks are not min(k, valid candidates) different valid ones."""
    wanted = choice.wanted
    proper = (choice.picked & choice.valid).sum(-1)
    expected = choice.valid.sum(-1).clamp_max(wanted.shape[1])
    return (proper != expected) | ((wanted >= 0).sum(-1) != expected)
