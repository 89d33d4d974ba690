"""cannopy.compile: from a plain module to a compiled method with a report."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cannopy import checkpoints, layouts, memory, pipeline, planning, prediction
from cannopy.backend import build as backend
from cannopy.backend.guards import GuardError
from cannopy.backend.options import BuildOptions
from cannopy.backend.runtime import CompiledModel
from cannopy.backend.torchair import PlanLostError, have_npu
from cannopy.backend.weights import from_checkpoint
from cannopy.backend.weights.checkpoint import Checkpoint
from cannopy.backend.weights.loaded import LoadReport
from cannopy.frontend import outputs, regions, state
from cannopy.fusion_rules.parallel import experts
from cannopy.fx_passes import kernels
from cannopy.fx_passes.manager import PassError
from cannopy.fx_passes.parallel import LAYOUT
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.regions import REGIONS, Regions
from cannopy.fx_passes.stamp import StampError
from cannopy.options import Options
from cannopy.report import CompileReport

logger = logging.getLogger("cannopy")

TIMELINE = "timeline"
"""Key of a stored report: the picture of the plan, which is no part of `CompileReport`."""


class Compiled:
    """A compiled method: call it as the eager one.

    ``report`` is the `CompileReport`. ``timeline`` is what a page of the plan is drawn from
    (`stream_scheduler.timeline.render`), None where nothing was planned. Caches and other tensors that the model
    mutates are updated in place.
    """

    def __init__(self, model: CompiledModel, eager: torch.nn.Module) -> None:
        self.model = model
        report = dict(model.report)
        self.timeline = report.pop(TIMELINE, None)
        self.report = CompileReport.from_dict(report)
        self._eager = eager
        self._device: torch.device | None = None

    def load(self, folder: Path | str, rename: checkpoints.Rename | None = None) -> LoadReport:
        """Take the weights from the safetensors files in ``folder``, for a model whose parameters are on meta.

        Only what this rank's graph reads is read: slices of parameters that are cut over dies, experts of this die,
        each once, one after the other. The model itself stays on the meta device. Methods compiled from one model
        share what they load from one folder. ``rename`` maps a name in the files to the model's, None where the model
        has no such tensor; by default the zoo and models of `transformers` find published names themselves.

        Raises:
            cannopy.backend.weights.checkpoint.CheckpointError: a tensor is missing, of another shape or not readable;
                names it and its file. The compiled method is then as it was.
        """
        checkpoint = Checkpoint(folder)
        stored = checkpoints.stored(self._eager, checkpoint, rename)
        self.model, weights = from_checkpoint.load(self.model, checkpoint, stored)
        self._device = weights.device
        self.report = dataclasses.replace(self.report, weights=dataclasses.asdict(weights.memory))
        return weights.report

    @property
    def cuts_caches(self) -> bool:
        """Whether this rank has a part of a cache: its call is not that for one die."""
        return any(spec.held is not None for spec in self.model.artifact.inputs)

    def of_rank(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call ``(args, kwargs)`` for one die as this rank makes it: with its part of caches that hold heads.

        Where ``attn_tp`` cuts heads of keys and values, the caches are copies of this rank's heads of the given ones,
        zeros where those are on the meta device; the objects that hold them are copied, all other tensors that the
        graph reads are those given. Caches that are cut already and `transformers` caches without tensors stay
        as they are.

        Raises:
            cannopy.backend.guards.GuardError: a cache has neither the shape for one die nor that of the part.
        """
        return self.model.of_rank(args, kwargs, self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.model(*args, **kwargs)
        except GuardError:  # nothing has run yet; a new static cache has no tensors before its first use
            heads = self.model.heads(args, kwargs)
            if not state.prepare_state(self._eager, args, kwargs, self.model.artifact.method, self._device, heads):
                raise
        return self.model(*args, **kwargs)

    def refresh_weights(self) -> None:
        """Rebuild the weights that were derived from the model's, from the values that these have now.

        Assignments, ``load_state_dict``, optimiser steps and moved memory are seen without it. Needed after writes that
        leave no trace: through ``param.data``, in inference mode, by NumPy or another process in shared memory.
        """
        self.model.refresh_weights()


def compile(
    model: torch.nn.Module,
    method: str = "forward",
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> Compiled:
    """Compile ``model.<method>`` for inputs like the examples.

    Args:
        model: any ``torch.nn.Module``; it is not changed.
        method: the method to compile.
        example_inputs: positional arguments of one call; shapes, dtypes and plain values are fixed by them. With
            ``options.parallel`` they are those of one die (`Compiled.of_rank`).
        example_kwargs: keyword arguments of that call (a Hugging Face ``StaticCache`` among them).
        options: see `Options`; the default compiles for Atlas A3.

    Returns:
        A callable with the method's signature and results.

    Raises:
        cannopy.frontend.errors.CaptureError: the method is not one graph; names the user's line and a cure.
        cannopy.errors.OptionError: a switch of a fusion that does not exist.
        cannopy.fusion_rules.extension.RuleFileError: a file of ``options.rules`` cannot be used.
        cannopy.pipeline.FusionRequiredError: a required fusion did not apply.
        cannopy.planning.PlanFileError: ``options.plan`` does not fit the graph or is not safe.
        cannopy.fx_passes.manager.PassError: a pass failed its verification; nothing was emitted.
        cannopy.backend.torchair.CompileError: torchair refused the graph; the cache is as it was.
        cannopy.backend.cache.folder.CacheFolderError: somebody else can write in the cache folder.
        cannopy.backend.cache.agree.RankError: another rank did not come, failed, or compiles something else.
        cannopy.fx_passes.parallel.ParallelError: the model cannot be spread as ``options.parallel`` says, or the world
            of torch.distributed has another size.
    """
    options, kwargs = options or Options(), dict(example_kwargs or {})
    with layouts.world_of(options), layouts.whole_caches(options, example_inputs, kwargs):
        return _compile(model, method, example_inputs, kwargs, options)


def _compile(
    model: torch.nn.Module, method: str, example_inputs: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Compiled:
    made = pipeline.plan(options)
    building = build_options(made)
    on_device = have_npu()
    if not on_device:
        from cannopy.backend.host.activate import activate

        activate()
    timings: dict[str, float] = {}
    start = time.perf_counter()
    state.prepare_state(model, example_inputs, kwargs, method=method)
    timings["prepare"] = time.perf_counter() - start
    found = backend.lookup(model, method, example_inputs, kwargs, building, outputs.builder)
    timings["lookup"] = time.perf_counter() - start - timings["prepare"]
    if found.compiled is not None:
        timings |= {f"lookup: {step}": seconds for step, seconds in found.compiled.seconds.items()}
        return _finished(found.compiled, model, timings)
    call = _Call(model, method, example_inputs, kwargs)
    with found:
        try:
            compiled = _build(call, options, made, building, found, timings)
        except PlanLostError as lost:
            if options.plan is not None:
                raise
            logger.warning("compiled again without the scheduler's plan: %s", lost)
            compiled = _build(call, planning.without(options), None, building, found, timings, str(lost))
    return _finished(compiled, model, timings)


@dataclasses.dataclass(frozen=True)
class _Call:
    """``model.method(*args, **kwargs)``."""

    model: torch.nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _build(
    call: _Call, options: Options, made: pipeline.Plan | None, building: BuildOptions, found: backend.Lookup,
    timings: dict[str, float], lost: str = "",
) -> CompiledModel:
    """Lower ``call`` by ``options`` and compile it into the entry ``found``. ``lost``: why there is no plan."""
    program, done = lower(call.model, call.method, call.args, call.kwargs, options, timings, made)
    start = time.perf_counter()
    report = _report(program, done, options.target, have_npu(), timings)
    if lost:
        report["schedule"]["decisions"] = [planning.dropped(lost)]
    timings["predict"] = time.perf_counter() - start
    start = time.perf_counter()
    compiled = backend.build(program, call.model, call.method, call.args, call.kwargs, building, found, report,
                             outputs.builder)
    timings["torchair"] = time.perf_counter() - start
    return compiled


def _finished(compiled: CompiledModel, model: torch.nn.Module, timings: Mapping[str, float]) -> Compiled:
    taken = dataclasses.asdict(compiled.weight_memory)
    compiled.report = {**compiled.report, "timings": dict(timings), "weights": taken}
    return Compiled(compiled, model)


def lower(
    model: torch.nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    timings: dict[str, float],
    made: pipeline.Plan | None = None,
    seen: Callable[[Program], object] = lambda program: None,
) -> tuple[Program, pipeline.Compilation]:
    """Capture and run all passes; nothing is emitted. ``timings`` gets the seconds of both.

    ``made`` is the plan of ``options`` where that is known already. ``seen`` is shown the program as it was captured,
    a second time when the passes show that all layers have to be captured.
    """
    made = made or pipeline.plan(options)
    layout = layouts.layout_of(options)

    def passes(program: Program) -> pipeline.Compilation:
        if layout is not None:
            program.facts[LAYOUT] = layout
        seen(program)
        return pipeline.run(program, options, made)

    with target_of(options):
        start = time.perf_counter()
        program = (regions.capture(model, method, args, kwargs) if options.regions
                   else regions.whole(model, method, args, kwargs, "regions are switched off"))
        timings["capture"] = time.perf_counter() - start
        try:
            done = passes(program)
        except PassError as e:
            if not isinstance(e.__cause__, StampError):
                raise
            start = time.perf_counter()
            program = regions.whole(model, method, args, kwargs, str(e.__cause__))
            timings["capture"] += time.perf_counter() - start
            done = passes(program)
        timings["passes"] = done.seconds
    return program, done


def target_of(options: Options) -> Any:
    """The chip that meta functions and contracts see: the target on a host, the device itself where there is one."""
    if have_npu():
        import contextlib

        return contextlib.nullcontext()
    from cannopy.backend.host import target

    return target.using(options.target)


def build_options(made: pipeline.Plan) -> BuildOptions:
    """What the backend has to know of a plan."""
    options, layout = made.options, layouts.layout_of(made.options)
    alone = layout is not None and not layouts.in_world()
    return BuildOptions(target=options.target, text=made.text(), cache_dir=options.cache_dir,
                        use_cache=options.use_cache, cache_timeout=options.cache_timeout,
                        ranks=(layout.rank,) if layout is not None and alone else options.ranks, layout=layout,
                        keep_weights=options.keep_weights)


def _report(
    program: Program, done: pipeline.Compilation, target: str, on_device: bool, timings: Mapping[str, float]
) -> dict[str, Any]:
    known: Regions = program.facts[REGIONS]
    report = CompileReport.of(
        fusions=done.log.counts(), hits=done.log.hits, misses=done.log.misses, nodes=done.nodes,
        device="npu" if on_device else "host", timings=dict(timings), passes=done.records,
        layers=kernels.by_layer(program.gm.graph), pipeline=done.pipeline, regions=known.summary(),
    )
    planned = program.facts.get(planning.PLANNED)
    report.schedule |= planned.report() if planned else prediction.times(prediction.predict(program, target)[0])
    report.memory = memory.of(program, target).to_dict()
    report.experts = experts.summary(program.facts.get(experts.EXPERTS, ()))
    return {**report.to_dict(), TIMELINE: planned.picture() if planned else None}
