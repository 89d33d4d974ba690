"""What looks only at the part of a graph that changed comes to the same as what looks at all of it."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable

import pytest
import torch
from torch import fx

from cannopy import pipeline
from cannopy.fusion_rules.engine.record import Log
from cannopy.fx_passes import dump, normalise
from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.manager import Pass, PassManager
from cannopy.fx_passes.normalise import cse
from cannopy.fx_passes.normalise.worklist import once
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.snapshot import Snapshot
from cannopy.fx_passes.verifier import Verifier, VerifyError
from cannopy.options import Options
from tests.rules.support import Case, build, case, fresh, stock

CASES: dict[str, Callable[[], Case]] = {
    "decode": functools.partial(stock, 1, past=3),
    "prefill of two requests": functools.partial(stock, 4, batch=2),
    "batched experts": lambda: case(
        build(attn_implementation="eager", experts_implementation="batched_mm", first_k_dense_replace=0), 2),
}


def everything(program: Program, max_rounds: int = normalise.MAX_ROUNDS) -> int:
    """`normalise.run` in its simplest form: each step over the whole graph, again and again."""
    total = 0
    for _ in range(max_rounds):
        changes = sum(once(program, step) for step in normalise.PIPELINE) + cse.run(program)
        if not changes:
            return total
        total += changes
    raise AssertionError("no fixed point")


def after_each_pass(program: Program) -> list[str]:
    texts: list[str] = []

    def noted(step: Pass) -> Pass:
        def run(program: Program) -> int:
            changes = step.run(program)
            texts.append(f"{step.name} {changes}\n{dump.text(program)}")
            return changes

        return Pass(step.name, run, step.requires, step.ensures)

    passes = pipeline.passes(pipeline.plan(Options()), Log())
    PassManager([noted(step) for step in passes]).run(program)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_normalising_what_changed_gives_the_graph_of_normalising_everything(name, npu, monkeypatch):
    found = CASES[name]()
    one, other = fresh(found), fresh(found)
    changed = after_each_pass(one)
    monkeypatch.setattr(normalise, "run", everything)
    whole = after_each_pass(other)
    assert len(changed) == len(whole) > 10
    for a, b in zip(changed, whole, strict=True):
        assert a == b


def test_an_edit_without_editor_is_seen_by_normalisation():
    program = fresh(stock(1, past=3))
    assert normalise.run(program) >= 0
    assert normalise.run(program) == 0
    node = next(n for n in program.gm.graph.nodes if is_call(n, aten.reshape.default))
    node.target = aten.view.default
    assert normalise.run(program) > 0
    assert not program.gm.graph.find_nodes(op="call_function", target=aten.view.default)


def calls(program: Program) -> list[fx.Node]:
    return [n for n in program.gm.graph.nodes if n.op == "call_function"]


def other_operand(p: Program, pick: random.Random) -> None:
    node = pick.choice([n for n in calls(p) if n.all_input_nodes])
    before = list(p.gm.graph.nodes)
    node.replace_input_with(pick.choice(node.all_input_nodes), pick.choice(before[:before.index(node)]))


def later_operand(p: Program, pick: random.Random) -> None:
    node = pick.choice([n for n in calls(p) if n.all_input_nodes][:-40])
    node.replace_input_with(node.all_input_nodes[0], pick.choice(calls(p)[-30:]))


def other_constant(p: Program, pick: random.Random) -> None:
    node = pick.choice([n for n in calls(p) if any(type(a) is int for a in n.args)])
    node.args = tuple(a + 1 if type(a) is int else a for a in node.args)


def other_operator(p: Program, pick: random.Random) -> None:
    node = pick.choice(calls(p))
    node.target = pick.choice([aten.neg.default, aten.sum.default, aten.neg_.default, operator.getitem])


def other_value(p: Program, pick: random.Random) -> None:
    node = pick.choice([n for n in calls(p) if isinstance(n.meta["val"], torch.Tensor)])
    value = node.meta["val"]
    node.meta["val"] = pick.choice([value.unsqueeze(0), value.to(torch.float16), value.clone(), value.reshape(-1)])


def value_in_place(p: Program, pick: random.Random) -> None:
    node = pick.choice([n for n in calls(p) if isinstance(n.meta["val"], torch.Tensor)])
    node.meta["val"] = node.meta["val"].clone()
    PREPARED.append(lambda: node.meta["val"].unsqueeze_(0))


def lost_metadata(p: Program, pick: random.Random) -> None:
    del pick.choice(calls(p)).meta[pick.choice(["val", "source"])]


def same_name(p: Program, pick: random.Random) -> None:
    one, other = pick.sample(calls(p), 2)
    one.name = other.name


def moved(p: Program, pick: random.Random) -> None:
    one, other = pick.sample(calls(p), 2)
    other.append(one)


def lost_write(p: Program, pick: random.Random) -> None:
    copies = p.gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    p.gm.graph.erase_node(pick.choice(copies))


def early_write(p: Program, pick: random.Random) -> None:
    copies = p.gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    pick.choice(calls(p)[:-20]).append(pick.choice(copies))


def other_result(p: Program, pick: random.Random) -> None:
    output = p.gm.graph.output_node()
    output.args = ((pick.choice(calls(p)),),)


def other_input(p: Program, pick: random.Random) -> None:
    node = pick.choice(p.gm.graph.find_nodes(op="placeholder"))
    node.meta["val"] = node.meta["val"].unsqueeze(0)


def lost_user(p: Program, pick: random.Random) -> None:
    node = pick.choice([n for n in calls(p) if n.users])
    node.users.pop(next(iter(node.users)))


PREPARED: list[Callable[[], object]] = []
"""What a corruption does after the program was verified with its new value."""

CORRUPTIONS = (other_operand, later_operand, other_constant, other_operator, other_value, value_in_place, lost_metadata,
               same_name, moved, lost_write, early_write, other_result, other_input, lost_user)


def verdict(verifier: Verifier, program: Program) -> tuple[str, ...]:
    try:
        verifier.verify(program)
    except VerifyError as e:
        return e.check, e.node.name if e.node is not None else "", e.expected, e.found
    return ("sound",)


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_a_corrupted_program_gets_the_verdict_of_a_full_verification(corrupt):
    program = fresh(stock(1, past=3))
    text = dump.text(program)
    incremental, full = Verifier(program), Verifier(program)
    found = []
    for seed in range(4):
        pick = random.Random(seed)
        assert verdict(incremental, program) == ("sound",)
        before = Snapshot(program)
        corrupt(program, pick)
        while PREPARED:
            assert verdict(incremental, program) == ("sound",)
            PREPARED.pop()()
        full.forget()
        found.append(verdict(incremental, program))
        assert found[-1] == verdict(full, program)
        assert found[-1] == verdict(incremental, program), "what was refused once is refused again"
        before.restore(program)
        assert dump.text(program) == text
    assert any(v != ("sound",) for v in found), "the corruption spoils nothing"
