"""Captures one method call of a plain ``nn.Module`` as a functional ATen graph with bindings: a `Program`."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from ..fx_passes import calls, compat
from ..fx_passes.program import InputSpec, Program
from . import dynamo, experts, failures, provenance, sdpa
from .bindings import Binder, Bound
from .errors import CaptureError
from .results import describe
from .twin import fake_copy, on_meta

_ASSERTS = frozenset(
    {
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._functional_assert_async.msg,
        torch.ops.aten._functional_assert_scalar.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
        torch.ops.aten.sym_constrain_range.default,
    }
)

_SMALL = 1 << 16
"""Entries of a vector up to which its smallest is looked up."""


def capture(
    model: nn.Module, method: str = "forward", args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Program:
    """The graph of ``getattr(model, method)(*args, **kwargs)``.

    Nothing is computed, and neither the user's objects nor Dynamo's caches change. Shapes, strides, dtypes and
    Python values are those of this call. Static caches must be initialised (`state.prepare_state`).
    A model on the meta device is captured as if it were on the CPU. Loops over experts that depend on the data are
    replaced by equal methods in a twin of the model (`experts`).

    Returns:
        A program whose ``facts["constants"]`` has the values of the arguments that are no tensors, by path, and
        ``facts["least"]`` the smallest entry of each weight that is a vector, by placeholder.

    Raises:
        CaptureError: no single functional graph stands for this call; names the source line and the usual cure.
    """
    kwargs = dict(kwargs or {})
    twin = experts.capturable(model)
    try:
        return _capture(twin.model, method, args, kwargs)
    except CaptureError as e:
        raise failures.with_loops(e, twin.refused) from e.__cause__


def _capture(model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    if on_meta(model):
        model, args, kwargs = fake_copy((model, args, kwargs), FakeTensorMode())
    bound = _bound_method(model, method)
    try:
        inspect.signature(bound, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as e:
        raise CaptureError(f"the arguments do not fit {type(model).__name__}.{method}: {e}") from e
    try:
        trace = dynamo.trace(bound, args, kwargs)
    except TorchDynamoException as e:
        raise failures.from_dynamo(e) from e
    if trace is None:
        raise CaptureError(f"{type(model).__name__}.{method} does no tensor operation: there is nothing to compile")
    failures.check_effects(trace.effects)
    failures.check_static(trace.gm.graph)
    binder = Binder(bound, args, kwargs)
    bounds = _bind(trace, binder)
    paths = [str(b.path) for b in bounds]
    sdpa.rewrite(trace.gm.graph)
    trace.gm.recompile()
    lowered = _lower(trace)
    _check_inputs(lowered, trace, paths)
    output, kept = describe(trace, lowered.metadata, paths, (model, args, kwargs))
    failures.check_added_masks(lowered.gm.graph)
    gm = _finish(lowered.gm, kept, paths)
    written = {n.args[0] for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    inputs = [
        InputSpec(node.name, b.kind, path, tuple(t.shape), tuple(t.stride()), t.dtype, mutated=node in written)
        for node, b, path, t in zip(
            gm.graph.find_nodes(op="placeholder"), bounds, paths, trace.example_inputs, strict=True
        )
    ]
    constants = calls.constants(args, kwargs) | _attributes(trace, binder)
    facts = {"constants": constants, "least": _least(inputs, trace.example_inputs)}
    return Program(gm, inputs, output, facts=facts)


def _attributes(trace: dynamo.Trace, binder: Binder) -> dict[str, Any]:
    """Path -> value of the plain values that the method reads from objects among its arguments."""
    read = filter(None, map(binder.argument, compat.specialised(trace.context)))
    return {path: value for path, value in read if isinstance(value, calls.CONSTANTS)}


def _least(inputs: list[InputSpec], tensors: list[torch.Tensor]) -> dict[str, float]:
    """The smallest entry of each vector among the model's floating-point weights, by name; none without values."""
    found = {spec.name: least_of(spec, t) for spec, t in zip(inputs, tensors, strict=True)}
    return {name: value for name, value in found.items() if value is not None}


def least_of(spec: InputSpec, t: torch.Tensor) -> float | None:
    """The smallest entry of ``t`` if it is a floating-point vector among the model's weights and has values."""
    vector = t.dim() == 1 and 0 < t.numel() <= _SMALL and t.is_floating_point()
    if spec.kind not in ("parameter", "buffer") or not vector or t.is_meta or isinstance(t, FakeTensor):
        return None
    return float(t.detach().min())


def _bound_method(model: nn.Module, method: str) -> MethodType:
    found = getattr(model, method, None)
    # A decorator may hide the bound method behind functools.partial or a callable object.
    if not isinstance(found, MethodType) or found.__self__ is not model:
        raise CaptureError(
            f"{type(model).__name__}.{method} is not a method of the model but {type(found).__name__}",
            remedy="name a plain method; undo wrappers such as torch.compile or a patched forward",
        )
    return found


def _bind(trace: dynamo.Trace, binder: Binder) -> list[Bound]:
    bounds = []
    nodes = trace.gm.graph.find_nodes(op="placeholder")
    for node, source, tensor in zip(nodes, trace.sources, trace.example_inputs, strict=True):
        try:
            bounds.append(binder.bind(source, tensor))
        except CaptureError as e:
            where = next(filter(None, map(provenance.of_node, node.users)), None)
            raise CaptureError.at(where, e.reason, e.remedy) from e
    return bounds


def _lower(trace: dynamo.Trace) -> dynamo.Lowered:
    try:
        return dynamo.lower(trace)
    except Exception as e:  # AOTAutograd raises what the operators' fake kernels raise: any class
        raise failures.from_aot(e) from e


def _check_inputs(lowered: dynamo.Lowered, trace: dynamo.Trace, paths: list[str]) -> None:
    """Refuses mutations that one ``copy_`` per input cannot express."""
    if len(lowered.gm.graph.find_nodes(op="placeholder")) != len(paths) or lowered.metadata.mutated_inp_runtime_indices:
        shared = _sharing_storage(trace.example_inputs, paths)
        raise CaptureError(
            "the method mutates a tensor that overlaps another input in memory: " + (", ".join(shared) or "unknown"),
            remedy="give the model separate tensors, or reach the memory through one of them only",
        )
    for info, path in zip(lowered.metadata.input_info, paths, strict=True):
        if info.mutates_metadata or info.mutates_storage_metadata:
            raise CaptureError(
                f"the method changes shape, stride or storage of {path} in place",
                remedy="copy into it instead: copy_, index_copy_",
            )


def _sharing_storage(tensors: list[torch.Tensor], paths: list[str]) -> list[str]:
    by_storage: dict[int, list[str]] = {}
    for tensor, path in zip(tensors, paths, strict=True):
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(path)
    return [path for group in by_storage.values() if len(group) > 1 for path in group]


def _finish(lowered: fx.GraphModule, kept: list[int], paths: list[str]) -> fx.GraphModule:
    """A copy of AOT's graph with the outputs ``kept``, no asserts, annotated nodes and no random numbers.

    Its code is written when it is first called or read, not each time that the graph changes.

    Placeholders are named after their paths: ``kwargs['cache'].layers[0].keys`` → ``kwargs_cache_layers_0_keys``.
    """
    graph = copy.deepcopy(lowered.graph)
    for node, path in zip(graph.find_nodes(op="placeholder"), paths, strict=True):
        node._rename(re.sub(r"\W+", "_", path).strip("_"))
        node.target = node.name
    output = graph.output_node()
    values = output.args[0]
    assert isinstance(values, list | tuple)
    output.args = (tuple(values[i] for i in kept),)
    for node in list(graph.nodes):
        if node.target in _ASSERTS:
            graph.erase_node(node)
    provenance.annotate(graph)
    output.meta = {"val": tuple(n.meta["val"] for n in output.args[0] if isinstance(n, fx.Node))}
    graph.eliminate_dead_code()
    for node in graph.nodes:
        _refuse_randomness(node)
    graph.lint()
    return _LazyGraphModule(lowered, graph, class_name="Captured")


def _refuse_randomness(node: fx.Node) -> None:
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        raise CaptureError.at(
            provenance.of_node(node),
            f"{node.target} draws random numbers, which a compiled graph would not repeat as eager does",
            "call model.eval(), set dropout and router noise to 0, or pass the random tensor as an argument",
        )
