"""Weights that a final graph reads and the user's model does not have: planned here, built once at load time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call, where
from cannopy.fx_passes.program import Program, WeightEntry

LEAST, LEAST_READ = "least", "least read"
"""Keys of `Program.facts`: the smallest entries of weights by placeholder, and which of them a rule has asked for."""


class WeightSourceError(ValueError):
    """A weight was to be derived from a value that is not constant over the steps of the model."""


def why_not_weight(program: Program, node: object) -> str | None:
    """Why ``node`` cannot be the source of a derived weight; None when it can.

    Sources are placeholders bound to parameters or buffers that the graph does not mutate, derived weights, and
    transposes of either (a parameter that is stored the other way round).
    """
    node = _stored(node)
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return f"{node} is computed in every step"
    if any(entry.name == node.name for entry in program.weights):
        return None
    try:
        spec = program.spec(node.name)
    except KeyError:
        return f"placeholder {node.name} is bound to nothing that the program knows"
    if spec.kind not in ("parameter", "buffer"):
        return f"{spec.source} is a model {spec.kind}, not a parameter or buffer"
    if spec.mutated:
        return f"{spec.source} is written by the model"
    return None


def _stored(node: object) -> object:
    """What a matrix is the transpose of, or itself."""
    if isinstance(node, fx.Node) and is_call(node, aten.permute.default) and node.args[1] == [1, 0]:
        return node.args[0]
    return node


def least(program: Program, node: object) -> float:
    """The smallest entry of a small parameter or buffer when the program was captured, NaN when that is not known.

    A rewrite that relies on it must derive a weight whose recipe asserts it again: the user may load other values.
    Rules may ask for the sign only: layers that were left out (`regions`) must agree in it with the one that was asked.
    """
    if not isinstance(node, fx.Node) or why_not_weight(program, node) is not None:
        return math.nan
    known: dict[str, float] = program.facts.get(LEAST, {})
    program.facts[LEAST_READ] = program.facts.get(LEAST_READ, frozenset()) | {node.name}
    return known.get(node.name, math.nan)


def preview(editor: Editor, sources: Sequence[fx.Node], recipe: str) -> torch.Tensor:
    """The fake value that ``recipe`` gives on the fake values of ``sources``."""
    def build() -> torch.Tensor:
        entry = WeightEntry("", tuple(s.name for s in sources), recipe)
        with torch.no_grad():
            return editor.fake(lambda: entry.build([s.meta["val"] for s in sources]))

    found: torch.Tensor = editor.recalled(("recipe", recipe), list(sources), build)
    return found


def derived(
    program: Program, editor: Editor, name: str, sources: Sequence[fx.Node], recipe: str, nz: bool = False
) -> fx.Node:
    """The placeholder of the weight that ``recipe`` builds from ``sources``; one per (sources, recipe, nz).

    ``recipe`` is the text of `WeightEntry.recipe`: an expression over ``w[0]``, ``w[1]``, … and ``torch``.
    ``name`` is a wish: the placeholder gets a number behind it when the graph has that name already.
    Raises `WeightSourceError` when a source is not constant over the steps.
    """
    for source in sources:
        reason = why_not_weight(program, source)
        if reason is not None:
            raise WeightSourceError(
                f"derived weight {name} = {recipe}: source at {where(source)} must be a parameter or buffer that the "
                f"model does not write; {reason}. Leave the operation as it is or make the value a parameter."
            )
    wanted = preview(editor, sources, recipe)
    for i, source in enumerate(sources):
        if _stored(source) is not source:
            recipe = recipe.replace(f"w[{i}]", f"w[{i}].t()")
    names = tuple(cast(fx.Node, _stored(source)).name for source in sources)
    for entry in program.weights:
        if (entry.sources, entry.recipe, entry.nz) == (names, recipe, nz):
            return editor.input(entry.name)
    node = editor.placeholder(name, wanted)
    program.weights.append(WeightEntry(node.name, names, recipe, nz))
    return node
