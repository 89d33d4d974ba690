"""Each way to break a program is found by the check that is meant for it."""

from __future__ import annotations

import pytest
import torch

from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.program import OutputSpec, WeightEntry
from cannopy.fx_passes.verifier import NEW_MUTATIONS, Verifier, VerifyError
from tests.passes.graphs import built

X, Y = torch.randn(3, 4), torch.randn(3, 4)


def example():
    """neg(x), sum(y); x becomes x + y."""
    return built(
        lambda c, x, y: (c(aten.neg.default, x), c(aten.sum.default, y), c(aten.add.Tensor, x, y)), X, Y, mutated=[0]
    )


def nodes(program):
    return {n.name: n for n in program.gm.graph.nodes}


def first_last(p):
    n = nodes(p)
    n["copy__default"].append(n["neg_default"])
    n["neg_default"].append(n["add_tensor"])


def no_value(p):
    del nodes(p)["neg_default"].meta["val"]


def false_shape(p):
    n = nodes(p)["neg_default"]
    n.meta["val"] = n.meta["val"].reshape(12)


def other_argument(p):
    """The call changes and keeps the value of what it was."""
    nodes(p)["neg_default"].args = (nodes(p)["sum_default"],)
    nodes(p)["sum_default"].append(nodes(p)["neg_default"])


def illegal_call(p):
    nodes(p)["add_tensor"].args = (nodes(p)["x0"], "text")


def lost_mutation(p):
    p.gm.graph.erase_node(nodes(p)["copy__default"])


def _copy(p, target, value):
    output = next(iter(reversed(p.gm.graph.nodes)))
    with p.gm.graph.inserting_before(output):
        node = p.gm.graph.call_function(aten.copy_.default, (nodes(p)[target], nodes(p)[value]))
    node.meta.update(val=nodes(p)[target].meta["val"], source="model.py:9")


def second_copy(p):
    _copy(p, "x0", "neg_default")


def new_mutation(p):
    _copy(p, "x1", "neg_default")


def copy_of_another_shape(p):
    nodes(p)["copy__default"].args = (nodes(p)["x0"], nodes(p)["sum_default"])


def copy_onto_a_value(p):
    nodes(p)["copy__default"].args = (nodes(p)["neg_default"], nodes(p)["add_tensor"])


def in_place_call(p):
    n = nodes(p)["neg_default"]
    n.target = aten.neg_.default


def call_after_copy(p):
    nodes(p)["copy__default"].append(nodes(p)["sum_default"])


def old_value_as_result(p):
    output = next(iter(reversed(p.gm.graph.nodes)))
    output.args = ((nodes(p)["x0"], output.args[0][1]),)


def view_of_old_value_as_result(p):
    output = next(iter(reversed(p.gm.graph.nodes)))
    with p.gm.graph.inserting_after(nodes(p)["neg_default"]):
        view = p.gm.graph.call_function(aten.permute.default, (nodes(p)["x0"], [0, 1]))
    view.meta.update(val=nodes(p)["x0"].meta["val"], source="model.py:9")
    output.args = ((view, output.args[0][1]),)


def fewer_results(p):
    output = next(iter(reversed(p.gm.graph.nodes)))
    output.args = (output.args[0][:1],)


def no_source(p):
    del nodes(p)["neg_default"].meta["source"]


def unbound_input(p):
    p.inputs.pop()


def unknown_weight(p):
    p.weights.append(WeightEntry("w", ("x1",), "w[0] * 2"))


def input_of_another_shape(p):
    n = nodes(p)["x1"]
    n.meta["val"] = n.meta["val"].reshape(12)


def other_output_tree(p):
    p.output = OutputSpec("a list", p.output.leaves)


def call_of_a_method(p):
    output = next(iter(reversed(p.gm.graph.nodes)))
    with p.gm.graph.inserting_before(output):
        node = p.gm.graph.call_method("neg", (nodes(p)["x1"],))
    node.meta.update(val=nodes(p)["x1"].meta["val"], source="model.py:9")


def missing_attribute(p):
    with p.gm.graph.inserting_before(nodes(p)["neg_default"]):
        p.gm.graph.create_node("get_attr", "absent").meta["val"] = None


def two_of_one_name(p):
    nodes(p)["neg_default"].name = "add_tensor"


def forgotten_user(p):
    nodes(p)["x1"].users.pop(nodes(p)["add_tensor"])


def value_changed_in_place(p):
    nodes(p)["sum_default"].meta["val"].unsqueeze_(0)


BREAKS = {
    other_output_tree: "results",
    call_of_a_method: "topological order",
    missing_attribute: "topological order",
    two_of_one_name: "single definition",
    forgotten_user: "topological order",
    value_changed_in_place: "metadata",
    first_last: "topological order",
    no_value: "metadata",
    false_shape: "metadata",
    other_argument: "metadata",
    illegal_call: "metadata",
    lost_mutation: "mutations",
    second_copy: "single definition",
    new_mutation: "mutations",
    copy_of_another_shape: "trailing copies",
    copy_onto_a_value: "functional graph",
    in_place_call: "functional graph",
    call_after_copy: "trailing copies",
    old_value_as_result: "old value of a mutated input",
    view_of_old_value_as_result: "old value of a mutated input",
    fewer_results: "results",
    no_source: "provenance",
    unbound_input: "inputs",
    unknown_weight: "inputs",
    input_of_another_shape: "inputs",
}


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seen", [True, False])
def test_finds(break_it, seen):
    program = example()
    verifier = Verifier(program)
    if seen:
        verifier.verify(program)
    break_it(program)
    with pytest.raises(VerifyError) as e:
        verifier.verify(program)
    assert e.value.check == BREAKS[break_it]
    assert e.value.expected
    assert e.value.found


def test_a_declared_mutation_is_allowed():
    program = example()
    verifier = Verifier(program)
    new_mutation(program)
    program.facts[NEW_MUTATIONS] = {"x1"}
    verifier.verify(program)


def test_unchanged_nodes_are_not_run_again():
    program = example()
    verifier = Verifier(program)
    verifier.verify(program)
    calls = []
    node = nodes(program)["sum_default"]
    real = node.target

    class Spy:
        __name__ = "spy"

        def __call__(self, *args):
            calls.append(1)
            return real(*args)

    node.target = Spy()
    verifier.verify(program)
    verifier.verify(program)
    assert len(calls) == 1


def scope(p, mark, behind):
    with p.gm.graph.inserting_after(nodes(p)[behind]):
        args = (["_user_stream_label"], ["side"]) if mark == "scope_enter" else ()
        node = p.gm.graph.call_function(getattr(torch.ops.air, mark).default, args)
    node.meta.update(val=None, source="model.py:9")


@pytest.mark.parametrize("marks", [
    [("scope_enter", "x1")],
    [("scope_exit", "neg_default")],
    [("scope_exit", "x1"), ("scope_enter", "neg_default")],
    [("scope_enter", "neg_default"), ("scope_exit", "neg_default"), ("scope_exit", "sum_default")],
])
def test_scopes_must_balance(npu, marks):
    program = example()
    verifier = Verifier(program)
    for mark, behind in marks[::-1]:
        scope(program, mark, behind)
    with pytest.raises(VerifyError) as e:
        verifier.verify(program)
    assert e.value.check == "balanced scopes"


def test_balanced_scopes_are_allowed(npu):
    program = example()
    verifier = Verifier(program)
    scope(program, "scope_exit", "sum_default")
    scope(program, "scope_enter", "x1")
    verifier.verify(program)
