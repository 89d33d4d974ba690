"""Give a placeholder another view of the same storage: a cache becomes rows ``[B*L, D]`` or blocks ``[blk, bs, 1, D]``.

Ops that update a cache in place do so without a copy only when the cache operand is the graph input itself. So the
view is taken at the graph's edge (`InputSpec.view`), not in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call, shape, where
from cannopy.fx_passes.program import Program


class RebindError(ValueError):
    """The placeholder cannot be seen in the wanted shape; the message says why."""


def why_not(program: Program, placeholder: fx.Node, view: Sequence[int]) -> str | None:
    """The reason why `rebind` would refuse, or None.

    The storage must be contiguous (torchair clones any other input and copies it back after each step), the sizes
    must agree, and an earlier rebind to another view is kept.
    """
    if placeholder.op != "placeholder":
        return f"{placeholder.name} is not an input of the graph"
    spec = program.spec(placeholder.name)
    if math.prod(spec.shape) != math.prod(view):
        return f"{spec.source} has shape {list(spec.shape)}, which has no view {list(view)}"
    if not placeholder.meta["val"].is_contiguous():
        return f"{spec.source} is not contiguous: strides {list(spec.stride)} for shape {list(spec.shape)}"
    if spec.view is not None and spec.view != tuple(view):
        return f"{spec.source} is already seen as {list(spec.view)}, wanted {list(view)}"
    return None


def rebind(program: Program, editor: Editor, placeholder: fx.Node, view: Sequence[int]) -> None:
    """Make ``placeholder`` a view of shape ``view`` of the caller's tensor.

    What used it so far reads ``reshape(placeholder, old shape)``; its trailing ``copy_`` writes
    ``reshape(value, view)``. Nothing changes when it has that shape. Raises `RebindError`.
    """
    reason = why_not(program, placeholder, view)
    if reason is not None:
        raise RebindError(f"cannot rebind {placeholder.name}: {reason}")
    old = shape(placeholder)
    if old == tuple(view):
        return
    users = list(placeholder.users)
    placeholder.meta["val"] = editor.fake(lambda: placeholder.meta["val"].view(list(view)))
    if any(not _writes(user, placeholder) or user.args[1] is placeholder for user in users):
        _keep_old_shape(editor, placeholder, old, users)
    for user in users:
        if _writes(user, placeholder):
            value = user.args[1]
            assert isinstance(value, fx.Node)
            # Before all copies: nothing but copies may stand between them.
            first = editor.graph.find_nodes(op="call_function", target=aten.copy_.default)[0]
            with editor.before(first, like=user):
                user.args = (placeholder, editor.reshape(value, view), *user.args[2:])
            user.meta["val"] = placeholder.meta["val"]
    index = program.position(placeholder.name)
    spec = program.inputs[index]
    program.inputs[index] = replace(spec, view=None if spec.shape == tuple(view) else tuple(view))


def update(editor: Editor, placeholder: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Make ``new``, in the shape of ``placeholder``, its next value in place of ``old``.

    The trailing ``copy_`` takes ``new`` itself; everything else that used ``old`` reads ``reshape(new, old shape)``.
    ``new`` must stand before every user of ``old``.
    """
    if shape(new) != shape(placeholder):
        raise RebindError(
            f"new value of {placeholder.name} at {where(new)}: expected shape {list(shape(placeholder))}, "
            f"found {list(shape(new))}"
        )
    with editor.graph.inserting_after(new), editor.provenance_of(new):
        editor.replace(old, editor.reshape(new, shape(old)))
    for user in list(placeholder.users):
        if _writes(user, placeholder) and _behind_reshapes(user.args[1]) is new:
            user.args = (placeholder, new, *user.args[2:])


def write_of(placeholder: fx.Node) -> fx.Node | None:
    """The trailing ``copy_`` that writes ``placeholder`` back, if the graph mutates it."""
    for user in list(placeholder.users):
        if _writes(user, placeholder):
            return user
    return None


def _writes(user: fx.Node, placeholder: fx.Node) -> bool:
    return is_call(user, aten.copy_.default) and user.args[0] is placeholder


def _behind_reshapes(value: object) -> object:
    while is_call(value, aten.reshape.default):
        assert isinstance(value, fx.Node)
        value = value.args[0]
    return value


def _keep_old_shape(editor: Editor, placeholder: fx.Node, old: Sequence[int], users: list[fx.Node]) -> None:
    first = next(node for node in editor.graph.nodes if node.op != "placeholder")
    like = next(user for user in users if user.op == "call_function")
    with editor.before(first, like=like):
        kept = editor.reshape(placeholder, old)
    for user in users:
        if _writes(user, placeholder):
            user.args = (placeholder, *(kept if a is placeholder else a for a in user.args[1:]))
        else:
            user.replace_input_with(placeholder, kept)
