"""A node replaced by the operations of a function: dialect operations become their plain ATen references."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from cannopy.fx_passes.graph import Editor, is_call, where


class InlineError(ValueError):
    """A function cannot be put in the place of a node."""


def inline(editor: Editor, node: fx.Node, fn: Callable[..., Any]) -> None:
    """Replace ``node`` by what ``fn`` does with the same arguments, traced to ATen.

    ``fn`` takes the node's arguments, calls ATen operations on tensors only and returns what the node does, in the
    same shape and dtype. New nodes stand before ``node`` and have its provenance. Raises `InlineError`.
    """
    tensors = list(node.all_input_nodes)
    number = {tensor: f"%{i}" for i, tensor in enumerate(tensors)}
    call = fx.node.map_arg((node.args, [*node.kwargs.items()]), number.__getitem__)
    traced = editor.recalled(("inline", fn), (call, tensors), lambda: _trace(editor, node, fn, tensors))
    values: dict[fx.Node, Any] = {}
    feed = iter(tensors)
    result: Any = None
    with editor.before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                values[inner] = next(feed)
            elif inner.op == "output":
                result = fx.node.map_arg(inner.args[0], lambda n: values[n])
            elif inner.op == "call_function":
                args, kwargs = fx.node.map_arg((inner.args, inner.kwargs), lambda n: values[n])
                values[inner] = editor.call(inner.target, *args, **kwargs)
            else:
                raise InlineError(f"{node.target} at {where(node)}: its reference holds a tensor constant")
    if isinstance(result, list | tuple):
        _replace_items(editor, node, result)
    else:
        _check(node, node.meta["val"], result)
        editor.replace(node, result)


def _replace_items(editor: Editor, node: fx.Node, results: Sequence[Any]) -> None:
    for user in list(node.users):
        if not is_call(user, operator.getitem):
            raise InlineError(f"{node.target} at {where(node)}: {user.name} uses all of its results at once")
        index = cast(int, user.args[1])
        _check(node, user.meta["val"], results[index])
        editor.replace(user, results[index])


def _trace(editor: Editor, node: fx.Node, fn: Callable[..., Any], tensors: list[fx.Node]) -> fx.GraphModule:
    def call(*given: torch.Tensor) -> Any:
        bound = dict(zip(tensors, given, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: bound[n])
        return fn(*args, **kwargs)

    with editor.fake_mode, torch.no_grad():
        # make_fx knows its inputs by identity, and two nodes may have one fake value: each gets a tensor of its own.
        fakes = [t.meta["val"] for t in tensors]
        given = [torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=f.device) for f in fakes]
        traced: fx.GraphModule = make_fx(call)(*given)
    return traced


def _check(node: fx.Node, want: torch.Tensor, result: Any) -> None:
    if not isinstance(result, fx.Node):
        raise InlineError(f"{node.target} at {where(node)}: its reference returned {result!r}, expected one tensor")
    got = result.meta["val"]
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        raise InlineError(
            f"{node.target} at {where(node)}: expected {want.dtype}{list(want.shape)}, its reference gives "
            f"{got.dtype}{list(got.shape)}"
        )
