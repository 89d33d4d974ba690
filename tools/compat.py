"""Cannopy on other versions of torch and torch_npu: environments of their own, the main job, the core tests, a page.

    python tools/compat.py                 all environments of requirements/compat.txt, then docs/compat.md
    python tools/compat.py 2.8             one of them
    python tools/compat.py --page          only the page, from what the last runs found

Environments are in .compat/ (several gigabytes where the index has CUDA builds of torch only) and stay there: a second
run takes them as they are. What a run finds is kept in docs/compat.yaml, which the page is written from, after each
step; where an environment cannot be made, what an earlier run found in it stays, and the others are run. The output of
each step is in .compat/NAME.STEP.log.

Exit code 1 when an environment could not be made, its main job or parity failed, or a test fails that the `reasons` of
docs/compat.yaml say nothing about.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOUND, PAGE = ROOT / "docs" / "compat.yaml", ROOT / "docs" / "compat.md"
REQUIREMENTS = ROOT / "requirements"
INDEX = "https://download.pytorch.org/whl/cpu"
CORE = {
    "kernels": ("tests/kernels",), "engine": ("tests/engine",), "passes": ("tests/passes",),
    "frontend": ("tests/frontend",),
    "rules": tuple(f"tests/rules/test_{name}.py" for name in (
        "rms_norm", "single_ops", "moe_experts", "moe_gating_top_k", "swiglu")),
}
"""CPU kernels, host engine, passes, capture, and rules of each kind: what leans on torch's internals, on torchair and
on the schemas of the npu ops. Without the tests marked slow."""
LONGEST = {"installing": 7200, "main job": 3600, "tests": 7200}
"""Seconds after which a step is ended: pip of one environment's packages, the main job, one entry of `CORE`."""
TOOLS_ONLY = ("torch_npu", "ruff", "mypy", "librt", "ast_serialize", "pathspec")


class NotMadeError(Exception):
    """An environment could not be made: the step and the end of its output."""


def say(text: str) -> None:
    """One line of progress."""
    print(text, flush=True)


@dataclass
class Outcome:
    """One environment: the main job's exit, parity by phase, and the core tests.

    ``skips`` counts tests by reason; ``unrun`` are the entries of `CORE` that the run did not come to.
    """

    torch: str
    torch_npu: str
    transformers: str = ""
    python: str = ""
    job: str = "not run"
    parity: str = ""
    kernels: dict[str, int] = field(default_factory=dict)
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    skips: dict[str, int] = field(default_factory=dict)
    unrun: list[str] = field(default_factory=lambda: list(CORE))
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Environment:
    """One line of requirements/compat.txt and its folder."""

    name: str
    pins: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where it is."""
        return ROOT / ".compat" / self.name

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def _variables(self, **more: str) -> dict[str, str]:
        preload = self.folder / "keys.so"
        extra = {"LD_PRELOAD": str(preload)} if preload.exists() else {}
        return {**os.environ, "OMP_NUM_THREADS": "1", **extra, **more}

    def run(self, *command: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
        """A command with this environment's Python, output kept."""
        return subprocess.run([self.python, *command], cwd=cwd, env=self._variables(**more), text=True,
                              capture_output=True, check=False, timeout=LONGEST["main job"])

    def watch(self, step: str, seconds: float, *command: str) -> int:
        """The exit code of a command with this environment's Python, ended after ``seconds``.

        Its output goes to .compat/NAME.STEP.log; lines that end in a percentage, which are pytest's, are shown.
        """
        log = self.folder.with_name(f"{self.name}.{step}.log")
        with log.open("w", encoding="utf-8") as kept, subprocess.Popen(
            [self.python, *command], cwd=ROOT, env=self._variables(), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True) as process:
            ended = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
            ended.start()
            try:
                for line in process.stdout or ():
                    kept.write(line)
                    if line.rstrip().endswith("%]"):
                        say(f"{self.name}: {step} {line.rstrip()[-5:-1].strip()}")
            finally:
                ended.cancel()
        return process.returncode

    def version(self, package: str) -> str:
        """The installed version of a package."""
        found = self.run("-c", f"import importlib.metadata as m; print(m.version({package!r}))")
        return found.stdout.strip()


def environments(names: Sequence[str] = ()) -> list[Environment]:
    """Those of requirements/compat.txt, or the named ones."""
    lines = (REQUIREMENTS / "compat.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    found = [Environment(name, tuple(pins)) for name, *pins in rows if not names or name in names]
    unknown = set(names) - {e.name for e in found}
    if unknown:
        raise SystemExit(f"compat: {', '.join(sorted(unknown))} is not in requirements/compat.txt; it has "
                         f"{', '.join(name for name, *_ in rows)}")
    return found


def set_up(environment: Environment) -> list[str]:
    """Install what is missing; notes for the table."""
    ready = environment.folder / ".ready"
    stamp = " ".join(environment.pins) + (REQUIREMENTS / "dev.txt").read_text(encoding="utf-8")
    if not (ready.exists() and ready.read_text(encoding="utf-8") == stamp):
        if not environment.folder.exists():
            venv.create(environment.folder, with_pip=True)
        pins = (REQUIREMENTS / "dev.txt").read_text(encoding="utf-8").splitlines()
        rest = [p for p in pins if "==" in p and p.partition("==")[0] not in TOOLS_ONLY]
        index = os.environ.get("TORCH_INDEX", INDEX)
        steps = (
            ["--retries", "1", "--extra-index-url", index, *environment.pins[:1]],
            ["--no-deps", *environment.pins[1:]],
            [*rest, environment.pins[0]],
            ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
        )
        for i, step in enumerate(steps, 1):
            say(f"{environment.name}: installing, step {i} of {len(steps)}: {' '.join(step)[:70]}")
            _made(environment, "install", "-m", "pip", "--disable-pip-version-check", "install", *step)
        notes = _allocator(environment)
        _made(environment, "install", "-m", "cannopy", "host", "install")
        ready.write_text(stamp, encoding="utf-8")
        return notes
    return _allocator(environment)


def _made(environment: Environment, step: str, *command: str) -> None:
    """Run a command of the installation, or `NotMadeError` with the end of what it said."""
    if environment.watch(step, LONGEST["installing"], *command):
        said = environment.folder.with_name(f"{environment.name}.{step}.log").read_text(encoding="utf-8")
        raise NotMadeError(f"{' '.join(command)[:120]}\n{said[-1500:]}")


def _allocator(environment: Environment) -> list[str]:
    """A CUDA build of torch 2.14 gets `allocator_keys.cpp` in front of it; what to say about that."""
    found = environment.run("-c", "import torch; print(torch.version.cuda or '')",
                            TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.strip()
    if not found:
        return []
    note = f"CUDA {found} build of torch: no CPU build could be reached."
    if tuple(map(int, environment.name.split("."))) < (2, 14):
        return [note]
    target = environment.folder / "keys.so"
    command = ["c++", "-shared", "-fPIC", "-O1", str(ROOT / "tools" / "allocator_keys.cpp"), "-o", str(target)]
    subprocess.run(command, check=True)
    return [f"{note} torch_npu does not load beside it, as both register the same allocator options: "
            "`tools/allocator_keys.cpp` was preloaded. A CPU build needs no such thing."]


def main_job(environment: Environment, outcome: Outcome) -> None:
    """``cannopy run deepseek-v3.2 --size tiny`` in an empty folder and without a cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "cannopy", "run", "deepseek-v3.2", "--size", "tiny", "--json", "--out", "out")
        done = environment.run(*command, cwd=Path(folder), XDG_CACHE_HOME=str(Path(folder) / "cache"))
    outcome.job = "ok" if done.returncode == 0 else f"exit {done.returncode}"
    try:
        data: Mapping[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        outcome.notes.append(f"main job: {last[:300]}")
        return
    read(data, outcome)


def read(data: Mapping[str, Any], outcome: Outcome) -> None:
    """Kernels and parity of the report of a run."""
    outcome.kernels = {phase: sum(report["kernels"].values()) for phase, report in data["phases"].items()}
    outcome.parity = "holds" if data["parity"]["passed"] else "; ".join(data["parity"]["failures"])


def core_tests(environment: Environment, outcome: Outcome, keep: Callable[[], None]) -> None:
    """The tests of `CORE`, two files at a time; ``keep`` is called after each entry."""
    workers = ("-n", os.environ.get("COMPAT_WORKERS", "2"), "--dist", "loadfile")
    for name, paths in CORE.items():
        with tempfile.TemporaryDirectory() as folder:
            xml = Path(folder) / "tests.xml"
            code = environment.watch(f"tests of {name}", LONGEST["tests"], "-m", "pytest", "-q", "-m", "not slow",
                                     *workers, "-p", "no:cacheprovider", "--tb=short", "--show-capture=no",
                                     f"--junitxml={xml}", *paths)
            cases = list(ET.parse(xml).getroot().iter("testcase")) if xml.exists() else []
        if not cases:
            outcome.failed.append(name)
            outcome.notes.append(f"core tests of {name}: pytest ended with code {code} and wrote no result")
        _count(cases, outcome)
        outcome.unrun.remove(name)
        keep()
        say(f"{environment.name}: {outcome.passed} passed, {len(outcome.failed)} failed, {outcome.skipped} skipped")


def _count(cases: Sequence[ET.Element], outcome: Outcome) -> None:
    """Add the cases of one junit file to ``outcome``."""
    for case in cases:
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}")
        elif skipped is not None:
            outcome.skipped += 1
            why = str(skipped.get("message"))
            outcome.skips[why] = outcome.skips.get(why, 0) + 1
        else:
            outcome.passed += 1


def examine(environment: Environment, keep: Callable[[Outcome], None]) -> Outcome:
    """Set up one environment and run everything in it; ``keep`` takes what is known after each step.

    Raises:
        NotMadeError: the environment could not be made; nothing was kept.
    """
    start = time.monotonic()
    notes = set_up(environment)
    torch, torch_npu, transformers = map(environment.version, ("torch", "torch_npu", "transformers"))
    outcome = Outcome(torch, torch_npu, transformers, notes=notes)
    outcome.python = environment.run("-c", "import platform; print(platform.python_version())").stdout.strip()
    say(f"{environment.name}: torch {outcome.torch}, torch_npu {outcome.torch_npu}; main job")
    main_job(environment, outcome)
    keep(outcome)
    say(f"{environment.name}: main job {outcome.job}, parity {outcome.parity or 'not measured'}")
    core_tests(environment, outcome, lambda: keep(outcome))
    say(f"{environment.name}: {time.monotonic() - start:.0f} s")
    return outcome


def page(found: Mapping[str, Mapping[str, Any]], reasons: Mapping[str, str]) -> str:
    """The Markdown page; ``reasons`` says why tests fail, by the beginning of their name."""
    paths = ", ".join(f"`{path}`" for paths in CORE.values() for path in paths)
    text = [
        "# Versions of torch and torch_npu", "",
        "Written by `make compat` from what it found (docs/compat.yaml); no part of CI. Development and CI use the "
        "pair of requirements/torch.txt and requirements/dev.txt. *Main job*: `cannopy run deepseek-v3.2 --size tiny`, "
        "both phases, nothing cached; parity is that of [parity.md](parity.md). *Core tests*: "
        f"{paths}, without those marked slow. What differs between versions is in "
        "`fx_passes/compat.py`.", "",
        "| torch | torch_npu | transformers | Python | main job | kernels, prefill and decode | parity | core tests |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for o in found.values():
        kernels = ", ".join(str(n) for n in o["kernels"].values())
        tests = (f"{o['passed']} passed, {len(o['failed'])} failed, {o['skipped']} skipped"
                 if o["passed"] or o["failed"] else "not run")
        if o.get("unrun") and tests != "not run":
            tests += f"; not run: {', '.join(o['unrun'])}"
        text.append(f"| {o['torch']} | {o['torch_npu']} | {o['transformers']} | {o['python']} | {o['job']} | {kernels} "
                    f"| {o['parity'] or 'not measured'} | {tests} |")
    for name, o in found.items():
        failed = [f"`{test}`: {_known(test, reasons) or 'not looked into yet'}" for test in o["failed"]]
        skipped = [f"{count} skipped: {why}" for why, count in o.get("skips", {}).items()]
        if o["notes"] or failed or skipped:
            text += ["", f"## {name}", "", *(f"- {line}" for line in (*o["notes"], *failed, *skipped))]
    return "\n".join([*text, ""])


def _known(test: str, reasons: Mapping[str, str]) -> str:
    return next((why for start, why in reasons.items() if test.startswith(start)), "")


def main(argv: Sequence[str]) -> int:
    """Run, keep what was found, write the page. 1 when something is wrong that nobody has a reason for."""
    kept = yaml.safe_load(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    found, reasons = dict(kept.get("found", {})), dict(kept.get("reasons", {}))

    def write(name: str, outcome: Outcome) -> None:
        found[name] = asdict(outcome)
        text = yaml.safe_dump({"found": found, "reasons": reasons}, sort_keys=False, width=120)
        FOUND.write_text(text, encoding="utf-8")
        PAGE.write_text(page(found, reasons), encoding="utf-8")

    wrong = []
    for environment in [] if "--page" in argv else environments(argv):
        try:
            outcome = examine(environment, functools.partial(write, environment.name))
        except (NotMadeError, subprocess.SubprocessError, OSError) as error:
            wrong.append(f"{environment.name}: {error}; what an earlier run found is kept")
            continue
        if outcome.job != "ok" or outcome.parity != "holds":
            wrong.append(f"{environment.name}: main job {outcome.job}, parity {outcome.parity or 'not measured'}")
        wrong += [f"{environment.name}: {test} fails" for test in outcome.failed if not _known(test, reasons)]
    PAGE.write_text(page(found, reasons), encoding="utf-8")
    for line in wrong:
        print(f"compat {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
