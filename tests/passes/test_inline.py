"""A node becomes the operations of a reference, with its values, shapes and source line."""

from __future__ import annotations

import pytest
import torch

from cannopy.fx_passes.graph import Editor, aten
from cannopy.fx_passes.inline import InlineError, inline
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import built, run, same

X, Y = torch.randn(3, 4), torch.randn(3, 4)


def example():
    return built(lambda c, x, y: c(aten.neg.default, c(aten.sub.Tensor, x, y, alpha=2)), X, Y)


def the_sub(program):
    return program.gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)[0]


def test_arguments_keep_their_places():
    program = example()
    node, verifier = the_sub(program), Verifier(program)
    line = node.meta["source"]
    inline(Editor(program.gm), node, lambda x, y, alpha: torch.softmax(x.to(torch.float64), -1).to(x.dtype) - y * alpha)
    program.gm.graph.eliminate_dead_code()
    verifier.verify(program)
    assert same(run(program, X, Y)[0], [-(torch.softmax(X.double(), -1).float() - Y * 2)])
    new = [n for n in program.gm.graph.nodes if n.op == "call_function" and n.target is not aten.neg.default]
    assert len(new) > 3
    assert {n.meta["source"] for n in new} == {line}


def test_one_input_used_twice():
    program = built(lambda c, x: c(aten.sub.Tensor, x, x), X)
    inline(Editor(program.gm), the_sub(program), lambda x, y: x * 3 - y)
    assert same(run(program, X)[0], [X * 3 - X])


def test_inputs_that_share_one_fake_value_stay_apart():
    program = built(lambda c, x, y: c(aten.sub.Tensor, c(aten.neg.default, x), c(aten.exp.default, y)), X, Y)
    node = the_sub(program)
    node.args[1].meta["val"] = node.args[0].meta["val"]
    inline(Editor(program.gm), node, lambda x, y: x * 3 - y)
    assert same(run(program, X, Y)[0], [-X * 3 - Y.exp()])


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, y, alpha: (x - y).sum(), r"expected torch.float32\[3, 4\], its reference gives torch.float32\[\]"),
        (lambda x, y, alpha: (x - y).double(), "float64"),
        (lambda x, y, alpha: 3, "expected one tensor"),
    ],
)
def test_refuses_another_result(fn, reason):
    program = example()
    with pytest.raises(InlineError, match=reason):
        inline(Editor(program.gm), the_sub(program), fn)
