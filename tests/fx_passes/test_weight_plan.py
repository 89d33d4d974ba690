"""Derived weights: built from constant sources only, once per recipe."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.weight_plan import WeightSourceError, derived, preview, why_not_weight
from tests.passes.graphs import program_of


def program(kind: str = "parameter", mutated: bool = False) -> tuple[Program, Editor]:
    """x · w with the given binding of w."""
    p = program_of(lambda x, w: x @ w, torch.zeros(2, 3), torch.zeros(3, 4))
    p.inputs[1] = dataclasses.replace(p.inputs[1], kind=kind, mutated=mutated, source="self.w")  # type: ignore[arg-type]
    return p, Editor(p.gm)


def nodes(p: Program) -> list[torch.fx.Node]:
    return list(p.gm.graph.nodes)


def test_new_placeholder_carries_the_value_of_the_recipe() -> None:
    p, editor = program()
    w = nodes(p)[1]
    node = derived(p, editor, "w_t", [w], "w[0].t()", nz=True)
    assert node.op == "placeholder"
    assert tuple(node.meta["val"].shape) == (4, 3)
    assert node.meta["val"].is_contiguous()
    assert node.prev is w
    (entry,) = p.weights
    assert (entry.name, entry.sources, entry.recipe, entry.nz) == (node.name, (w.name,), "w[0].t()", True)
    assert torch.equal(entry.build([torch.arange(12.0).view(3, 4)]), torch.arange(12.0).view(3, 4).t())


def test_same_recipe_on_same_sources_is_one_weight() -> None:
    p, editor = program()
    w = nodes(p)[1]
    first = derived(p, editor, "a", [w], "w[0].t()")
    assert derived(p, editor, "b", [w], "w[0].t()") is first
    assert derived(p, editor, "a", [w], "w[0].t()", nz=True) is not first
    assert derived(p, editor, "a", [w], "w[0] * 2") is not first
    assert len({entry.name for entry in p.weights}) == len(p.weights) == 3


def test_a_derived_weight_is_a_source() -> None:
    p, editor = program()
    first = derived(p, editor, "a", [nodes(p)[1]], "w[0].t()")
    second = derived(p, editor, "b", [first], "torch.cat((w[0], w[0]))")
    assert tuple(second.meta["val"].shape) == (8, 3)
    assert [e.sources for e in p.weights][1] == (first.name,)


@pytest.mark.parametrize(
    ("kind", "mutated", "reason"),
    [("argument", False, "self.w is a model argument"), ("state", False, "self.w is a model state"),
     ("buffer", True, "self.w is written by the model")],
)
def test_refuses_what_is_not_constant(kind: str, mutated: bool, reason: str) -> None:
    p, editor = program(kind, mutated)
    w = nodes(p)[1]
    assert reason in str(why_not_weight(p, w))
    with pytest.raises(WeightSourceError, match=reason):
        derived(p, editor, "a", [w], "w[0].t()")
    assert p.weights == []


def test_refuses_computed_values_and_strangers() -> None:
    p, editor = program()
    matmul = next(n for n in nodes(p) if n.op == "call_function")
    with pytest.raises(WeightSourceError, match="is computed in every step"):
        derived(p, editor, "a", [matmul], "w[0].t()")
    stranger = editor.placeholder("stranger", torch.zeros(1))
    assert "bound to nothing" in str(why_not_weight(p, stranger))


def test_preview_adds_nothing() -> None:
    p, editor = program()
    before = len(nodes(p))
    assert tuple(preview(editor, [nodes(p)[1]], "w[0][:, :2]").shape) == (3, 2)
    assert len(nodes(p)) == before
    assert p.weights == []


def test_a_weight_that_is_stored_transposed_is_a_source() -> None:
    stored = torch.randn(3, 5)
    p = program_of(lambda w: -w.permute(1, 0), stored)
    p.inputs[0] = dataclasses.replace(p.inputs[0], kind="parameter")
    turned = p.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default)[0]
    assert why_not_weight(p, turned) is None
    node = derived(p, Editor(p.gm), "halved", [turned], "w[0] / 2")
    assert tuple(node.meta["val"].shape) == (5, 3)
    assert torch.equal(p.weights[0].build([stored]), stored.t() / 2)
