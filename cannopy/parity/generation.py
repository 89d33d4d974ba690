"""Parity of a text generation: prefill and greedy decode steps, compiled against eager in its dtype and in float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cannopy.frontend.generation import Call, GenerationCase, Phase, cache_argument
from cannopy.parity.measure import ErrorParity, Errors, ParityReport, PickParity, compare_picks, token_errors
from cannopy.parity.picks import Choice, Pick, Recorder, Replay
from cannopy.parity.reference import all_in_float64, dtype_of, in_float64, result_rows
from cannopy.parity.spread import Spread

Forward = Callable[..., Any]


@dataclass
class Step:
    """One call: token ids [batch, tokens], logits float64 [batch·tokens, vocabulary], and what was picked."""

    phase: Phase
    ids: torch.Tensor
    logits: torch.Tensor
    seconds: float
    picks: list[Pick] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)


def generate(
    case: GenerationCase, forward: Mapping[Phase, Forward], cache: Any, steps: int, ids: torch.Tensor | None = None,
    of_rank: Callable[..., Call] | None = None, spread: Spread | None = None,
) -> list[Step]:
    """Prefill with ``ids`` (the case's own when None), then ``steps`` greedy decode steps; picks are recorded.

    A phase that ``forward`` lacks is run by the eager model. ``of_rank`` makes the first call of ``forward`` from that
    for one die: with caches of which this rank has a part. ``spread``: how compiled graphs have spread tokens over
    ranks, all of which do this.
    """
    done: list[Step] = []
    phase: Phase = "prefill"
    tokens = case.ids("prefill") if ids is None else ids
    for _ in range(steps + 1):
        call = case.prefill if phase == "prefill" else case.decode
        args, kwargs = call(tokens, cache)
        if of_rank is not None and phase in forward:
            args, kwargs = of_rank(*args, **kwargs)
            cache, of_rank = kwargs[cache_argument(case.model)], None
        start = time.perf_counter()
        with torch.no_grad(), Recorder() as recorder:
            out = forward.get(phase, case.model)(*args, **kwargs)
        seconds, logits = time.perf_counter() - start, result_rows(out)
        picks = spread.whole(recorder.picks, tokens.numel()) if spread and phase in forward else recorder.picks
        done.append(Step(phase, tokens, logits, seconds, picks))
        tokens = logits.view(case.batch, -1, logits.shape[-1])[:, -1:].argmax(-1)
        phase = "decode"
    return done


def replay(case: GenerationCase, steps: Sequence[Step],
           mode: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[Step]:
    """The same calls by the case's eager model, each in ``mode``, with a new cache and the picks of ``steps``."""
    cache = case.new_cache()
    done = []
    for step in steps:
        call = case.prefill if step.phase == "prefill" else case.decode
        args, kwargs = call(step.ids, cache)
        start = time.perf_counter()
        with torch.no_grad(), mode(), Replay(step.picks) as played:
            out = case.model(*args, **kwargs)
        played.finish()
        seconds = time.perf_counter() - start
        done.append(Step(step.phase, step.ids, result_rows(out), seconds, step.picks, played.choices))
    return done


def check(case: GenerationCase, compiled: Sequence[Step]) -> tuple[ParityReport, list[Step]]:
    """Measure the steps of a compiled run against plain and float64 runs of ``case.model``.

    Returns the report and the steps of the plain run.
    """
    plain = replay(case, compiled)
    exact_case = replace(case, model=in_float64(case.model))
    exact = replay(exact_case, compiled, all_in_float64)
    return replace(compare(compiled, plain, exact), dtype=dtype_of(case.model)), plain


def compare(compiled: Sequence[Step], plain: Sequence[Step], exact: Sequence[Step]) -> ParityReport:
    """The report of three runs of the same calls."""
    errors: list[ErrorParity] = []
    picks: list[PickParity] = []
    for phase in dict.fromkeys(step.phase for step in compiled):
        rows = [i for i, step in enumerate(compiled) if step.phase == phase]
        ours = torch.cat([token_errors(compiled[i].logits, exact[i].logits) for i in rows])
        theirs = torch.cat([token_errors(plain[i].logits, exact[i].logits) for i in rows])
        errors.append(ErrorParity(phase, Errors.of(ours), Errors.of(theirs)))
        picks += compare_picks(
            phase, [c for i in rows for c in plain[i].choices], [c for i in rows for c in exact[i].choices]
        )
    notes = [] if picks else ["the compiled graph makes no discrete picks; errors are compared directly"]
    return ParityReport(errors, picks, notes)
