"""Plan files: what they look like, that they are read back, and what is said of mistakes."""

from __future__ import annotations

import pytest

from cannopy.stream_scheduler.plan import (
    Decision,
    Pin,
    Pins,
    Placement,
    Plan,
    PlanError,
    PlannedPrefetch,
    SuperKernelRegion,
    Wait,
    serial_plan,
    to_schedule,
)
from cannopy.stream_scheduler.plan.text import from_yaml, to_yaml
from cannopy.stream_scheduler.simulator import Schedule
from tests.scheduler.graphs import CUBE, VECTOR, task

TEXT = """\
target: atlas-a3
predicted_us: 80.000
serial_us: 90.500
super_kernels: {everything: stream-fusion=1}
layers:
- layers: g1
  kernels:
  - embed
  prefetch:
  - {before: next/up, bytes: 1048576, after: embed}
- layers: 0-2
  kernels:
  - norm#1: {super_kernel: sk0}
  - up: {super_kernel: sk0}
  - down: {stream: side1, cores: c8v16, wait: [norm#1, previous/x]}
  - norm#2
  - x: {wait: [up]}
  super_kernels: {sk0: strict-scope-check=bypass}
- layers: g2
  kernels:
  - head: {super_kernel: everything}
pins:
  features: {prefetch: forbid}
  kernels:
  - {layers: 1-2, kernel: up, stream: main, cores: whole}
decisions:
- {feature: streams, where: layers 0-2, applied: true, gain_us: 10.5, worst_gain_us: 3.0, reason: wins}
- {feature: prefetch, where: g1, applied: false, reason: 'no gain: none'}
"""


@pytest.fixture
def graph() -> Schedule:
    tasks = [task("embedding_1", "embedding", VECTOR, 1, layer=None)]
    tasks[0] = type(tasks[0])(**{**tasks[0].__dict__, "label": "embed"})
    for n in range(3):
        last = tasks[-1].name
        tasks += [task(f"{n}.norm", "add_rms_norm", VECTOR, 1, last, layer=n),
                  task(f"{n}.up", "bf16_matmul", CUBE, 1, f"{n}.norm", mib=8, layer=n),
                  task(f"{n}.a.norm", "add_rms_norm", VECTOR, 1, f"{n}.up", layer=n),
                  task(f"{n}.down", "bf16_matmul", CUBE, 1, f"{n}.norm", mib=8, layer=n),
                  task(f"{n}.x", "elementwise", VECTOR, 1, f"{n}.a.norm", f"{n}.down", layer=n)]
    return Schedule((*tasks, task("head", "bf16_matmul", CUBE, 1, "2.x", mib=8, layer=None)), graphs=0)


def test_from_text_and_back(graph: Schedule) -> None:
    text = TEXT.replace(", previous/x", "")
    plan = from_yaml(text, graph)
    assert plan.by_node["1.down"] == Placement("1.down", "side1", (8, 16), None)
    regions = [plan.by_node[name].super_kernel for name in ("2.norm", "2.up", "1.up")]
    assert regions[0] == regions[1] != regions[2]
    assert plan.waits[:2] == (Wait("0.down", "0.norm"), Wait("0.x", "0.up"))
    assert plan.prefetches == (PlannedPrefetch("w_0.up", 1 << 20, "embedding_1", "0.up", "main"),)
    assert plan.regions[-1] == SuperKernelRegion("everything", "stream-fusion=1")
    assert len(plan.regions) == 4
    assert plan.pins == Pins({"prefetch": "forbid"}, tuple(
        Pin(f"{n}.up", stream="main", cores="whole") for n in (1, 2)))
    assert plan.decisions[0] == Decision("streams", "layers 0-2", True, "wins", 10.5, 3.0)
    assert (plan.predicted_us, plan.serial_us, plan.lower_bound_us) == (80.0, 90.5, None)
    assert to_yaml(plan, graph) == text
    order = [t.name for t in to_schedule(plan, graph).tasks if t.layer == 1]
    assert order == ["1.norm", "1.up", "1.down", "1.a.norm", "1.x"]


def test_around_a_layer(graph: Schedule) -> None:
    """A wait on the layer before, on any other layer by its name, and nothing before the first."""
    first = "- layers: 0\n  kernels: [norm#1, up, norm#2, down, x]\n- layers: g2"
    blocks = TEXT.replace("0-2", "1-2").replace("- layers: g2", first).replace("[up]", "[g1/embed]")
    plan = from_yaml(blocks, graph)
    assert Wait("2.down", "1.x") in plan.waits
    assert Wait("2.x", "embedding_1") in plan.waits
    with pytest.raises(PlanError, match="unknown kernel of layer g1 'x'"):
        from_yaml(TEXT, graph)


def test_pins_alone_are_no_plan(graph: Schedule) -> None:
    plan = from_yaml("target: atlas-a3\npins: {features: {streams: force}}\n", graph)
    assert not plan.complete
    assert plan.pins.switch("streams") == "force"
    assert plan.pins.switch("prefetch") == "auto"
    assert from_yaml(to_yaml(plan, graph), graph) == plan


@pytest.mark.parametrize(("old", "new", "words"), [
    ("target:", "taget:", "plan: unknown key 'taget'; did you mean 'target'?"),
    ("  kernels:\n  - embed", "  kernel:\n  - embed", "block 1: unknown key 'kernel'; did you mean 'kernels'?"),
    ("- up: {", "- upp: {", r"block 2 \(layers 0-2\): unknown kernel of layer 0 'upp'; did you mean 'up'?"),
    ("layers: 0-2\n", "layers: 0-3\n", "unknown layer '3'; did you mean"),
    ("layers: 0-2\n", "layers: 0-2, 1\n", "each once"),
    ("layers: g2\n  kernels:\n  - head: {super_kernel: everything}", "layers: g1\n  kernels: []",
     "has a block already"),
    ("cores: c8v16", "cores: 8", "expected cube and vector cores as in c16v32, found 8"),
    ("stream: side1", "steam: side1", "down: unknown key 'steam'; did you mean 'stream'?"),
    ("norm#1: {super_kernel: sk0}", "norm#1: {super_kernel: sk1}", "unknown SuperKernel region 'sk1'; did you mean"),
    ("bytes: 1048576", "bytes: 1.5", "expected a whole number above 0, found 1.5"),
    ("before: next/up", "before: next/norm#1", "has 0 weights, found number 0"),
    ("before: next/up", "before: previous/up", "there is nothing previous of g1"),
    ("  - norm#2\n", "", "layer 0 has no 'norm#2', and 2 more are missing"),
    ("prefetch: forbid", "prefetch: never", "unknown switch of prefetch 'never'"),
    ("cores: whole", "prefetch: 1", "expected true or false, found 1"),
    ("target: atlas-a3", "target: [", "no YAML"),
    ("layers: 0-2\n", "layers: 0-\u00b2\n", "unknown layer '0-\u00b2'"),
    ("layers: 0-2\n", "layers: 2001-99-99\n", "line 11: no YAML: '2001-99-99' is no timestamp"),
    ("layers: 0-2\n", f"layers: {'9' * 5000}\n", "is no int"),
    ("cores: c8v16", f"cores: c{'9' * 5000}v1", "expected cube and vector cores"),
    ("predicted_us: 80.000", "predicted_us: .nan", "expected a number, found nan"),
    ("predicted_us: 80.000", f"predicted_us: {'9' * 400}", "expected a number"),
    ("predicted_us: 80.000", "predicted_us: !!bool maybe", "'maybe' is no bool"),
    ("predicted_us: 80.000", "? !!set {a}\n: 1", "expected a name"),
    ("pins:", "decisions: " + "[" * 2000 + "]" * 2000 + "\npins:", "lists or mappings in one another"),
    ("stream: side1", r'stream: "\ud800"', "expected letters, digits"),
    ("stream: side1", "stream: ' main'", "expected letters, digits, '.', '-' and '_', found ' main'"),
    ("{everything: stream-fusion=1}", "{everything: stream-fusion=1, '': x}", "expected a name, found ''"),
    ("applied: true", "applied: 'no'", "decision 1, applied: expected true or false, found 'no'"),
])
def test_mistakes_are_named(graph: Schedule, old: str, new: str, words: str) -> None:
    text = TEXT.replace(", previous/x", "")
    assert old in text
    with pytest.raises(PlanError, match=words):
        from_yaml(text.replace(old, new), graph)


def test_runs_of_one_layer_that_are_many() -> None:
    """``7.10`` is the tenth run of layer 7; YAML reads it as the number 7.1."""
    tasks = [task(f"{n}.x", "elementwise", VECTOR, 1, layer=7 + n % 2) for n in range(40)]
    graph = Schedule(tuple(tasks), graphs=0)
    plan = Plan("atlas-a3", tuple(Placement(t.name, "side1" if n == 18 else "main") for n, t in enumerate(tasks)))
    text = to_yaml(plan, graph)
    assert "- layers: '7.10'\n" in text
    assert from_yaml(text, graph) == plan


def test_plans_that_do_not_fit_their_graph(graph: Schedule) -> None:
    plan = serial_plan(graph, "atlas-a3")
    for wrong, words in (
        (Plan("atlas-a3", (*plan.placements, Placement("0.up"))), "placed twice"),
        (Plan("atlas-a3", plan.placements[:-1]), "does not place 1 of 17 kernels"),
        (Plan("atlas-a3", (Placement("0.upp"), *plan.placements[1:])), "did you mean '0.up'"),
        (Plan("atlas-a3", plan.placements, (Wait("0.up", "nobody"),)), "unknown kernel 'nobody'"),
        (Plan("atlas-a3", plan.placements, (), (PlannedPrefetch("w", 1, "0.norm", "0.up"),)), "unknown weight of 0.up"),
    ):
        with pytest.raises(PlanError, match=words):
            to_schedule(wrong, graph)
