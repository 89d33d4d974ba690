"""A cache seen through another view gives the same results and the same new contents."""

from __future__ import annotations

import pytest
import torch

from cannopy.fx_passes import rebind
from cannopy.fx_passes.graph import Editor, aten, shape
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import program_of, run, same

B, L, D = 2, 8, 4


def write_and_read(cache, index, value):
    new = torch.ops.aten.index_copy(cache, 1, index, value)
    return new.sum(1), cache + 1, new


def example():
    return torch.randn(B, L, D), torch.tensor([3]), torch.randn(B, 1, D)


def test_same_results_through_the_view():
    inputs = example()
    program = program_of(write_and_read, *inputs, mutated=[0])
    before = run(program, *inputs)
    placeholder = next(iter(program.gm.graph.nodes))
    rebind.rebind(program, Editor(program.gm), placeholder, [B * L, D])
    program.gm.graph.lint()
    assert shape(placeholder) == (B * L, D)
    assert program.inputs[0].view == (B * L, D)
    assert program.inputs[0].shape == (B, L, D)
    after = run(program, *inputs)
    assert same(before[0], after[0])
    assert same(before[1], after[1])


def test_every_node_keeps_a_true_shape():
    program = program_of(write_and_read, *example(), mutated=[0])
    editor = Editor(program.gm)
    rebind.rebind(program, editor, next(iter(program.gm.graph.nodes)), [B * L, D])
    for node in program.gm.graph.nodes:
        if node.op == "call_function" and node.target is not aten.copy_.default:
            told = node.meta["val"]
            editor.refresh(node)
            assert told.shape == node.meta["val"].shape, node
    copy = rebind.write_of(next(iter(program.gm.graph.nodes)))
    assert shape(copy) == (B * L, D) == shape(copy.args[1])


def test_a_copy_of_itself():
    x = torch.randn(4, 2)
    program = program_of(lambda x: (x + 1, x), x, mutated=[0])
    rebind.rebind(program, Editor(program.gm), next(iter(program.gm.graph.nodes)), [8])
    program.gm.graph.lint()
    outputs, inputs = run(program, x)
    assert same(outputs, [x + 1])
    assert same(inputs, [x])


def test_back_to_the_own_shape_drops_the_view():
    program = program_of(write_and_read, *example(), mutated=[0])
    rebind.rebind(program, Editor(program.gm), next(iter(program.gm.graph.nodes)), [B, L, D])
    assert program.inputs[0].view is None


def test_update_gives_copy_the_new_value_itself():
    inputs = example()
    program = program_of(write_and_read, *inputs, mutated=[0])
    before = run(program, *inputs)
    editor = Editor(program.gm)
    cache, index, value = (n for n in program.gm.graph.nodes if n.op == "placeholder")
    old = next(n for n in program.gm.graph.nodes if n.target is aten.index_copy.default)
    rebind.rebind(program, editor, cache, [B * L, D])
    with editor.before(old):
        rows = editor.call(aten.add.Tensor, index, editor.call(aten.arange.start_step, 0, B * L, L))
        new = editor.call(aten.index_put.default, cache, [rows], editor.reshape(value, [B, D]))
    rebind.update(editor, cache, old, new)
    editor.sweep()
    program.gm.graph.lint()
    assert rebind.write_of(cache).args[1] is new
    after = run(program, *inputs)
    assert same(before[0], after[0])
    assert same(before[1], after[1])


@pytest.mark.parametrize(
    ("make", "view", "reason"),
    [
        (lambda: torch.randn(B, L, D), [B * L, D + 1], "no view"),
        (lambda: torch.randn(B, D, L).mT, [B * L, D], "not contiguous"),
    ],
)
def test_refuses(make, view, reason):
    program = program_of(lambda x: (x.sum(), x + 1), make(), mutated=[0])
    with pytest.raises(rebind.RebindError, match=reason):
        rebind.rebind(program, Editor(program.gm), next(iter(program.gm.graph.nodes)), view)


def test_refuses_a_second_view():
    program = program_of(write_and_read, *example(), mutated=[0])
    editor = Editor(program.gm)
    placeholder = next(iter(program.gm.graph.nodes))
    rebind.rebind(program, editor, placeholder, [B * L, D])
    with pytest.raises(rebind.RebindError, match="already seen as"):
        rebind.rebind(program, editor, placeholder, [1, B * L, D])


def test_the_copies_stay_together_at_the_end():
    def two_caches(a, b, index, value):
        new = torch.ops.aten.index_copy(a, 1, index, value)
        return new.sum(1), torch.ops.aten.index_copy(b, 1, index, value + 1), new

    inputs = torch.randn(B, L, D), torch.randn(B, L, D), torch.tensor([3]), torch.randn(B, 1, D)

    def flipped(a, b, index, value):
        total, new_b, new_a = two_caches(a, b, index, value)
        return total, new_a, new_b

    program = program_of(flipped, *inputs, mutated=[0, 1])
    before = run(program, *inputs)
    editor = Editor(program.gm)
    for placeholder in list(program.gm.graph.find_nodes(op="placeholder"))[:2]:
        rebind.rebind(program, editor, placeholder, [B * L, D])
    Verifier(program).verify(program)
    after = run(program, *inputs)
    assert same(before[0], after[0])
    assert same(before[1], after[1])
