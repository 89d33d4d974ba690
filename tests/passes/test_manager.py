"""Order constraints, records, rollback, dumps."""

from __future__ import annotations

import pytest
import torch

from cannopy.fx_passes import dump, normalise
from cannopy.fx_passes.graph import Editor, aten
from cannopy.fx_passes.manager import Pass, PassError, PassManager, PassOrderError
from cannopy.fx_passes.program import WeightEntry
from tests.passes.graphs import built, run, same, targets

X = torch.randn(3, 4)


def example():
    return built(
        lambda c, x: (c(aten.neg.default, c(aten.clone.default, x)), c(aten.add.Tensor, x, 1)), X, mutated=[0]
    )


def fact(*names):
    return frozenset(names)


def test_records_say_what_each_pass_did():
    program = example()
    idle = Pass("idle", lambda p: 0)
    records = PassManager([Pass("normalise", normalise.run, ensures=fact("normalised")), idle]).run(program)
    assert [(r.name, r.nodes_before, r.nodes_after, r.changes) for r in records] == [
        ("normalise", 6, 5, 1), ("idle", 5, 5, 0),
    ]
    assert all(r.seconds >= 0 for r in records)


def test_order_is_checked_before_anything_runs():
    ran = []
    late = Pass("late", lambda p: ran.append(1) or 0, requires=fact("normalised"))
    early = Pass("early", normalise.run, ensures=fact("normalised"))
    with pytest.raises(PassOrderError, match=r"late requires 'normalised'.*put early before it"):
        PassManager([late, early])
    with pytest.raises(PassOrderError, match="no pass of this pipeline ensures it"):
        PassManager([late])
    PassManager([late], given=["normalised"])
    assert PassManager([early, late]).text == "early,late"
    assert ran == []


def crash(program):
    Editor(program.gm).graph.erase_node(next(n for n in program.gm.graph.nodes if n.op == "output"))
    program.inputs.clear()
    program.weights.append(WeightEntry("w", (), "torch.ones(1)"))
    program.facts["half"] = True
    raise KeyError("lost")


def test_a_pass_that_crashes_leaves_the_program_as_it_was():
    program = example()
    before = targets(program), run(program, X), list(program.inputs)
    with pytest.raises(PassError, match="pass crash: run: expected the pass to complete, found KeyError: 'lost'") as e:
        PassManager([Pass("crash", crash)]).run(program)
    assert isinstance(e.value.__cause__, KeyError)
    assert (targets(program), program.inputs) == (before[0], before[2])
    assert (program.weights, program.facts) == ([], {})
    after = run(program, X)
    assert same(before[1][0], after[0])
    assert same(before[1][1], after[1])
    assert all("val" in n.meta for n in program.gm.graph.nodes if n.op != "output")


def lie(program):
    node = next(n for n in program.gm.graph.nodes if n.target is aten.neg.default)
    node.meta["val"] = node.meta["val"].to(torch.float16)
    return 1


def test_an_error_names_pass_check_node_and_line():
    program = example()
    with pytest.raises(PassError) as e:
        PassManager([Pass("lie", lie)]).run(program)
    error = e.value
    assert (error.pass_name, error.check, error.node, error.source) == ("lie", "metadata", "neg_default", "model.py:2")
    assert (error.expected, error.found) == ("f32[3, 4]", "f16[3, 4]")
    assert "pass lie: metadata, node neg_default (model.py:2): expected f32[3, 4], found f16[3, 4]" in str(error)


def test_without_verification_nothing_is_checked():
    PassManager([Pass("lie", lie)], verify=False).run(example())


def drop(program):
    program.gm.graph.eliminate_dead_code()
    node = next(n for n in program.gm.graph.nodes if n.target is aten.clone.default)
    node.replace_all_uses_with(node.args[0])
    program.gm.graph.erase_node(node)
    return 0


def swap(program):
    """An edit in place, without an editor, that leaves the number of nodes as it is."""
    node = next(n for n in program.gm.graph.nodes if n.target is aten.neg.default)
    node.target = aten.abs.default
    return 0


def test_a_change_must_be_reported():
    with pytest.raises(PassError, match="reports no change"):
        PassManager([Pass("swap", swap)]).run(example())
    with pytest.raises(PassError, match="reports no change"):
        PassManager([Pass("drop", drop)]).run(example())


def test_dumps_are_numbered_and_readable(tmp_path):
    program = example()
    program.gm.graph.find_nodes(op="call_function", target=aten.neg.default)[0].meta["module_path"] = "model.layers.3"
    passes = [Pass("idle", lambda p: 0), Pass("normal form", normalise.run)]
    PassManager(passes, dump_dir=tmp_path / "dumps").run(program)
    assert sorted(p.name for p in (tmp_path / "dumps").iterdir()) == [
        "000-captured.txt", "002-normal-form.diff", "002-normal-form.txt",
    ]
    changed = (tmp_path / "dumps" / "002-normal-form.diff").read_text().splitlines()
    assert changed[:2] == ["--- 000-captured.txt", "+++ 002-normal-form.txt"]
    assert [line for line in changed[2:] if line.startswith(("-", "+"))] == [
        "-%clone_default: f32[3, 4] = aten.clone.default(%x0)  # model.py:1",
        "-%neg_default: f32[3, 4] = aten.neg.default(%clone_default)  # model.py:2 model.layers.3",
        "+%neg_default: f32[3, 4] = aten.neg.default(%x0)  # model.py:2 model.layers.3",
    ]
    text = (tmp_path / "dumps" / "002-normal-form.txt").read_text()
    assert text == dump.text(program)
    assert text.splitlines() == [
        "%x0: f32[3, 4] <- state args[0] [3, 4], mutated",
        "%neg_default: f32[3, 4] = aten.neg.default(%x0)  # model.py:2 model.layers.3",
        "%add_tensor: f32[3, 4] = aten.add.Tensor(%x0, 1)  # model.py:3",
        "%copy__default: f32[3, 4] = aten.copy_.default(%x0, %add_tensor)  # model.py:4",
        "return [%neg_default]",
    ]
