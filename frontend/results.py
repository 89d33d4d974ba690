"""Describes the result of a captured call (see `outputs` for the way back).

Dynamo's bytecode rebuilds the method's result around stand-ins for the graph's outputs; where the stand-ins, and the
caller's own objects, end up in it tells the structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._functorch._aot_autograd.schemas import OutputType

from ..fx_passes.paths import Path, Step, attr, item
from ..fx_passes.program import OutputSpec
from .dynamo import Trace
from .errors import CaptureError

Call = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]
Leaf = tuple[str, Any]

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_SEARCH_DEPTH = 5


def describe(trace: Trace, metadata: Any, paths: list[str], call: Call) -> tuple[OutputSpec, list[int]]:
    """The result's description and the indices of the graph outputs that it needs, in order.

    ``metadata`` is AOTAutograd's alias analysis of the outputs, ``paths`` belong to the inputs of ``trace``.

    Raises:
        CaptureError: the result holds an object that cannot be rebuilt; names its type.
    """
    nodes = _output_nodes(trace.gm.graph)
    markers = [_marker(n) for n in nodes]
    result = trace.rebuild(markers)
    known = {id(t): path for t, path in zip(trace.example_inputs, paths, strict=True)}
    own = dict(_objects_of(call)) | known
    # pytree takes a Size apart and puts a tuple together.
    flat, spec = pytree.tree_flatten(result, is_leaf=lambda v: id(v) in own or isinstance(v, torch.Size))
    index_of = {id(m): i for i, m in enumerate(markers)}
    kept: list[int] = []
    leaves: list[Leaf] = []
    for value in flat:
        i = index_of.get(id(value))
        if i is None:
            leaves.append(_object_leaf(value, own, call))
            continue
        leaf = _alias_leaf(metadata.output_info[i], nodes[i], trace, paths)
        if leaf is None:
            if i not in kept:
                kept.append(i)
            leaf = ("tensor", kept.index(i))
        leaves.append(leaf)
    return OutputSpec(_dump(spec), tuple(leaves)), kept


def _output_nodes(graph: fx.Graph) -> list[fx.Node]:
    values = graph.output_node().args[0]
    assert isinstance(values, list | tuple)
    nodes = []
    for value in values:
        assert isinstance(value, fx.Node)
        nodes.append(value)
    return nodes


def _marker(node: fx.Node) -> torch.Tensor:
    value = node.meta["example_value"]
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _objects_of(call: Call) -> Iterator[tuple[int, str]]:
    """Identity and path of the module and of everything the caller passed that is compared by identity."""

    def visit(value: Any, path: Path) -> Iterator[tuple[int, str]]:
        if isinstance(value, _CONSTANTS) or value == ():
            return
        yield id(value), str(path)
        if isinstance(value, list | tuple):
            for i, v in enumerate(value):
                yield from visit(v, path.then(item(i)))
        elif isinstance(value, dict):
            for k, v in value.items():
                if isinstance(k, int | str):
                    yield from visit(v, path.then(item(k)))

    model, args, kwargs = call
    yield id(model), "self"
    for i, value in enumerate(args):
        yield from visit(value, Path("args", (item(i),)))
    for name, value in kwargs.items():
        yield from visit(value, Path("kwargs", (item(name),)))


def _object_leaf(value: Any, own: Mapping[int, str], call: Call) -> Leaf:
    if id(value) in own:
        return ("source", own[id(value)])
    if isinstance(value, _CONSTANTS):
        return ("const", value)
    if (path := _search(value, call)) is not None:
        return ("source", str(path))
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        raise CaptureError(
            "the method returns a tensor that it neither computes nor reaches from self or its arguments",
            remedy="register the tensor as a buffer of the module",
        )
    if type(value).__module__ == "transformers.cache_utils":
        raise CaptureError(
            f"the method makes a {type(value).__name__} and returns it",
            remedy="pass a StaticCache, or use_cache=False",
        )
    raise CaptureError(
        f"the method returns a {name}, which cannot be rebuilt without running the model",
        remedy="return tensors in tuples, lists or dicts, or register the class with torch.utils._pytree."
        "register_pytree_node(..., serialized_type_name=...)",
    )


def _search(wanted: Any, call: Call) -> Path | None:
    """Breadth first through attributes, sequences and dicts of the call's objects, for ``wanted`` itself."""
    model, args, kwargs = call
    frontier: list[tuple[Any, Path]] = [(model, Path("self")), (args, Path("args")), (kwargs, Path("kwargs"))]
    seen: set[int] = set()
    for _ in range(_SEARCH_DEPTH):
        following: list[tuple[Any, Path]] = []
        for value, path in frontier:
            for child, step in _children(value):
                if child is wanted:
                    return path.then(step)
                if id(child) not in seen and not isinstance(child, (*_CONSTANTS, torch.Tensor)):
                    seen.add(id(child))
                    following.append((child, path.then(step)))
        frontier = following
    return None


def _children(value: Any) -> Iterator[tuple[Any, Step]]:
    if isinstance(value, list | tuple):
        yield from ((v, item(i)) for i, v in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((v, item(k)) for k, v in value.items() if isinstance(k, int | str))
    else:
        yield from ((v, attr(k)) for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("__"))


def _alias_leaf(info: Any, node: fx.Node, trace: Trace, paths: list[str]) -> Leaf | None:
    """The leaf for an output that is an input or a view of one, else None."""
    if info.output_type not in (OutputType.is_input, OutputType.alias_of_input):
        return None
    path = paths[info.base_idx]
    out = node.meta["example_value"]
    base = trace.gm.graph.find_nodes(op="placeholder")[info.base_idx].meta["example_value"]
    same = (tuple(out.shape), tuple(out.stride()), out.storage_offset(), out.dtype) == (
        tuple(base.shape), tuple(base.stride()), base.storage_offset(), base.dtype,
    )  # fmt: skip
    if info.output_type is OutputType.is_input:
        return ("source", path)
    if out.dtype != base.dtype or out.is_conj() or out.is_neg():
        raise CaptureError(
            f"the method returns a view of {path} that reads the memory in another way ({out.dtype})",
            remedy="return a copy: .clone()",
        )
    shape = tuple(base.shape) if same else tuple(out.shape)
    return ("view", (path, shape, tuple(out.stride()), out.storage_offset() - base.storage_offset()))


def _dump(spec: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as e:
        raise CaptureError(
            f"the containers of the method's result cannot be written to a file: {e}",
            remedy="register the class with a serialized_type_name, or return tuples, lists and dicts",
        ) from e
