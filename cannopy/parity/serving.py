"""Parity of a serving model: ragged prompts and decode steps with drafts, compiled against eager bf16 and float64.

Results, the rows that each step writes into the paged cache, and the bits of all other rows are compared. The cache
starts full of random numbers, so a row that is read before it was written spoils the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cannopy.frontend.generation import Phase
from cannopy.frontend.serving import WHOLE, ServingCase
from cannopy.models.parts import experts_one_by_one
from cannopy.models.requests import Requests
from cannopy.models.serving import PagedCache, ServingModel
from cannopy.parity.measure import ErrorParity, ParityReport, WriteParity, compare_picks, errors_of
from cannopy.parity.picks import Choice, Pick, Recorder, Replay
from cannopy.parity.reference import all_in_float64, dtype_of, in_float64
from cannopy.parity.spread import Spread

Forward = Callable[..., Any]


@dataclass
class Step:
    """One call of one run.

    ``inputs``: its arguments without the cache. ``results``: ``logits`` and ``hidden``, float64 [rows, features], of
    real tokens only. ``cache``: the rows of real tokens after the step, float64, by name and layer, those of the case's
    part of the cache. ``picks`` were made by the compiled run, ``choices`` by a reference at these picks. ``writes``:
    (rows, rows outside, those of them that changed) by name.
    """

    phase: Phase
    inputs: tuple[Tensor, ...]
    real: Tensor
    results: dict[str, Tensor]
    cache: dict[str, list[Tensor]]
    seconds: float
    picks: list[Pick] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    writes: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def slots(self) -> Tensor:
        """Cache slots of the step's tokens."""
        return self.inputs[-1]


def fill(cache: PagedCache, seed: int = 0) -> None:
    """Random numbers everywhere in ``cache``, of the size of what a model writes and the same for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in tensors(cache):
        tensor.copy_(torch.randn(tensor.shape, generator=generator).bfloat16())


def tensors(cache: PagedCache) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every layer in order: ``latent``, ``rope``, ``index`` or ``key``, ``value``."""
    for layer in cache.layers:
        yield from ((name, t) for name, t in vars(layer).items() if t is not None)


def generate(case: ServingCase, forward: Mapping[Phase, Forward], requests: Requests, steps: int,
             spread: Spread | None = None) -> list[Step]:
    """Read the case's prompts, then ``steps`` decode steps; a phase that ``forward`` lacks is run by the eager model.

    Each step reads the greedy token of the step before and ``next_n`` drafts. Every request keeps another number of
    its drafts in each step, so that rows of rejected ones are written again. ``spread``: how compiled graphs have
    spread tokens over ranks, all of which do this.
    """
    fill(requests.cache, case.seed)
    done = [run(case, forward, "prefill", case.prefill(requests)[0], spread)]
    last = done[0].results["logits"].argmax(-1)
    for step in range(steps):
        tokens = torch.cat((last[:, None], case.ids("decode", step)[:, 1:]), dim=1)
        done.append(run(case, forward, "decode", case.decode(tokens, requests)[0], spread))
        kept = torch.tensor([1 + (step + b) % (1 + case.next_n) for b in range(case.batch)])
        logits = done[-1].results["logits"].view(case.batch, 1 + case.next_n, -1)
        last = logits[torch.arange(case.batch), kept - 1].argmax(-1)
        rejected = (1 + case.next_n - kept).tolist()
        requests.lengths = [n - r for n, r in zip(requests.lengths, rejected, strict=True)]
    return done


def run(case: ServingCase, forward: Mapping[Phase, Forward], phase: Phase, args: tuple[Any, ...],
        spread: Spread | None = None) -> Step:
    """One call of a compiled run, or of the eager model where ``forward`` lacks the phase (prompts only where the case
    has a part of the cache)."""
    *inputs, cache = args
    before = [t.clone() for _, t in tensors(cache)]
    start = time.perf_counter()
    with torch.no_grad(), experts_one_by_one(case.model), Recorder() as recorder:
        out = forward[phase](*args) if phase in forward else _eager(case, phase, args)
    seconds = time.perf_counter() - start
    done = _step(case, phase, tuple(inputs), cache, out, seconds)
    picks = spread.whole(recorder.picks, inputs[0].numel()) if spread and phase in forward else recorder.picks
    done.picks = [_packed(pick, done) for pick in picks]
    done.writes = _writes(case, before, cache, done.slots)
    return done


def _eager(case: ServingCase, phase: Phase, args: tuple[Any, ...]) -> Any:
    """The eager call, which takes a whole cache: rows of the case's part are copied there before and back behind."""
    *inputs, cache = args
    call = getattr(case.model, phase)
    if case.part == WHOLE:
        return call(*args)
    whole = replace(case, part=WHOLE).new_requests().cache
    pairs = [(case.part.of(t), own) for (_, t), (_, own) in zip(tensors(whole), tensors(cache), strict=True)]
    for rows, own in pairs:
        rows.copy_(own.flatten(0, 1)[: len(rows)])
    out = call(*inputs, whole)
    for rows, own in pairs:
        own.flatten(0, 1)[: len(rows)] = rows
    return out


def _step(case: ServingCase, phase: Phase, inputs: tuple[Tensor, ...], cache: PagedCache, out: Any,
          seconds: float, whole: bool = False) -> Step:
    """``whole``: the cache has more than the case's part, of which rows are taken all the same."""
    slots = inputs[-1]
    real = slots >= case.block_size
    own = slots[real & case.part.has(slots)]
    at = own if whole else case.part.rows(own)
    logits, hidden = (value.detach().double() for value in out)
    rows: dict[str, list[Tensor]] = {}
    for name, tensor in tensors(cache):
        own_heads = case.part.heads(tensor.flatten(0, 1)) if whole else tensor.flatten(0, 1)
        rows.setdefault(name, []).append(own_heads.flatten(1)[at].double())
    return Step(phase, inputs, real, {"logits": logits, "hidden": hidden[real]}, rows, seconds)


def _packed(pick: Pick, step: Step) -> Pick:
    """A kernel numbers the keys of a prompt from its first, the eager prefill those of all prompts together."""
    if pick.kind != "keys" or step.phase == "decode" or pick.rows != step.real.numel():
        return pick
    ends = step.inputs[1]
    request = (torch.arange(pick.rows)[:, None] >= ends[None]).sum(-1)
    starts = torch.cat((ends.new_zeros(1), ends))[request]
    return replace(pick, indices=torch.where(pick.indices < 0, -1, pick.indices + starts[:, None]))


def _writes(case: ServingCase, before: Sequence[Tensor], cache: PagedCache,
            slots: Tensor) -> dict[str, tuple[int, int, int]]:
    """A die with a part of the rows may write those of others anywhere into block 0, which no request owns."""
    found: dict[str, tuple[int, int, int]] = {}
    rows = case.part.rows(slots[case.part.has(slots)])
    if case.part.size > 1:
        rows = torch.cat((torch.arange(case.block_size // case.part.size), rows)).unique()
    for old, (name, new) in zip(before, tensors(cache), strict=True):
        changed = _bits(old).ne(_bits(new)).any(-1)
        outside = torch.ones_like(changed)
        outside[rows] = False
        row = (int((~outside).sum()), int(outside.sum()), int((changed & outside).sum()))
        a, b, c = found.get(name, (0, 0, 0))
        found[name] = (a + row[0], b + row[1], c + row[2])
    return found


def _bits(pages: Tensor) -> Tensor:
    """The rows of ``pages`` as bytes, ``[slots, bytes]``."""
    return pages.flatten(0, 1).flatten(1).contiguous().view(torch.uint8)


def replay(case: ServingCase, model: ServingModel, steps: Sequence[Step],
           mode: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[Step]:
    """The same eager calls by ``model``, each in ``mode``, from the same first cache, with the picks of ``steps``.

    (The cache is filled outside of ``mode``: in float64 a generator gives other numbers.)
    """
    requests = replace(case, model=model, part=WHOLE).new_requests()
    fill(requests.cache, case.seed)
    done = []
    for step in steps:
        start = time.perf_counter()
        with torch.no_grad(), mode(), experts_one_by_one(model), Replay(step.picks) as played:
            out = getattr(model, step.phase)(*step.inputs, requests.cache)
        played.finish()
        seconds = time.perf_counter() - start
        done.append(_step(case, step.phase, step.inputs, requests.cache, out, seconds, whole=True))
        done[-1].choices = [_of_real(choice, step.real) for choice in played.choices]
    return done


def _of_real(choice: Choice, real: Tensor) -> Choice:
    """``choice`` without the rows of padding tokens, whose states nobody reads."""
    if choice.scores.shape[0] != real.numel():
        return choice
    return replace(choice, scores=choice.scores[real], own=choice.own[real], wanted=choice.wanted[real])


def check(case: ServingCase, compiled: Sequence[Step]) -> tuple[ParityReport, list[Step]]:
    """Measure a compiled run against a plain and a float64 run; the report, and the steps of the plain run."""
    plain = replay(case, case.model, compiled)
    exact_model = in_float64(case.model)
    assert isinstance(exact_model, ServingModel)
    exact = replay(case, exact_model, compiled, all_in_float64)
    return replace(compare(compiled, plain, exact), dtype=dtype_of(case.model)), plain


def compare(compiled: Sequence[Step], plain: Sequence[Step], exact: Sequence[Step]) -> ParityReport:
    """The report of three runs of the same calls."""
    report = ParityReport([])
    for phase in dict.fromkeys(step.phase for step in compiled):
        rows = [i for i, step in enumerate(compiled) if step.phase == phase]
        report.errors.extend(_errors(phase, *([run[i] for i in rows] for run in (compiled, plain, exact))))
        report.picks.extend(compare_picks(
            phase, [c for i in rows for c in plain[i].choices], [c for i in rows for c in exact[i].choices]
        ))
        for name in compiled[rows[0]].writes:
            sums = (sum(column) for column in zip(*(compiled[i].writes[name] for i in rows), strict=True))
            report.writes.append(WriteParity(phase, name, *sums))
    if not report.picks:
        report.notes.append("the compiled graph makes no discrete picks; errors are compared directly")
    return report


def _errors(phase: str, *runs: Sequence[Step]) -> Iterator[ErrorParity]:
    for name in runs[0][0].results:
        yield errors_of(f"{phase} {name}", *(torch.cat([step.results[name] for step in run]) for run in runs))
    for name in runs[0][0].cache:
        rows = [torch.cat([rows for step in run for rows in step.cache[name]]) for run in runs]
        if len(rows[0]):  # a die with a part of the rows may get none in few steps
            yield errors_of(f"{phase} cache {name}", *rows)
