"""What differs between the versions of torch that Cannopy runs with (2.8 to 2.14), in one place.

Everything here is private to torch and has changed between its minor releases; docs/compat.md says what ran on which.
"""

from __future__ import annotations

import builtins
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import convert_frame, exc
from torch._dynamo.variables import builder
from torch._guards import CompileId, tracing

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
        tracer = convert_frame.InstructionTranslator(
            instructions, code, values, scope, builtins.__dict__, cells, modes, options, backend, True, False, None,
            frame_state={}, speculation_log=log, exn_vt_stack=convert_frame.ExceptionStack(), distributed_state=None,
            package=None,
        )
        try:
            tracer.output.mark_bytecode_tracing_start()
            with tracing(tracer.output.tracing_context), tracer.set_current_tx():
                tracer.run()
        except exc.UnspecializeRestartAnalysis:
            log.clear()
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


def graph_name(gm: torch.fx.GraphModule, scope: Mapping[str, Any]) -> str:
    """The global by which Dynamo's bytecode calls the compiled ``gm``. Up to torch 2.8 only ``scope`` tells."""
    name = gm.meta.get("backend_id")
    return str(name or next(key for key in scope if key.startswith("__compiled_fn_")))


def source_name(source: Any) -> str:
    """Dynamo's expression for a value of the user. A method up to torch 2.9, a property afterwards."""
    name = source.name
    return str(name() if callable(name) else name)


def value_changed(variable: Any, side_effects: Any) -> bool:
    """Whether the list, dict or tuple that a user's object is changed, besides its attributes."""
    changed = getattr(variable, "is_base_vt_modified", None) or getattr(variable, "is_underlying_vt_modified", None)
    return bool(changed and changed(side_effects))


def mutation_stack(variable: Any, side_effects: Any) -> Sequence[traceback.FrameSummary]:
    """The user's stack where ``variable`` was changed last; empty where torch does not record it (2.8)."""
    stacks = getattr(side_effects, "mutation_user_stacks", {}).get(variable) or [()]
    last: Sequence[traceback.FrameSummary] = stacks[-1]
    return last


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
