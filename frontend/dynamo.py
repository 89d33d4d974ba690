"""Tracing with Dynamo and AOTAutograd, nothing run and nothing left behind.

`trace` calls the tracer below ``torch.compile``: no code object gets a cache entry, no entry appears in Dynamo's code
maps, and the names that Dynamo installs into the globals of the traced function land in a copy of them. What differs
between versions of torch is in `fx_passes.compat`.
"""

from __future__ import annotations

import inspect
import logging
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_metrics_context
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import CompileContext, TracingContext, compile_context, tracing

from cannopy.fx_passes import compat

_SETTINGS: dict[str, Any] = {
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "specialize_int": True,
    "specialize_float": True,
    **compat.whole_graph_settings(),
    "install_free_tensors": False,
    "replay_side_effects": True,
    "side_effect_replay_policy": "info",
    "suppress_errors": False,
    "verbose": False,
    "ignore_logger_methods": {logging.Logger.debug, logging.Logger.info},
}
"""Dynamo settings of a capture, whatever the user's process has set: static shapes, no unbacked sizes, every
parameter an input of the graph, user stacks of side effects recorded. Log messages below a warning are not carried into
the graph; transformers before 5.24 logs at debug level while it looks for torch's version."""


@dataclass(frozen=True)
class Effect:
    """A Python object of the caller that the method changes: Dynamo's expression for it (or its type's name), the
    attributes that it assigns (empty when the object's own value changes: a list, a dict) and the user's stack."""

    owner: str
    attributes: tuple[str, ...]
    stack: Sequence[traceback.FrameSummary]


def _effects(side_effects: Any) -> list[Effect]:
    found = []
    for variable in side_effects._get_modified_vars():
        if not isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting):
            continue
        if isinstance(variable, TorchFunctionModeStackVariable):  # a `with` of a mode, over by the end of the method
            continue
        assigned = side_effects.store_attr_mutations.get(variable, {})
        changed = tuple(name for name, value in assigned.items() if not _restored(variable, name, value))
        if assigned and not changed and not compat.value_changed(variable, side_effects):
            continue
        owner = compat.source_name(variable.source) if variable.source is not None else variable.python_type_name()
        found.append(Effect(owner, changed, compat.mutation_stack(variable, side_effects)))
    return found


def _restored(variable: Any, name: str, value: Any) -> bool:
    """Whether an attribute ends with the constant that it has now (flags that a context manager sets and resets)."""
    if not isinstance(variable, UserDefinedObjectVariable) or not value.is_python_constant():
        return False
    try:
        before = inspect.getattr_static(variable.value, name)
    except AttributeError:
        return False
    after = value.as_python_constant()
    return type(before) is type(after) and bool(before == after)


@dataclass
class Trace:
    """One Dynamo graph. Entry i of ``sources`` and ``example_inputs`` belongs to placeholder i.

    ``sources`` are Dynamo's expressions (``L['self']._modules['lm_head']._parameters['weight']``);
    ``example_inputs`` are the user's own tensors.
    """

    gm: fx.GraphModule
    example_inputs: list[torch.Tensor]
    sources: list[str]
    context: TracingContext
    effects: list[Effect]
    _rebuild: Callable[[Sequence[torch.Tensor]], Any]

    def rebuild(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The method's result, built by Dynamo's bytecode around ``outputs`` in place of the graph's outputs."""
        return self._rebuild(outputs)


@dataclass
class Lowered:
    """An inference graph of AOTAutograd with ``copy_`` for each mutated input, and AOT's alias analysis."""

    gm: fx.GraphModule
    metadata: Any


@dataclass
class _Backend:
    """Receives Dynamo's graph. Returns it as is: nothing calls it."""

    gm: fx.GraphModule | None = None
    example_inputs: list[torch.Tensor] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    context: TracingContext | None = None
    effects: list[Effect] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[torch.Tensor]) -> fx.GraphModule:
        # Dynamo drops `grapharg` and its record of side effects as soon as the backend returns.
        self.sources = [compat.source_name(n.meta["grapharg"].source) for n in _placeholders(gm)]
        self.effects = _effects(InstructionTranslator.current_tx().output.side_effects)
        self.gm, self.example_inputs, self.context = gm, list(example_inputs), TracingContext.get()
        return gm


@contextmanager
def _quiet_tracing() -> Iterator[None]:
    with ExitStack() as stack:
        # Restored on exit. The lru_cache note is about wrappers that Dynamo inlines, which loses nothing here.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=r"(?s)Dynamo detected a call to a `functools.lru_cache`")
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(dynamo_config.patch(**{k: v for k, v in _SETTINGS.items() if hasattr(dynamo_config, k)}))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


def frame_locals(function: types.FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What ``function(*args, **kwargs)`` finds in its frame: parameters, defaults and closure cells.

    Raises:
        TypeError: the arguments do not fit the signature.
    """
    bound = inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    bound.apply_defaults()
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return {**bound.arguments, **{name: cell.cell_contents for name, cell in cells.items()}}


def _keyword_dict(function: types.FunctionType) -> str | None:
    """Dynamo's expression for the dict behind ``**kwargs``, which each call makes anew."""
    named = inspect.signature(function, follow_wrapped=False).parameters.values()
    return next((f"L[{p.name!r}]" for p in named if p.kind is p.VAR_KEYWORD), None)


def trace(method: types.MethodType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace | None:
    """Dynamo's graph of ``method(*args, **kwargs)`` or None when the method does nothing with tensors.

    Raises:
        torch._dynamo.exc.TorchDynamoException: the method does not trace to one graph.
    """
    function = method.__func__
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{method!r} is not a Python method")
    values = frame_locals(function, (method.__self__, *args), kwargs)
    scope = dict(function.__globals__)
    backend = _Backend()
    with (
        _quiet_tracing(), compat.inputs_only(), compat.traceable_experts(), compat.recorded_mutations(),
        compile_context(CompileContext(compat.TRACED)), get_metrics_context(),
    ):
        frame = compat.compile_frame(function, scope, dict(values), backend)
    if backend.gm is None or backend.context is None:
        return None
    effects = [e for e in backend.effects if e.owner != _keyword_dict(function) or e.attributes]
    graph = compat.graph_name(backend.gm, scope, function.__globals__)

    def rebuild(outputs: Sequence[torch.Tensor]) -> Any:
        code = types.FunctionType(
            frame.bytecode,
            {**scope, graph: lambda *_: tuple(outputs)},
            argdefs=function.__defaults__,
            closure=frame.closure,
        )
        code.__kwdefaults__ = function.__kwdefaults__
        with torch.no_grad():
            return code(method.__self__, *args, **kwargs)

    return Trace(backend.gm, backend.example_inputs, backend.sources, backend.context, effects, rebuild)


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _lowerable(tensor: torch.Tensor, placeholder: fx.Node) -> torch.Tensor:
    """What stands for ``tensor`` in AOTAutograd, which cannot wrap one made in inference mode that requires grad."""
    if not tensor.is_inference():
        return tensor
    fake: torch.Tensor = placeholder.meta["example_value"]
    return fake.requires_grad_(False)


def lower(trace: Trace) -> Lowered:
    """AOTAutograd's functional inference graph of ``trace.gm`` on fake inputs."""
    seen: list[Lowered] = []

    def compiler(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        seen.append(Lowered(gm, TracingContext.get().fw_metadata))
        return gm.forward

    inputs = [_lowerable(t, n) for t, n in zip(trace.example_inputs, _placeholders(trace.gm), strict=True)]
    with _quiet_tracing(), tracing(compat.in_one_mode(trace.context, inputs)), get_metrics_context():
        aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)(trace.gm, inputs)
    (lowered,) = seen
    return lowered
