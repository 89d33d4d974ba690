"""What differs between the versions of torch that Cannopy runs with (2.8 to 2.14), in one place.

Everything here is private to torch and has changed between its minor releases; docs/compat.md says what ran on which.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import convert_frame, exc
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import builder
from torch._guards import CompileId, TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Major and minor version."""
TRACED = CompileId(frame_id=0, frame_compile_id=0)
"""The identifier of a trace that no ``torch.compile`` made; Dynamo's log and its metrics ask for one."""
MOST_RESTARTS = 100
"""As often as Dynamo itself starts over before it gives up."""


@dataclass(frozen=True)
class Frame:
    """Dynamo's bytecode for a frame, and the cells that it runs with."""

    bytecode: types.CodeType
    closure: tuple[types.CellType, ...]


def compile_frame(
    function: types.FunctionType, scope: dict[str, Any], values: dict[str, Any], backend: Callable[..., Any]
) -> Frame:
    """One graph of ``function`` with ``scope`` as its globals and ``values`` in its frame, handed to ``backend``.

    Nothing is cached and no guard is built. Later versions have a function for that, in 2.8 it is part of a larger one.

    Raises:
        torch._dynamo.exc.TorchDynamoException: the function does not trace to one graph.
    """
    cells = function.__closure__ or ()
    if not hasattr(convert_frame, "compile_frame"):
        return Frame(_translate(function.__code__, scope, values, cells, backend), cells)
    out = convert_frame.compile_frame(
        function.__code__, scope, values, builtins.__dict__, cells, compiler_fn=backend, one_graph=True,
        restart_reasons=set(),
    )
    return Frame(out.bytecode, out.tracer_output.closure or ())


def _translate(
    code: types.CodeType, scope: dict[str, Any], values: dict[str, Any], cells: tuple[types.CellType, ...],
    backend: Callable[..., Any],
) -> types.CodeType:
    """The bytecode of torch 2.8's translator."""
    log = convert_frame.SpeculationLog()
    modes = torch.overrides._get_current_function_mode_stack()

    def transform(instructions: list[Any], options: dict[str, Any]) -> None:
        log.restart()
        raised = convert_frame.ExceptionStack()
        tracer = convert_frame.InstructionTranslator(
            instructions, code, values, scope, builtins.__dict__, cells, modes, options, backend, True, False, None,
            frame_state={}, speculation_log=log, exn_vt_stack=raised, distributed_state=None, package=None,
        )
        try:
            tracer.output.mark_bytecode_tracing_start()
            with tracing(tracer.output.tracing_context), tracer.set_current_tx():
                tracer.run()
        except exc.UnspecializeRestartAnalysis:
            log.clear()
            raise
        except exc.Unsupported as error:
            _tell_raised(error, raised)
            raise
        finally:
            tracer.output.call_cleanup_hooks()
        options.update(tracer.output.code_options)
        instructions[:] = tracer.output.output_instructions
        convert_frame.propagate_inst_exn_table_entries(instructions)
        convert_frame.check_inst_exn_tab_entries_valid(instructions)
        instructions[:] = convert_frame.remove_pointless_jumps(convert_frame.remove_dead_code(instructions))

    kept = convert_frame.preserve_global_state(transform)
    for _ in range(MOST_RESTARTS):
        try:
            made: types.CodeType = convert_frame.transform_code_object(code, kept)
            return made
        except exc.RestartAnalysis:
            continue
    raise exc.InternalTorchDynamoError(f"Dynamo started over {MOST_RESTARTS} times on {code.co_name}")


def _tell_raised(error: BaseException, raised: Any) -> None:
    """What the traced method itself raises becomes the cause of ``error``, with its arguments, as later versions do."""
    observed = error.__context__
    if isinstance(observed, exc.ObservedException):
        by_user, met = getattr(raised._current_exception, "args", ()), observed.__context__
        same = met is not None and type(observed).__name__.startswith(f"Observed{type(met).__name__}")
        observed.args = tuple(by_user or (met.args if met is not None and same else ()))
        error.__cause__ = observed


def raised_text(observed: BaseException) -> str:
    """What the traced method said when it raised ``observed``, Dynamo's exception for one of the method; "" if nothing
    or no constant."""
    quoted = re.search(r'ConstantVariable\(\w+: (["\'])(.*)\1\)', str(observed))
    if quoted is not None:
        return quoted[2]
    if (called := re.fullmatch(r"raised exception \w+\((.*)\)", str(observed), re.DOTALL)) is not None:
        with suppress(SyntaxError, ValueError):
            return str(ast.literal_eval(called[1]))
        return called[1]
    return observed.args[0] if len(observed.args) == 1 and isinstance(observed.args[0], str) else ""


def graph_name(gm: torch.fx.GraphModule, scope: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The global by which Dynamo's bytecode calls the compiled ``gm``.

    Up to torch 2.8 only ``scope`` tells, which may have names of earlier calls of ``torch.compile`` as well: those that
    were there ``before`` the trace.
    """
    name = gm.meta.get("backend_id")
    return str(name or next(key for key in scope if key.startswith("__compiled_fn_") and key not in before))


def whole_graph_settings() -> dict[str, Any]:
    """Dynamo settings by which a trace to one graph records values and sizes that depend on data, so that the line
    which makes them can be named. torch 2.8 does that with these only, 2.13 for every trace to one graph."""
    recorded = TORCH < (2, 13)
    return {"capture_scalar_outputs": recorded, "capture_dynamic_output_shape_ops": recorded}


def source_name(source: Any) -> str:
    """Dynamo's expression for a value of the user. A method up to torch 2.9, a property afterwards."""
    name = source.name
    return str(name() if callable(name) else name)


def gives_other_memory(target: Any) -> bool:
    """Whether a call of Dynamo's graph gives a tensor other memory; ``.data = …`` has an op of its own from 2.14 on."""
    return target in (torch.Tensor.set_, "set_", "resize_") or str(target) == "aten.shallow_copy_data_"


def value_changed(variable: Any, side_effects: Any) -> bool:
    """Whether the list, dict or tuple that a user's object is changed, besides its attributes."""
    changed = getattr(variable, "is_base_vt_modified", None) or getattr(variable, "is_underlying_vt_modified", None)
    return bool(changed and changed(side_effects))


def mutation_stack(variable: Any, side_effects: Any) -> Sequence[traceback.FrameSummary]:
    """The user's stack where ``variable`` was changed last; empty where it was not recorded."""
    stacks = getattr(side_effects, "mutation_user_stacks", {}).get(variable) or [()]
    last: Sequence[traceback.FrameSummary] = stacks[-1]
    return last


@contextmanager
def recorded_mutations() -> Iterator[None]:
    """While this is open, Dynamo records the user's stack of each change to a Python object, which `mutation_stack`
    reads. Later versions than torch 2.8 do so themselves."""
    kinds = ("store_attr", "mutation")
    before = {name: getattr(SideEffects, name) for name in kinds}
    if "mutation_user_stacks" in SideEffects.__annotations__:
        yield
        return

    def recording(change: Callable[..., None]) -> Callable[..., None]:
        def changed(effects: Any, variable: Any, *args: Any) -> None:
            change(effects, variable, *args)
            stacks = vars(effects).setdefault("mutation_user_stacks", {})
            stacks.setdefault(variable, []).append(TracingContext.extract_stack())

        return changed

    for name, change in before.items():
        setattr(SideEffects, name, recording(change))
    try:
        yield
    finally:
        for name, change in before.items():
            setattr(SideEffects, name, change)


def in_one_mode(context: TracingContext, inputs: Sequence[torch.Tensor]) -> TracingContext:
    """``context`` in the fake mode of those ``inputs`` that are fake: AOTAutograd of torch 2.8 takes no other, that of
    2.13 makes such inputs anew in the mode of the context."""
    modes = [t.fake_mode for t in inputs if isinstance(t, FakeTensor)]
    if modes and TORCH < (2, 13):
        context.fake_mode = modes[0]
    return context


@contextmanager
def inputs_only() -> Iterator[None]:
    """While this is open, tensors marked by ``mark_static_address(guard=True)`` are traced as inputs like all others.

    Dynamo makes attributes of the graph of them. Up to torch 2.8 that is the default, and caches of transformers have
    the mark.
    """
    type_of = builder.get_static_address_type
    builder.get_static_address_type = lambda t: "unguarded" if type_of(t) else None
    try:
        yield
    finally:
        builder.get_static_address_type = type_of


@contextmanager
def traceable_experts() -> Iterator[None]:
    """Up to torch 2.10, transformers asks on a CPU whether weights lie at a multiple of 16 bytes before it calls
    ``torch._grouped_mm``, which no trace can answer. While this is open it takes its own op for the same product."""
    module = sys.modules.get("transformers.integrations.moe")
    name = "_can_use_grouped_mm"
    before = getattr(module, name, None)
    if TORCH >= (2, 11) or before is None:
        yield
        return
    setattr(module, name, _no_grouped_mm)
    try:
        yield
    finally:
        setattr(module, name, before)


def _no_grouped_mm(*_: Any) -> bool:
    return False


def specialised(context: TracingContext) -> list[str]:
    """Dynamo's expressions (``L['cache'].scale``) of the plain values that a trace was specialised on."""
    found = []
    for guard in context.guards_context.dynamo_guards.inner:
        maker: Any = guard.create_fn.func if isinstance(guard.create_fn, functools.partial) else guard.create_fn
        if maker.__name__ in ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"):
            name: Any = guard.name
            found.append(name() if callable(name) else name)  # a method in some versions
    return list(dict.fromkeys(found))
