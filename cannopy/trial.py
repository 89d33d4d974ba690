"""Compile a model's phases, run them, and measure the result against eager: what `cannopy run` does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

import cannopy
from cannopy.backend import process_groups
from cannopy.errors import CannopyError
from cannopy.frontend import state
from cannopy.frontend.generation import GenerationCase, Phase
from cannopy.frontend.serving import WHOLE, ServingCase
from cannopy.frontend.shells import hollow
from cannopy.frontend.sources import LoadedModel
from cannopy.options import Options
from cannopy.parity import call as call_parity
from cannopy.parity import generation, serving, spread
from cannopy.parity.measure import ParityReport
from cannopy.report import CompileReport

Progress = Callable[[str], AbstractContextManager[Any]]


@dataclass
class Trial:
    """What one run showed.

    ``reports`` has the `CompileReport` of each compiled phase. ``seconds``: wall time of the compiled calls
    (``prefill``, ``decode_median``), of the same calls in eager mode (``eager_…``), and of the compilations.
    ``tokens`` are the greedy tokens of the compiled run per sequence (in serving form behind every token of a step,
    rejected drafts included), ``same_tokens`` how many of them the plain run on
    the same picks chooses as well. ``timelines`` {phase: what the page of its plan is drawn from}.
    """

    model: str
    settings: dict[str, Any]
    notes: list[str]
    reports: dict[str, CompileReport] = field(default_factory=dict)
    parity: ParityReport | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: list[list[int]] = field(default_factory=list)
    same_tokens: int | None = None
    timelines: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether parity was measured and every limit held."""
        return self.parity is not None and self.parity.passed

    def note(self, phase: str, compiled: cannopy.Compiled) -> None:
        """Keep the report of a phase and the picture of its plan."""
        self.reports[phase] = compiled.report
        if compiled.timeline is not None:
            self.timelines[phase] = compiled.timeline

    def verdict(self) -> dict[str, Any]:
        """What the other ranks of a layout get to know."""
        parts = self.parity.errors if self.parity else []
        ratios = {
            part.phase: [ours / plain if plain else float(ours > 0) for ours, plain in (
                (part.compiled.median, part.plain.median), (part.compiled.p90, part.plain.p90),
                (part.compiled.largest, part.plain.largest))]
            for part in parts
        }
        return {
            "passed": self.passed,
            "failures": self.parity.failures if self.parity else ["parity was not measured"],
            "error_ratios": ratios,
            "cache": {phase: report.cache.get("status", "") for phase, report in self.reports.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON takes."""
        return {
            "model": self.model,
            "settings": self.settings,
            "notes": self.notes,
            "passed": self.passed,
            "parity": self.parity.to_dict() if self.parity else None,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "same_tokens": self.same_tokens,
            "phases": {phase: report.to_dict() for phase, report in self.reports.items()},
        }


def silent(text: str) -> AbstractContextManager[Any]:
    """Progress that nobody sees."""
    del text
    return nullcontext()


def run(
    loaded: LoadedModel, options: Options, phases: Sequence[Phase], steps: int, progress: Progress = silent
) -> Trial:
    """Compile ``phases`` of the model, run it, and compare with eager in its dtype and in float64.

    A generation model reads its prompt and then decodes ``steps`` tokens greedily; a phase that is not among
    ``phases`` runs in eager mode. A factory's model is called once. Raises what `cannopy.compile` raises, and
    `CannopyError` for a model without weights.
    """
    if any(p.is_meta for p in loaded.model.parameters()):
        raise CannopyError(
            f"{loaded.name} has no weights (meta device): it compiles, but cannot run",
            "cannopy compile, or --size tiny",
        )
    if loaded.case is None:
        return _run_call(loaded, options, phases[0], progress)
    if isinstance(loaded.case, ServingCase):
        return _run_serving(loaded, loaded.case, options, phases, steps, progress)
    return _run_generation(loaded, loaded.case, options, phases, steps, progress)


def _run_generation(
    loaded: LoadedModel,
    case: GenerationCase,
    options: Options,
    phases: Sequence[Phase],
    steps: int,
    progress: Progress,
) -> Trial:
    trial = Trial(loaded.name, _settings(case, options, phases, steps), list(loaded.notes))
    cache = case.new_cache()
    forward: dict[Phase, cannopy.Compiled] = {}
    for phase in phases:
        args, kwargs = case.first(phase, cache)
        forward[phase] = compiled = _compile(trial, loaded, phase, args, kwargs, options, progress)
    if compiled.cuts_caches and "decode" not in phases:
        trial.notes.append("no decode steps: eager mode needs what is in the caches of other dies.")
        steps = 0
    with progress(f"running {case.prefill_tokens} prompt tokens and {steps} decode steps"):
        ours = generation.generate(case, forward, cache, steps, of_rank=compiled.of_rank,
                                   spread=_spread(options))
    with progress("the same in eager mode, in its dtype and in float64, with the same picks"):
        trial.parity, plain = generation.check(case, ours)
    _note_times(trial, ours, "")
    _note_times(trial, plain, "eager_")
    _note_tokens(trial, case.batch, ours, plain)
    return trial


def _settings(
    case: GenerationCase | ServingCase, options: Options, phases: Sequence[Phase], steps: int
) -> dict[str, Any]:
    return {
        "phases": list(phases),
        "target": options.target,
        "dtype": str(next(case.model.parameters()).dtype).removeprefix("torch."),
        "batch": case.batch,
        "prompt_tokens": case.prefill_tokens,
        "decode_steps": steps,
        "max_cache_len": case.max_cache_len,
        "seed": case.seed,
    }


def _compile(
    trial: Trial, loaded: LoadedModel, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options,
    progress: Progress,
) -> cannopy.Compiled:
    start = time.perf_counter()
    model, method, folder = loaded.model, loaded.method_of(phase), loaded.checkpoint
    if options.parallel is not None and folder is not None:
        state.prepare_state(model, args, kwargs, method=method)  # caches are real, the model compiled is not
        model = hollow(model)
    with progress(f"compiling {phase}"):
        compiled = cannopy.compile(model, method, args, kwargs, replace(options, phase=phase))
    if options.parallel is not None and folder is not None:
        read = compiled.load(folder)
        trial.notes.append(f"{phase}: {read.bytes_read} bytes of {folder} read for {read.shard_bytes} bytes of "
                           f"weights, {read.shared_bytes} of which were there already.")
    trial.seconds[f"compile_{phase}"] = time.perf_counter() - start
    trial.note(phase, compiled)
    return compiled


def _run_serving(
    loaded: LoadedModel,
    case: ServingCase,
    options: Options,
    phases: Sequence[Phase],
    steps: int,
    progress: Progress,
) -> Trial:
    needed = case.prefill_tokens + steps * (1 + case.next_n)
    if needed > case.capacity:
        raise CannopyError(
            f"{case.prefill_tokens} prompt tokens and {steps} steps of {1 + case.next_n} are {needed} tokens, and the "
            f"blocks of a request hold {case.capacity}",
            f"--max-cache-len {needed}, or fewer --steps",
        )
    settings = _settings(case, options, phases, steps) | {
        "form": "serving", "prompts": case.prompt_lengths, "packed_tokens": case.packed_tokens,
        "next_n": case.next_n, "block_size": case.block_size,
    }
    trial = Trial(loaded.name, settings, list(loaded.notes))
    if case.part != WHOLE and "decode" not in phases:
        trial.notes.append("no decode steps: eager mode needs what is in the caches of other dies.")
        steps = 0
    forward = {phase: _compile(trial, loaded, phase, *case.inputs(phase), options, progress) for phase in phases}
    requests = case.new_requests()
    call = *case.inputs(phases[0])[0][:-1], requests.cache
    requests.cache = forward[phases[0]].of_rank(*call)[0][-1]
    with progress(f"running {case.batch} prompts and {steps} decode steps of {1 + case.next_n} tokens per request"):
        ours = serving.generate(case, forward, requests, steps, _spread(options))
    with progress("the same in eager mode, in its dtype and in float64, with the same picks"):
        trial.parity, plain = serving.check(case, ours)
    _note_times(trial, ours, "")
    _note_times(trial, plain, "eager_")
    chosen = [step.results["logits"].argmax(-1).view(case.batch, -1) for step in ours]
    expected = [step.results["logits"].argmax(-1).view(case.batch, -1) for step in plain]
    trial.tokens = torch.cat(chosen, dim=1).tolist()
    trial.same_tokens = int((torch.cat(chosen, dim=1) == torch.cat(expected, dim=1)).sum())
    return trial


def _spread(options: Options) -> spread.Spread | None:
    return spread.of(process_groups.layout_of(options.parallel, options.rank))


def _run_call(loaded: LoadedModel, options: Options, phase: Phase, progress: Progress) -> Trial:
    method = loaded.method_of(phase)
    settings = {"phases": [phase], "target": options.target, "method": method}
    trial = Trial(loaded.name, settings, list(loaded.notes))
    args, kwargs = loaded.make_inputs(phase)
    start = time.perf_counter()
    with progress(f"compiling {method}"):
        compiled = cannopy.compile(loaded.model, method, args, kwargs, replace(options, phase=phase))
    trial.seconds["compile"] = time.perf_counter() - start
    trial.note(phase, compiled)
    with progress("running it, in eager mode and in float64 with the same picks"):
        trial.parity, trial.seconds["call"], trial.seconds["eager_call"] = call_parity.check(
            loaded.model, method, lambda *a, **k: _as_rank(compiled, a, k), args, kwargs, phase
        )
    return trial


def _as_rank(compiled: cannopy.Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = compiled.of_rank(*args, **kwargs)
    return compiled(*args, **kwargs)


def _note_times(trial: Trial, steps: Sequence[generation.Step | serving.Step], prefix: str) -> None:
    trial.seconds[f"{prefix}prefill"] = steps[0].seconds
    decode = [step.seconds for step in steps if step.phase == "decode"]
    if decode:
        trial.seconds[f"{prefix}decode_median"] = statistics.median(decode)


def _note_tokens(trial: Trial, batch: int, ours: Sequence[generation.Step], plain: Sequence[generation.Step]) -> None:
    chosen = torch.stack([_last_token(step, batch) for step in ours])
    expected = torch.stack([_last_token(step, batch) for step in plain])
    trial.tokens = cast("list[list[int]]", chosen.T.tolist())
    trial.same_tokens = int((chosen == expected).sum())


def _last_token(step: generation.Step, batch: int) -> torch.Tensor:
    return step.logits.view(batch, -1, step.logits.shape[-1])[:, -1].argmax(-1)
