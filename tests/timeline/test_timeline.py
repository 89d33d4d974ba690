"""Pictures of a schedule: what they say is what the simulation gave, and the page works in a browser."""

from __future__ import annotations

import html.parser
import itertools
import json
from pathlib import Path

import pytest

from cannopy.stream_scheduler.plan.model import Decision
from cannopy.stream_scheduler.simulator import Prefetch, Schedule, Task, Weight, simulate
from cannopy.stream_scheduler.timeline import Run, critical_path, payload, perfetto, render
from cannopy.stream_scheduler.timeline.load import usage
from tests.simulator.loads import Fixed, machine
from tests.timeline import browser

CHIP = machine(gap_us=0.5, event_us=1.0, prefetch_rate=500.0)
SPLIT = ((16, 32), (8, 16))


def tasks() -> tuple[Task, ...]:
    """Two layers: a, then b and c beside the longer s on its own stream, then the join d."""
    found: list[Task] = []
    for layer in range(2):
        names = {n: f"{layer}.{n}" for n in "abcsd"}
        before = (f"{layer - 1}.d",) if layer else ()

        def add(n: str, us: float, deps: tuple[str, ...], layer: int = layer, names: dict[str, str] = names,
                **more: object) -> None:
            load = Fixed(us, more.pop("on", (24, 48)), kernel="matmul", bytes=more.pop("bytes", 0.0))  # type: ignore[arg-type]
            found.append(Task(names[n], load, deps=deps, label=n, layer=layer, **more))  # type: ignore[arg-type]

        add("a", 10.0, before)
        add("b", 5.0, (names["a"],), cores=SPLIT[0], on=SPLIT[0], super_kernel=f"sk{layer}")
        add("s", 40.0, (names["a"],), cores=SPLIT[1], on=SPLIT[1], stream="side")
        add("c", 20.0, (names["b"],), cores=SPLIT[0], on=SPLIT[0], bytes=4000.0, super_kernel=f"sk{layer}",
            weights=(Weight(f"{layer}.w", 4000.0),))
        add("d", 10.0, (names["c"], names["s"]))
    return tuple(found)


def planned() -> Run:
    schedule = Schedule(tasks(), (Prefetch("0.w", 1000.0, "0.a"), Prefetch("1.w", 1000.0, "1.a")))
    more = {"1.s": {"shapes": "bf16[8, 64] → bf16[8, 64]", "source": 'model.py:12 in forward, "<b>&"'}}
    return Run("automatic", schedule, simulate(schedule, CHIP), more)


def serial() -> Run:
    schedule = Schedule(tasks()).serial()
    return Run("serial", schedule, simulate(schedule, CHIP))


def test_critical_path_goes_through_the_longer_branch() -> None:
    assert critical_path(planned().schedule, planned().trace) == [
        f"{layer}.{name}" for layer in range(2) for name in "asd"
    ]
    assert critical_path(serial().schedule, serial().trace) == [task.name for task in tasks()]


def test_critical_path_goes_through_what_gave_the_cores_back() -> None:
    schedule = Schedule((Task("long", Fixed(30.0)), Task("short", Fixed(5.0), stream="side")))
    assert critical_path(schedule, simulate(schedule, machine())) == ["long", "short"]
    assert critical_path(Schedule(()), simulate(Schedule(()), machine())) == []


def test_usage_is_the_sum_of_what_runs() -> None:
    run = planned()
    steps = usage(run.trace)
    assert [step.start for step in steps] == sorted({step.start for step in steps})
    last = steps[-1]
    assert (last.cube, last.vector, last.hbm, last.prefetch) == (0, 0, 0.0, 0.0)
    busy = sum((b.start - a.start) * a.cube for a, b in itertools.pairwise(steps))
    assert busy == pytest.approx(sum(s.us * s.task.load.cores[0] for s in run.trace.spans.values()), rel=1e-4)
    moved = sum((b.start - a.start) * a.hbm for a, b in itertools.pairwise(steps))
    fetched = sum(f.bytes for f in run.trace.prefetches)
    assert moved == pytest.approx(fetched + sum(s.hbm_bytes for s in run.trace.spans.values()), rel=1e-3)


def test_perfetto_has_every_kernel_region_prefetch_and_wait() -> None:
    runs = [serial(), planned()]
    trace = json.loads(json.dumps(perfetto(runs, CHIP)))
    events = trace["traceEvents"]
    kernels = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and "kernel" in e["args"]]
    assert len(kernels) == len(tasks())
    spans = planned().trace.spans.values()
    assert sum(e["dur"] for e in kernels) == pytest.approx(sum(span.us for span in spans))
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [name for (pid, _), name in lanes.items() if pid == 2] == ["main", "side", "SuperKernel: main", "prefetch"]
    assert [name for (pid, _), name in lanes.items() if pid == 1] == ["main"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == 4
    for key, event in starts.items():
        inside = [k for k in kernels if k["tid"] == event["tid"] and k["ts"] <= event["ts"] <= k["ts"] + k["dur"]]
        assert inside
        assert event["ts"] <= ends[key]["ts"]
    one = next(e for e in kernels if e["args"].get("source"))
    assert one["args"]["core limit"] == "c8v16"
    assert one["args"]["shapes"].startswith("bf16[8, 64]")
    assert next(e for e in kernels if e["name"] == "s")["args"]["critical path"] is True


class _Outside(html.parser.HTMLParser):
    """Collects what a document would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "data", "srcset")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("a page") / "timeline ü.html"
    decisions = [Decision("streams", "layers 0-1", True, "shorter <by> 3 %", 12.0, 8.5),
                 Decision("prefetch", "layer 0", False, "no gain")]
    data = json.loads(json.dumps(payload([serial(), planned()], CHIP, 50.0, decisions)))
    text = render(data, title="toy <decode>", about=[("target", "atlas-a3")], notes=["priced & drawn"])
    file.write_text(text, encoding="utf-8")
    return file


def test_page_stands_alone_and_escapes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parser = _Outside()
    parser.feed(text)
    assert parser.found == []
    assert "@import" not in text
    assert "url(" not in text
    assert "fetch(" not in text
    assert "toy &lt;decode&gt;" in text
    assert "shorter &lt;by&gt;" in text
    assert "priced &amp; drawn" in text
    assert "no gain" in text
    assert "12.00" in text
    change = 100 * (planned().trace.step_us / serial().trace.step_us - 1)
    assert f"({change:+.1f} %)" in text


def test_nothing_to_draw_is_an_error() -> None:
    empty = Run("none", Schedule(()), simulate(Schedule(()), CHIP))
    for runs in ([], [empty]):
        with pytest.raises(ValueError, match="at least one"):
            payload(runs, CHIP)


PROBE = """<script>
const box = panels[1].canvas.getBoundingClientRect();
const room = panels[1].canvas.clientWidth - LEFT;
const at = (k) => LEFT + ((k[START] + k[END]) / 2 - view.starts[1]) / view.width * room;
const kernel = data.runs[1].kernels.find((k) => text(k[NAME]) === "1.s");
const event = (type, x, y) => panels[1].canvas.dispatchEvent(new PointerEvent(type, { clientX: box.left + x,
  clientY: box.top + y, bubbles: true }));
showLayer(1);
event("pointermove", at(kernel), panels[1].place.lanes[1].y + 5);
const hovered = card.hidden ? "nothing" : card.textContent;
event("pointermove", at(kernel), panels[1].place.areas[0] + 5);
document.body.dataset.probe = JSON.stringify({ hovered, left: card.hidden, width: document.documentElement.scrollWidth,
  room: document.documentElement.clientWidth });
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1500, 500])
def test_a_browser_shows_the_card_of_the_kernel_under_the_pointer(page: Path, width: int) -> None:
    probed = page.with_name(f"probe {width}.html")
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    shown = browser.dom(probed, width=width)
    found = json.loads(html.unescape(shown.split('data-probe="')[1].split('"')[0]))
    assert found["hovered"].startswith("1.s")
    assert "limit c8v16" in found["hovered"]
    assert 'model.py:12 in forward, "<b>&"' in found["hovered"]
    assert "on the critical path" in found["hovered"]
    assert found["left"], "the card stays although the pointer has left the kernel"
    assert found["width"] <= found["room"], "the page is wider than the window"


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_bounds_waits_and_prefetch(page: Path, tmp_path: Path, dark: bool) -> None:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    rows = browser.screenshot(page, tmp_path / "page.png", "layer=1", 1200, scheme)
    colours: dict[bytes, int] = {}
    for row in rows:
        for i in range(0, len(row), 3):
            colours[row[i : i + 3]] = colours.get(row[i : i + 3], 0) + 1
    names = page.read_text(encoding="utf-8").split("prefers-color-scheme: dark")[dark]
    for name, least in (("cube", 5000), ("hbm", 1000), ("event", 100), ("prefetch", 100)):
        value = bytes.fromhex(names.split(f"--{name}: #")[1][:6])
        assert colours.get(value, 0) >= least, f"{name}: {colours.get(value, 0)} pixels"
    paper = bytes.fromhex(names.split("--page: #")[1][:6])
    assert colours[paper] > 10_000


@pytest.mark.slow
def test_an_address_shows_the_whole_step_from_the_top(page: Path) -> None:
    script = ("<script>requestAnimationFrame(() => { document.body.dataset.probe = JSON.stringify([window.scrollY, "
              "document.activeElement.tagName, document.getElementById('layer').value, view.starts]); });</script>")
    probed = page.with_name("probe whole.html")
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", script + "</body>"), encoding="utf-8")
    shown = browser.dom(probed, "whole", 400)
    found = json.loads(html.unescape(shown.split('data-probe="')[1].split('"')[0]))
    assert found == [0, "BODY", "", [0, 0]]


def test_an_address_opens_the_page_at_a_kernel(page: Path) -> None:
    shown = browser.dom(page, "run=automatic&kernel=0.c")
    card = shown.split('id="card"')[1].split("</div>")[0]
    assert "0.c" in card
    assert "found in L2" in card
    assert "hidden" not in card.split(">")[0]


def test_each_prefetch_of_one_weight_has_its_own_start() -> None:
    schedule = Schedule(tasks(), (Prefetch("1.w", 1500.0, "0.a"), Prefetch("1.w", 2500.0, "1.a")))
    run = Run("automatic", schedule, simulate(schedule, CHIP))
    drawn = payload([run], CHIP)
    assert [drawn["texts"][fetch[-1]] for fetch in drawn["runs"][0]["fetches"]] == ["0.a", "1.a"]
    slices = [e for e in perfetto([run], CHIP)["traceEvents"] if e.get("cat") == "prefetch"]
    assert [e["args"]["after"] for e in slices] == ["0.a", "1.a"]
    assert sum(e["args"]["bytes used"] for e in slices) == pytest.approx(4000.0)
