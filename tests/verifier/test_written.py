"""A plan in its graph and in the lowered graph: what is written is what was planned, and every difference is seen."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator
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
    monkeypatch.setattr(importlib.import_module("cannopy.stream_scheduler.emission.carriers"), "SMALL_BYTES", 0)
    with pytest.raises(PlanError, match="cannot be made to wait"):
        write(program, dataclasses.replace(plan, waits=(Wait(plan.placements[3].node, first),)))
    _, _, program = written.lowered()
    large = dataclasses.replace(plan.prefetches[0], bytes=1 << 30)
    with pytest.raises(PlanError, match="expected 1 to 8192"):
        write(program, dataclasses.replace(plan, prefetches=(large,)))
    program, plan = made()
    with pytest.raises(PlanError, match="already"):
        write(program, plan)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The lowered graph of `ready`, for which call each of its ops was made, and results with and without the plan."""

    graph: Any
    program: Program
    plan: Plan
    made: dict[str, str]
    plain: torch.Tensor
    planned: torch.Tensor

    def wrong(self, graph: Any | None = None, made: dict[str, str] | None = None) -> list[str]:
        return plan_check.check(graph or self.graph, self.program, self.plan, made or self.made)


@pytest.fixture(scope="module")
def compiled(ready: tuple[Program, Plan]) -> Lowered:
    results, seen = [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_check, "check", lambda graph, program, plan, made: seen.update(graph=graph, made=made) or [])
        for program in (written.lowered()[2], ready[0]):
            model, x, _ = written.lowered()
            options = api.build_options(pipeline.plan(written.OPTIONS))
            found = backend.lookup(model, "forward", (x,), {}, options, outputs.builder)
            with found:
                model_of = backend.build(program, model, "forward", (x,), {}, options, found, {}, outputs.builder)
                results.append(torch.cat([model_of(x), model.seen]))
    graph = getattr(seen["graph"], "_proto", seen["graph"])
    return Lowered(graph, ready[0], ready[1], seen["made"], *results)


def test_the_lowered_graph_carries_the_plan_and_computes_the_same(compiled: Lowered) -> None:
    assert compiled.wrong() == []
    assert torch.equal(compiled.plain, compiled.planned)
    inputs = {op.name for op in compiled.graph.op if op.type in ("Data", "NetOutput")}
    assert {op.name for op in compiled.graph.op} - set(compiled.made) == inputs  # nothing else has no origin


def put(op: Any, attributes: dict[str, str]) -> None:
    """Give ``op`` exactly these attributes of a plan."""
    for key in (*plan_check.TEXTS, marks.INNER_PARALLEL):
        op.attr.pop(key, None)
    for key, value in attributes.items():
        if key == marks.INNER_PARALLEL:
            op.attr[key].b = value == "True"
        else:
            op.attr[key].s = value.encode()


def change_inputs(op: Any, change: Callable[[str], str | None]) -> None:
    kept = [new for old in op.input if (new := change(old)) is not None]
    del op.input[:]
    op.input.extend(kept)


def attribute_changes(graph: Any) -> Iterator[tuple[str, Any]]:
    """Each attribute of each op dropped, changed, or moved to its neighbour; each op without any given some."""
    for i, op in enumerate(graph.op):
        have = plan_check.attributes(op)
        for key in have:
            for name, more in (("dropped", {}), ("changed", {key: "True" if key == marks.INNER_PARALLEL else "7"})):
                other = copy.deepcopy(graph)
                put(other.op[i], {k: v for k, v in have.items() if k != key} | more)
                yield f"{key} of {op.name} {name}", other
        if not have:
            for extra in ({marks.STREAM: "side"}, {marks.CUBE: "8", marks.VECTOR: "16"}, {marks.SUPER_KERNEL: "sk"}):
                other = copy.deepcopy(graph)
                put(other.op[i], extra)
                yield f"{op.name} given {list(extra)}", other
        after = plan_check.attributes(graph.op[i + 1]) if i + 1 < len(graph.op) else have
        if after != have:
            other = copy.deepcopy(graph)
            put(other.op[i], after)
            put(other.op[i + 1], have)
            yield f"{op.name} exchanged with the next one", other


def edge_changes(graph: Any) -> Iterator[tuple[str, Any]]:
    """Each control edge of a wait or a prefetch dropped or turned to each other op; waits that nothing reads;
    prefetches of another input, of another size, left out, or twice; control edges where there are none."""
    data = [op.name for op in graph.op if op.type == "Data"]
    for i, op in enumerate(graph.op):
        control = [edge for edge in op.input if edge.endswith(":-1")]
        if op.type in ("Identity", "Cmo"):
            for edge in control:
                other = copy.deepcopy(graph)
                change_inputs(other.op[i], lambda e, edge=edge: None if e == edge else e)
                yield f"{op.name} without {edge}", other
            for new in (n.name for n in graph.op if f"{n.name}:-1" not in control and n.name != op.name):
                other = copy.deepcopy(graph)
                change_inputs(other.op[i], lambda e, new=new: f"{new}:-1" if e.endswith(":-1") else e)
                yield f"{op.name} follows {new}", other
        elif op.type not in ("Data", "NetOutput"):
            other = copy.deepcopy(graph)
            other.op[i].input.append(f"{graph.op[0].name}:-1")
            yield f"{op.name} waits", other
        if op.type == "Identity":
            other = copy.deepcopy(graph)
            for one in other.op:
                change_inputs(one, lambda e, op=op: op.input[0] if e == f"{op.name}:0" else e)
            yield f"nothing reads {op.name}", other
        if op.type == "Cmo":
            for new in (n for n in data if op.input[0] != f"{n}:0"):
                other = copy.deepcopy(graph)
                other.op[i].input[0] = f"{new}:0"
                yield f"{op.name} fetches {new}", other
            other = copy.deepcopy(graph)
            other.op[i].attr["max_size"].i += 1
            yield f"{op.name} is larger", other
            other = copy.deepcopy(graph)
            del other.op[i]
            yield f"{op.name} is left out", other
            other = copy.deepcopy(graph)
            other.op.add().CopyFrom(op)
            yield f"{op.name} is there twice", other


def test_every_difference_of_the_lowered_graph_is_seen(compiled: Lowered) -> None:
    changed = [*attribute_changes(compiled.graph), *edge_changes(compiled.graph)]
    assert [name for name, other in changed if not compiled.wrong(other)] == []
    assert len(changed) >= 150


def test_ops_of_a_planned_kernel_are_looked_for(compiled: Lowered) -> None:
    """A kernel of which nothing is left, an op that is of another kernel or of none."""
    kernels = [p.node for p in compiled.plan.placements if p.cores is not None]
    for kernel in kernels:
        less = {op: call for op, call in compiled.made.items() if call != kernel}
        other = copy.deepcopy(compiled.graph)
        for i in reversed(range(len(other.op))):
            if compiled.made.get(other.op[i].name) == kernel:
                del other.op[i]
        assert any(f"no op of kernel {kernel}" in line for line in compiled.wrong(other))
        assert compiled.wrong(made=less), kernel
