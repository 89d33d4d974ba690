"""Parity of one call of any model: compiled against eager in the model's own dtype and in float64."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cannopy.parity.measure import ErrorParity, Errors, ParityReport, compare_picks, token_errors
from cannopy.parity.picks import Recorder, Replay
from cannopy.parity.reference import all_in_float64, cast_inputs, dtype_of, in_float64, result_rows


def check(
    model: torch.nn.Module,
    method: str,
    compiled: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    phase: str = "call",
) -> tuple[ParityReport, float, float]:
    """Call ``compiled`` and the eager method once each on the same arguments.

    The arguments are copied before anything runs, so a cache among them starts alike for all. Returns the report and
    the seconds of the compiled and of the eager call.
    """
    plain_call, exact_call = copy.deepcopy((args, dict(kwargs))), cast_inputs((args, dict(kwargs)), torch.float64)
    start = time.perf_counter()
    with torch.no_grad(), Recorder() as recorder:
        ours = result_rows(compiled(*args, **kwargs))
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    plain, plain_choices = _replay(getattr(model, method), recorder, *plain_call)
    eager_seconds = time.perf_counter() - start
    exact_model = in_float64(model)
    with all_in_float64():
        exact, exact_choices = _replay(getattr(exact_model, method), recorder, *exact_call)
    errors = ErrorParity(phase, Errors.of(token_errors(ours, exact)), Errors.of(token_errors(plain, exact)))
    picks = compare_picks(phase, plain_choices, exact_choices)
    notes = [] if picks else ["the compiled graph makes no discrete picks; errors are compared directly"]
    return ParityReport([errors], picks, notes, dtype=dtype_of(model)), seconds, eager_seconds


def _replay(
    forward: Callable[..., Any], recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, list[Any]]:
    with torch.no_grad(), Replay(recorder.picks) as played:
        rows = result_rows(forward(*args, **kwargs))
    played.finish()
    return rows, played.choices
