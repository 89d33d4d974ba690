"""Models of a layout compiled by every rank through torchair, against the same model compiled for one die."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from cannopy import pipeline
from cannopy.backend import process_groups
from cannopy.backend.build import build
from cannopy.backend.options import BuildOptions
from cannopy.backend.runtime import CompiledModel
from cannopy.frontend import outputs
from cannopy.fusion_rules.engine.apply import Log
from cannopy.fx_passes.manager import PassManager
from cannopy.fx_passes.parallel import LAYOUT, Layout
from cannopy.models.requests import padding_slots
from cannopy.options import Options
from cannopy.parity.picks import Pick, Recorder
from tests.backend.programs import look
from tests.parallel import ranks

CLOSE = 2.0**-5
"""Relative to the largest number of a row. Each sum over ranks rounds to bfloat16 (2⁻⁹) once more, in each layer;
models of two layers move by up to 2⁻⁶ between one die and several."""


@dataclass
class Result:
    """What one call gave: ``rows`` of the result, ``caches`` after the call, the experts that were picked."""

    rows: torch.Tensor
    caches: list[torch.Tensor]
    picks: list[Pick]


def compiled(case: ranks.Case, layout: Layout | None) -> CompiledModel:
    """The fused graph of ``case``, cut and lowered, through torchair. All ranks of the layout do this together."""
    program = copy.deepcopy(case.program)
    if layout is not None:
        program.facts[LAYOUT] = layout
        process_groups.ensure(layout, 40.0, 40.0)
    options = Options()
    passes = pipeline.passes(pipeline.plan(options), Log())
    at = next(i for i, one in enumerate(passes) if one.name == "parallel")
    given = sorted(set().union(*(one.ensures for one in passes[:at])))
    PassManager(passes[at:], given=given).run(program)
    building = BuildOptions(text=options.text(), use_cache=False, layout=layout)
    args = case.call(0)
    found = look(case.model, args, building)
    with found:
        return build(program, case.model, case.method, args, {}, building, found, {}, outputs.builder)


def call(method: CompiledModel, args: tuple[Any, ...]) -> Result:
    """One call with the experts and keys that it picks."""
    with Recorder() as recorder:
        out = method(*args)
    logits = out[0] if isinstance(out, tuple) else out
    return Result(logits.reshape(-1, logits.shape[-1]).float(), caches(args), recorder.picks)


def caches(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Copies of the caches of a call as they are."""
    return [t.clone() for layer in args[-1].layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]


def assert_close(ours: Result, one_die: Result, tokens: torch.Tensor) -> None:
    """The results of ``tokens`` and the caches are those of one die, up to the rounding of sums in another order.

    Tokens for which a router or an indexer has picked otherwise somewhere (scores that tie) are left out; they are few.
    """
    same = tokens.clone()
    for mine, theirs in zip(ours.picks, one_die.picks, strict=True):
        same &= (mine.indices.sort(-1).values == theirs.indices.sort(-1).values).all(-1)[: len(tokens)]
    assert int(same.sum()) * 4 >= int(tokens.sum()) * 3, "more than a quarter of the tokens have other experts"
    if bool(same.any()):
        assert _distance(ours.rows[same], one_die.rows[same]) <= CLOSE
    for mine, theirs in zip(ours.caches, one_die.caches, strict=True):
        flat, other = (t.reshape(-1, t.shape[-1]).float() for t in (mine, theirs))
        changed = (flat != other).any(-1)
        assert int(changed.sum()) <= len(tokens)  # the rows that the step wrote
        if bool(changed.any()) and bool(same.all()):
            assert _distance(flat[changed], other[changed]) <= CLOSE


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of a row, relative to the row's largest number."""
    return float(((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max())


def one_choice(model: torch.nn.Module) -> None:
    """From now on all tokens of all ranks choose the same experts, the first ones; the others get none."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            value.detach().copy_(10.0 * torch.arange(len(value), 0, -1))


def idle(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call of a rank that has no requests: padding, which writes into block 0 only."""
    ids, lengths, table, slots, cache = args
    queries = len(ids) // len(lengths)
    spare = padding_slots(len(slots), 16)
    return torch.zeros_like(ids), torch.full_like(lengths, queries), torch.zeros_like(table), spare, cache
