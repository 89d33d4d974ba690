"""The compiled method: checks the call, binds the weights, runs the graph, rebuilds the eager result."""

from __future__ import annotations

import contextlib
import copy
import linecache
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cannopy.backend.artifact import Artifact
from cannopy.backend.call_check import CallCheck, mode, mode_text
from cannopy.backend.guards import (
    CallBinder,
    ConstantGuard,
    GuardError,
    LeafGuard,
    apply_view,
    check_tensor,
    laid_out,
    of_one_die,
)
from cannopy.backend.memory import Separation, extent
from cannopy.backend.weights.binder import Change, FormatCast, WeightBinder, WeightMemory
from cannopy.backend.weights.kept import KeptWeights
from cannopy.fx_passes.paths import Path, PathLookupError, compile_path, parse_path
from cannopy.fx_passes.program import InputSpec, OutputSpec

Tensors = Sequence[torch.Tensor]
Executor = Callable[[Tensors], Tensors]
"""Runs the graph on the method's arguments and gives its outputs."""

_LOADS = 0
_CHECKS = 4
"""Kinds of call that are remembered: other strides, grad or inference mode."""


OutputBuilder = Callable[[Tensors, Any, tuple[Any, ...], dict[str, Any]], Any]
"""``(tensors, module, args, kwargs)`` -> the eager method's result."""
MakeOutput = Callable[[OutputSpec], OutputBuilder]


class ExecutorFactory(Protocol):
    """Makes the executor of a generated module, again after weights have moved."""

    def __call__(self, generated: GeneratedModule) -> Executor: ...


class Weights(Protocol):
    """Who fills a generated module: `WeightBinder` from the model, `LoadedWeights` from a checkpoint."""

    memory: WeightMemory

    def bind(self, module: torch.nn.Module) -> None:
        """Register every weight of `module`."""

    def changed(self) -> Change:
        """What happened to the weights since they were bound."""

    def refresh(self, module: torch.nn.Module) -> None:
        """Rebuild the derived weights."""

    def keep(self) -> None:
        """Put derived weights on disk where that was asked for. OSError."""


def _cut(value: torch.Tensor, spec: InputSpec, device: torch.device | str, name: str) -> torch.Tensor:
    """What a rank has of the cache ``value``; zeros on ``device`` where it is on the meta device."""
    if value.is_meta:
        return torch.zeros_like(of_one_die(value, spec, "meta", name), device=device)
    return of_one_die(value, spec, value.device.type, name)


class GeneratedModule:
    """An imported ``module.py``: the instance, its method and the ``call`` function of its file.

    The method gets its own code object in every load: torchair finds what Dynamo compiled by comparing code objects
    by value, and takes a second equal one for a recompilation (which removes the cache).
    """

    def __init__(self, artifact: Artifact, filename: str) -> None:
        global _LOADS
        _LOADS += 1
        emitted = artifact.module
        name = f"cannopy_generated_{emitted.digest[:16]}_{_LOADS}"
        self.module = types.ModuleType(name)
        self.module.__file__ = filename
        lines = emitted.source.splitlines(keepends=True)
        linecache.cache[filename] = (len(emitted.source), None, lines, filename)
        exec(compile(emitted.source, filename, "exec"), self.module.__dict__)
        cls = getattr(self.module, emitted.class_name)
        function = getattr(cls, emitted.method_name)
        code = function.__code__
        function.__code__ = code.replace(co_consts=(*code.co_consts, name))
        self.instance: torch.nn.Module = cls()
        self.method: Callable[..., Tensors] = getattr(self.instance, emitted.method_name)

    def call(self, compiled: Callable[..., Tensors], tensors: Tensors) -> Tensors:
        """Call `compiled` from inside the generated file."""
        result: Tensors = self.module.call(compiled, tensors)
        return result


def eager_executor(generated: GeneratedModule) -> Executor:
    """Runs the generated method op by op; what torchair's result is compared with."""
    return lambda tensors: generated.call(generated.method, tensors)


class CompiledModel:
    """Drop-in for the eager method: same signature, same result, caches updated in place.

    Each call is checked against the compiled one (`GuardError` names the argument, what was expected and found).
    ``report`` is the plain form of the compile report, ``seconds`` what loading took, by step. Not for concurrent
    calls from several threads.
    """

    def __init__(
        self,
        artifact: Artifact,
        model: torch.nn.Module,
        generated: GeneratedModule,
        make_executor: ExecutorFactory,
        make_output: MakeOutput,
        cast_nz: FormatCast | None = None,
        weights: Weights | None = None,
        store: KeptWeights | None = None,
    ) -> None:
        self.artifact = artifact
        self.report: dict[str, Any] = dict(artifact.report)
        self._model = model
        self._generated = generated
        self._make_executor = make_executor
        self._make_output = make_output
        self._build_output = make_output(artifact.output)
        self._binder = CallBinder(getattr(model, artifact.method), artifact.form)
        self._constants = ConstantGuard(artifact.constants, self._binder)
        self._leaves = LeafGuard(artifact.form, self._binder)
        specs = [artifact.spec(name) for name in artifact.module.arguments]
        self._arguments = [
            (s, compile_path(s.source), self._binder.name(s.source), artifact.devices[s.name]) for s in specs
        ]
        self._writes = [i for i, s in enumerate(specs) if s.name in artifact.module.written]
        self._separate = Separation([extent(s) for s in specs], self._writes)
        self._mode = mode()
        self._checks: list[tuple[CallCheck, list[int]]] = []
        self._weights: Weights = weights or WeightBinder(artifact, model, cast_nz, store)
        start = time.perf_counter()
        self._weights.bind(generated.instance)
        self.seconds = {"weights": time.perf_counter() - start}
        self._executor: Executor | None = None

    @property
    def weight_memory(self) -> WeightMemory:
        """What derived weights took when this was made."""
        return self._weights.memory

    def filled(self, artifact: Artifact, weights: Weights) -> CompiledModel:
        """The same method with ``weights``, as ``artifact`` describes it; it takes this one's place."""
        return CompiledModel(artifact, self._model, self._generated, self._make_executor, self._make_output,
                             weights=weights)

    @property
    def eager(self) -> torch.nn.Module:
        """The model that was compiled."""
        return self._model

    @property
    def source(self) -> str:
        """The generated Python source that was compiled."""
        return self.artifact.module.source

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            args, kwargs = self._binder.bind(args, kwargs)
            tensors = self.checked(args, kwargs)
            outputs = self.executor()(tensors)
            return self._build_output(outputs, self._model, args, kwargs)

    def checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """What the graph is given for a call spelt as the example was. `GuardError` unless the call is like it."""
        if mode() != self._mode:
            raise GuardError(f"compiled with {mode_text(self._mode)}, called with {mode_text(mode())}; compile again")
        for check, unlike in self._checks:
            found = check.tensors(self._model, args, kwargs)
            if found is not None and self._separate.clash(found[1]) is None:
                return self._fit(found[0], unlike)
        self._constants.check(self._model, args, kwargs)
        tensors = self.tensors(args, kwargs)
        self._leaves.check(args, kwargs)
        if len(self._checks) < _CHECKS:
            paths = [s.source for s, *_ in self._arguments]
            made = CallCheck.of(self._model, args, kwargs, paths, list(self.artifact.constants))
            if made is not None:
                specs = [s for s, *_ in self._arguments]
                unlike = [i for i, s in enumerate(specs) if s.view is not None or made.strides[i] != s.stride]
                self._checks.append((made, unlike))
        return tensors

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> list[torch.Tensor]:
        """The checked arguments of the generated method; what it writes is apart from all others.

        ``whole``: caches of which this rank has a part are those of one die, of which copies of the part are taken.
        """
        found = []
        for spec, resolve, name, device in self._arguments:
            try:
                value = resolve(self._model, args, kwargs)
            except PathLookupError as e:
                raise GuardError(f"{name}: expected a tensor; {e}") from e
            if whole and spec.held is not None:
                value = of_one_die(value, spec, device, name)
            elif spec.kind == "argument" and not spec.mutated:
                value = laid_out(value, spec)
            found.append(apply_view(check_tensor(value, spec, device, name), spec, name))
        self._check_overlap(found)
        return found

    def _fit(self, tensors: list[torch.Tensor], unlike: list[int]) -> list[torch.Tensor]:
        """`tensors` of checked shapes and types with those at `unlike` as the graph sees them."""
        for i in unlike:
            spec, _, name, _ = self._arguments[i]
            value = tensors[i]
            if spec.kind == "argument" and not spec.mutated:
                value = laid_out(value, spec)
            tensors[i] = apply_view(value, spec, name)
        return tensors

    def of_rank(self, args: tuple[Any, ...], kwargs: dict[str, Any],
                device: torch.device | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call for one die with the caches that this rank has a part of cut to it: see `Compiled.of_rank`."""
        args, kwargs = self._binder.bind(args, kwargs)
        tensors: dict[int, Any] = {}
        for spec, resolve, name, place in self._arguments:
            with contextlib.suppress(PathLookupError):  # a static cache that has no tensors yet
                value = resolve(self._model, args, kwargs)
                if isinstance(value, torch.Tensor):
                    cut = spec.held is not None and value.shape != spec.shape
                    tensors[id(value)] = _cut(value, spec, device or place, name) if cut else value
        return copy.deepcopy((args, kwargs), tensors)

    def heads(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
        """{id of the object that holds a cache: heads of this rank} of a call, for caches of which it has a part."""
        args, kwargs = self._binder.bind(args, kwargs)
        found = {}
        for spec, *_ in self._arguments:
            if spec.held is not None:
                path = parse_path(spec.source)
                with contextlib.suppress(PathLookupError):
                    holder = Path(path.root, path.steps[:-1]).resolve(self._model, args, kwargs)
                    found[id(holder)] = spec.held.stop - spec.held.start
        return found

    def executor(self) -> Executor:
        """What runs the graph, after the weights were brought up to date."""
        change = self._weights.changed()
        if change == "tensors":
            self._weights.bind(self._generated.instance)
            self._executor = None
        elif change == "values":
            self._weights.refresh(self._generated.instance)
        if self._executor is None:
            self._executor = self._make_executor(self._generated)
        return self._executor

    def keep_weights(self) -> None:
        """Put the results of the weight plan into ``store`` unless they are there. OSError."""
        self._weights.keep()

    def refresh_weights(self) -> None:
        """Rebuild derived weights after a write that torch does not count, such as ``param.data.copy_``."""
        self._weights.refresh(self._generated.instance)

    def trial(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The arguments of a run on the example, which changes nothing of the user's: what the graph writes is copied
        first."""
        tensors = self.tensors(args, kwargs, whole=True)
        for i in self._writes:
            own = torch.empty_strided(
                tensors[i].shape, tensors[i].stride(), dtype=tensors[i].dtype, device=tensors[i].device
            )
            tensors[i] = own.copy_(tensors[i].detach())
        return tensors

    def _check_overlap(self, tensors: Tensors) -> None:
        """A tensor that the graph writes must not be another argument as well: the graph treats them as separate."""
        clash = self._separate.clash(list(map(torch.Tensor.data_ptr, tensors)))
        if clash is not None:
            raise GuardError(
                f"{self._arguments[clash[0]][2]} and {self._arguments[clash[1]][2]} share the same memory and the graph"
                " writes one of them; pass separate tensors"
            )
