"""A plan in its graph and in the lowered graph: what is written is what was planned, and every difference is seen."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from cannopy import api, pipeline
from cannopy.backend import build as backend
from cannopy.backend.ge_graph import plan_check
from cannopy.frontend import outputs
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.verifier import Verifier
from cannopy.stream_scheduler.emission import marks, scope_runs, write
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.plan.model import Plan, PlanError, Wait
from cannopy.stream_scheduler.simulator.schedule import MAIN
from cannopy.stream_scheduler.verifier import facts_of, verify_graph, verify_plan
from tests.verifier import written


def made() -> tuple[Program, Plan]:
    _, _, program = written.lowered()
    plan = written.plan(program)
    with api.target_of(written.OPTIONS):
        verifier = Verifier(program)
        assert write(program, plan) > 0
        verifier.verify(program)
    return program, plan


@pytest.fixture(scope="module")
def ready() -> tuple[Program, Plan]:
    return made()


def test_the_written_graph_says_what_the_plan_says(ready: tuple[Program, Plan]) -> None:
    program, plan = ready
    assert verify_graph(program, plan) == []
    _, _, plain = written.lowered()
    assert verify_plan(plan, written.schedule(plain), load_hardware("atlas-a3"), facts_of(plain)) == []


def test_views_stand_outside_of_stream_scopes(ready: tuple[Program, Plan]) -> None:
    for run in scope_runs(ready[0].gm.graph):
        if marks.STREAM in run.attributes or marks.CUBE in run.attributes:
            assert not any("view" in str(n.target) or "reshape" in str(n.target) for n in run.calls)


def test_a_plan_that_changes_nothing_leaves_the_graph_alone() -> None:
    _, _, program = written.lowered()
    before = [n.name for n in program.gm.graph.nodes]
    plan = written.plan(program)
    plain = tuple(dataclasses.replace(p, stream=MAIN, cores=None, super_kernel=None) for p in plan.placements)
    assert write(program, Plan("atlas-a3", plain)) == 0
    assert [n.name for n in program.gm.graph.nodes] == before


def scopes(program: Program) -> list[fx.Node]:
    return [n for n in program.gm.graph.nodes if n.target is marks.enter()]


def erase(program: Program, target: object) -> None:
    node = next(n for n in program.gm.graph.nodes if n.target is target)
    if node.users:
        node.replace_all_uses_with(node.args[0])
    program.gm.graph.erase_node(node)


def swap(program: Program) -> None:
    """The first matmul moves behind the last one."""
    matmuls = [n for n in program.gm.graph.nodes if "mm" in n.name]
    matmuls[-1].append(matmuls[0])


def set_scope(keys: list[str], values: list[str], program: Program) -> None:
    node = scopes(program)[0]
    node.args = (keys, values)


CHANGES: dict[str, tuple[str, Callable[[Program], Any]]] = {
    "a wait is dropped": ("waits", lambda p: erase(p, marks.wait())),
    "a prefetch is dropped": ("prefetch", lambda p: erase(p, marks.prefetch())),
    "a scope is not left": ("scopes", lambda p: erase(p, marks.leave())),
    "a scope is not entered": ("scopes", lambda p: erase(p, marks.enter())),
    "kernels change places": ("order of kernels", swap),
    "two kinds in one scope": ("scopes", lambda p: set_scope([marks.STREAM, marks.CUBE], ["a", "8"], p)),
    "the priority comes first": ("scopes", lambda p: set_scope([marks.PRIORITY, marks.STREAM, marks.INNER_PARALLEL],
                                                              ["0", "a", "False"], p)),
    "an unknown key": ("scopes", lambda p: set_scope(["_stream"], ["a"], p)),
    "another limit": ("attributes", lambda p: set_scope([marks.CUBE, marks.VECTOR], ["1", "2"], p)),
    "a prefetch of another size": ("prefetch", lambda p: resize(p, 1)),
    "a wait for something else": ("waits", lambda p: rewire(p)),
}


def resize(program: Program, size: int) -> None:
    node = next(n for n in program.gm.graph.nodes if n.target is marks.prefetch())
    node.args = (node.args[0], node.args[1], size)


def rewire(program: Program) -> None:
    node = next(n for n in program.gm.graph.nodes if n.target is marks.wait())
    node.args = (node.args[0], node.args[0])


@pytest.mark.parametrize("name", CHANGES)
def test_every_difference_of_the_graph_is_seen(name: str) -> None:
    check, change = CHANGES[name]
    program, plan = made()
    change(program)
    assert check in written.names_of(verify_graph(program, plan))


def test_plans_that_cannot_be_written_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, program = written.lowered()
    plan = written.plan(program)
    first = plan.placements[0].node
    with pytest.raises(PlanError, match="is placed before"):
        write(program, dataclasses.replace(plan, placements=plan.placements[::-1]))
    _, _, program = written.lowered()
    monkeypatch.setattr(importlib.import_module("cannopy.stream_scheduler.emission.write"), "SMALL_BYTES", 0)
    with pytest.raises(PlanError, match="cannot be made to wait"):
        write(program, dataclasses.replace(plan, waits=(Wait(plan.placements[3].node, first),)))
    _, _, program = written.lowered()
    large = dataclasses.replace(plan.prefetches[0], bytes=1 << 30)
    with pytest.raises(PlanError, match="expected 1 to 8192"):
        write(program, dataclasses.replace(plan, prefetches=(large,)))
    program, plan = made()
    with pytest.raises(PlanError, match="already"):
        write(program, plan)


@pytest.fixture(scope="module")
def compiled(ready: tuple[Program, Plan]) -> tuple[Any, Program, Plan, torch.Tensor, torch.Tensor]:
    """The lowered graph with the plan, and results with and without it."""
    from cannopy.backend.host import engine

    results, graph = [], None
    for program in (written.lowered()[2], ready[0]):
        model, x, _ = written.lowered()
        options = api.build_options(pipeline.plan(written.OPTIONS))
        found = backend.lookup(model, "forward", (x,), {}, options, outputs.builder)
        with found:
            model_of = backend.build(program, model, "forward", (x,), {}, options, found, {}, outputs.builder)
            results.append(torch.cat([model_of(x), model.seen]))
        graph = engine.recorded()[-1].ge_graph
    return graph, ready[0], ready[1], results[0], results[1]


def test_the_lowered_graph_carries_the_plan_and_computes_the_same(compiled: Any) -> None:
    graph, program, plan, plain, planned = compiled
    assert plan_check.check(graph, program, plan) == []
    assert torch.equal(plain, planned)


def lowered_op(graph: Any, kind: str, having: str = "") -> Any:
    return next(op for op in graph.op if op.type == kind and (not having or having in op.attr))


def cut_control(op: Any) -> None:
    kept = [i for i in op.input if not i.endswith(":-1")]
    del op.input[:]
    op.input.extend(kept)


GE_CHANGES: dict[str, Callable[[Any], Any]] = {
    "no stream": lambda g: lowered_op(g, "MatMul", marks.STREAM).attr.pop(marks.STREAM),
    "another limit": lambda g: setattr(lowered_op(g, "MatMul", marks.CUBE).attr[marks.CUBE], "s", b"9"),
    "outside of the region": lambda g: lowered_op(g, "Tanh", marks.SUPER_KERNEL).attr.pop(marks.SUPER_KERNEL),
    "inner parallelism": lambda g: setattr(lowered_op(g, "MatMul", marks.STREAM).attr[marks.INNER_PARALLEL], "b", True),
    "an unplanned stream": lambda g: setattr(lowered_op(g, "Add").attr[marks.STREAM], "s", b"side"),
    "a wait without its edge": lambda g: cut_control(lowered_op(g, "Identity")),
    "a prefetch that follows nothing": lambda g: cut_control(lowered_op(g, "Cmo")),
    "a prefetch of another size": lambda g: setattr(lowered_op(g, "Cmo").attr["max_size"], "i", 7),
    "a prefetch more": lambda g: g.op.add().CopyFrom(lowered_op(g, "Cmo")),
}


@pytest.mark.parametrize("name", GE_CHANGES)
def test_every_difference_of_the_lowered_graph_is_seen(compiled: Any, name: str) -> None:
    graph, program, plan, *_ = compiled
    other = copy.deepcopy(getattr(graph, "_proto", graph))
    GE_CHANGES[name](other)
    assert plan_check.check(other, program, plan)
