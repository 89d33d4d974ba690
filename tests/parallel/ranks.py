"""Fused graphs of small models, cut for every rank of a layout, run side by side and compared with eager."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cannopy import pipeline
from cannopy.frontend.capture import capture
from cannopy.frontend.serving import ServingCase
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.engine.apply import Log
from cannopy.fusion_rules.parallel import stage
from cannopy.fx_passes.manager import PassManager
from cannopy.fx_passes.parallel import LAYOUT, Layout, Parallel
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.verifier import Verifier
from cannopy.models import zoo
from cannopy.models.requests import Requests
from cannopy.options import Options
from cannopy.parity.graph import GraphParity, Values
from cannopy.parity.measure import ParityReport
from cannopy.parity.picks import Pick, Recorder
from cannopy.parity.serving import fill
from tests.parallel import lockstep

Call = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A model, its fused graph for one die, and its call for a seed: other requests of the same shapes."""

    model: torch.nn.Module
    method: str
    call: Callable[[int], Call]
    program: Program


@functools.lru_cache(maxsize=2)
def serving(name: str, phase: str = "decode", prompts: tuple[int, ...] = (24,), **sizes: Any) -> Case:
    """The zoo's ``name`` in serving form, tiny, with ``sizes`` changed; caches hold random rows.

    A prefill reads prompts of these lengths, without the padding, whose rows mean nothing.
    """
    preset = zoo.preset(name, "tiny")
    model = zoo.build_serving(replace(preset, config={**preset.config, **sizes}))

    def call(seed: int) -> Call:
        if phase == "prefill":
            asked = Requests(model, len(prompts), 1, 128, seed)
            fill(asked.cache, seed)
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, model.lm_head.out_features, (sum(prompts),), generator=generator)
            return (*asked.prefill_inputs(tokens.split(prompts)), asked.cache)
        source = ServingCase(model, 2, 24, 128, seed, 1)
        requests = source.new_requests()
        fill(requests.cache, seed)
        requests.lengths = source.prompt_lengths
        return source.decode(source.ids("decode"), requests)[0]

    return of(model, phase, call)


def of(model: torch.nn.Module, method: str, call: Callable[[int], Call], **options: Any) -> Case:
    """``model`` with its fused graph; ``options`` are those of the compiler."""
    program = capture(model, method, call(0), {})
    dialect.register_all()
    passes = pipeline.passes(pipeline.plan(Options(**options)), Log())
    before = next(i for i, one in enumerate(passes) if one.name == "parallel")
    PassManager(passes[:before]).run(program)
    return Case(model, method, call, program)


def cut(program: Program, parallel: str, rank: int) -> Program:
    """The graph of one rank of a layout, verified."""
    found = copy.deepcopy(program)
    found.facts[LAYOUT] = Layout(Parallel.parse(parallel), rank)
    verifier = Verifier(found)
    stage.run(found, "atlas-a3")
    verifier.verify(found)
    return found


def cuts(case: Case, parallel: str) -> list[Program]:
    """The graphs of all ranks."""
    return [cut(case.program, parallel, rank) for rank in range(Parallel.parse(parallel).dies)]


def check(case: Case, parallel: str, joint: Mapping[Any, Any] | None = None) -> list[ParityReport]:
    """Run all ranks of ``parallel`` on requests of their own (the same within a group of attn_tp or cp), once.

    The reports of the first and the last rank, which eager in two dtypes is run for.
    """
    programs = cuts(case, parallel)
    same = len(programs) if Parallel.parse(parallel).cp > 1 else Parallel.parse(parallel).attn_tp
    calls = [case.call(rank // same) for rank in range(len(programs))]
    given = [values(case, program, args) for program, args in zip(programs, calls, strict=True)]
    recorders = [Recorder() for _ in programs]
    found = lockstep.run(programs, given, joint, recorders)
    if Parallel.parse(parallel).cp > 1:
        picks = in_order([recorder.picks for recorder in recorders])
        for recorder in recorders:
            recorder.picks = picks
    both = list(zip(calls, programs, recorders, range(len(programs)), strict=True))[:: len(programs) - 1]
    groups = [range(at - at % same, at - at % same + same) for *_, at in both]
    return [
        _Ran(case, args, found[at], recorder, [(programs[i], found[i]) for i in group]).check(program)
        for (args, program, recorder, at), group in zip(both, groups, strict=True)
    ]


def in_order(ranks: Sequence[Sequence[Pick]]) -> list[Pick]:
    """Picks for all tokens of a prompt that cp has split: an indexer picks for a rank's two segments one by one, a
    router for both at once."""
    found, at = [], 0
    while at < len(ranks[0]):
        first = ranks[0][at]
        count = 2 if first.kind == "keys" else 1
        halves = [torch.cat([pick.indices for pick in picks[at : at + count]]).chunk(2) for picks in ranks]
        rows = [half for half, _ in halves] + [half for _, half in reversed(halves)]
        found.append(replace(first, indices=torch.cat(rows)))
        at += count
    return found


def values(case: Case, program: Program, args: Call) -> dict[str, torch.Tensor]:
    """The inputs of ``program`` by name in that call, of caches the part that its rank has."""
    found = {s.name: compile_path(s.source)(case.model, args, {}).detach() for s in program.inputs}
    found |= {s.name: s.held.of(found[s.name]).contiguous() for s in program.inputs if s.held is not None}
    return {s.name: found[s.name] if s.view is None else found[s.name].view(s.view) for s in program.inputs}


class _Ran(GraphParity):
    """Compares what a rank gave already; caches have the parts of all in its ``group``."""

    def __init__(self, case: Case, args: Call, rank: lockstep.Rank, recorder: Recorder,
                 group: Sequence[tuple[Program, lockstep.Rank]]) -> None:
        super().__init__(case.model, case.method, args, {}, group[0][0].inputs)
        self._rank, self._recorder, self._group = rank, recorder, group

    def check(self, program: Program) -> ParityReport:
        """As `GraphParity.check`."""
        return self.compare(self._run(program), self._recorder.picks)

    def _run(self, program: Program) -> Values:
        from cannopy.frontend import outputs
        from cannopy.parity.graph import _results

        args = copy.deepcopy(self.args)
        for cut, rank in self._group:
            for spec in cut.inputs:
                if spec.mutated:
                    whole = compile_path(spec.source)(self.model, args, {})
                    own = whole if spec.held is None else spec.held.of(whole)
                    own.copy_(rank.inputs[spec.name].view(spec.shape))
        result = outputs.builder(program.output)(self._rank.outputs, self.model, args, {})
        return Values(_results(result), self._state(self.model, args, {}))
