"""The compiled method: checks the call, binds the weights, runs the graph, rebuilds the eager result."""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cannopy.backend.artifact import Artifact
from cannopy.backend.guards import CallBinder, ConstantGuard, GuardError, LeafGuard, apply_view, check_tensor, laid_out
from cannopy.backend.weights import FormatCast, WeightBinder
from cannopy.fx_passes.paths import PathLookupError, compile_path
from cannopy.fx_passes.program import OutputSpec

Tensors = Sequence[torch.Tensor]
Executor = Callable[[Tensors], Tensors]
"""Runs the graph on the method's arguments and gives its outputs."""

_LOADS = 0


OutputBuilder = Callable[[Tensors, Any, tuple[Any, ...], dict[str, Any]], Any]
"""``(tensors, module, args, kwargs)`` -> the eager method's result."""
MakeOutput = Callable[[OutputSpec], OutputBuilder]


class ExecutorFactory(Protocol):
    """Makes the executor of a generated module, again after weights have moved."""

    def __call__(self, generated: GeneratedModule) -> Executor: ...


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
    ``report`` is the plain form of the compile report. Not for concurrent calls from several threads.
    """

    def __init__(
        self,
        artifact: Artifact,
        model: torch.nn.Module,
        generated: GeneratedModule,
        make_executor: ExecutorFactory,
        make_output: MakeOutput,
        cast_nz: FormatCast | None = None,
    ) -> None:
        self.artifact = artifact
        self.report: dict[str, Any] = dict(artifact.report)
        self._model = model
        self._generated = generated
        self._make_executor = make_executor
        self._build_output = make_output(artifact.output)
        self._binder = CallBinder(getattr(model, artifact.method), artifact.form)
        self._constants = ConstantGuard(artifact.constants, self._binder)
        self._leaves = LeafGuard(artifact.form, self._binder)
        specs = [artifact.spec(name) for name in artifact.module.arguments]
        self._arguments = [
            (s, compile_path(s.source), self._binder.name(s.source), artifact.devices[s.name]) for s in specs
        ]
        self._writes = [i for i, s in enumerate(specs) if s.name in artifact.module.written]
        self._weights = WeightBinder(artifact, model, cast_nz)
        self._weights.bind(generated.instance)
        self._executor: Executor | None = None

    @property
    def source(self) -> str:
        """The generated Python source that was compiled."""
        return self.artifact.module.source

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._binder.bind(args, kwargs)
        self._constants.check(self._model, args, kwargs)
        with torch.no_grad():
            tensors = self.tensors(args, kwargs)
            self._leaves.check(args, kwargs)
            outputs = self.executor()(tensors)
            return self._build_output(outputs, self._model, args, kwargs)

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The checked arguments of the generated method for a call spelt as the example was."""
        found = []
        for spec, resolve, name, device in self._arguments:
            try:
                value = resolve(self._model, args, kwargs)
            except PathLookupError as e:
                raise GuardError(f"{name}: expected a tensor; {e}") from e
            if spec.kind == "argument" and not spec.mutated:
                value = laid_out(value, spec)
            found.append(apply_view(check_tensor(value, spec, device, name), spec, name))
        self._check_overlap(found)
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

    def refresh_weights(self) -> None:
        """Rebuild derived weights after a write that torch does not count (``param.data.copy_``)."""
        self._weights.refresh(self._generated.instance)

    def trial(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The arguments of a run that changes nothing of the user's: what the graph writes is copied first."""
        tensors = self.tensors(args, kwargs)
        for i in self._writes:
            copy = torch.empty_strided(
                tensors[i].shape, tensors[i].stride(), dtype=tensors[i].dtype, device=tensors[i].device
            )
            tensors[i] = copy.copy_(tensors[i].detach())
        return tensors

    def _check_overlap(self, tensors: Tensors) -> None:
        """A tensor that the graph writes must not be another argument as well: the graph treats them as separate."""
        if not self._writes:
            return
        pointers = list(map(torch.Tensor.data_ptr, tensors))
        if len(set(pointers)) == len(pointers):
            return
        for i in self._writes:
            for j, p in enumerate(pointers):
                if j != i and p == pointers[i] != 0:
                    raise GuardError(
                        f"{self._arguments[i][2]} and {self._arguments[j][2]} are the same memory and the graph"
                        " writes one of them; pass separate tensors"
                    )
