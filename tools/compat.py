"""Cannopy on other versions of torch and torch_npu: environments of their own, the main job, the core tests, a page.

    python tools/compat.py                 all environments of requirements/compat.txt, then docs/compat.md
    python tools/compat.py 2.8             one of them
    python tools/compat.py --page          only the page, from what the last runs found

Environments are in .compat/ (several gigabytes where the index has CUDA builds of torch only). What a run finds is kept
in docs/compat.yaml, which the page is written from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOUND, PAGE = ROOT / "docs" / "compat.yaml", ROOT / "docs" / "compat.md"
REQUIREMENTS = ROOT / "requirements"
INDEX = "https://download.pytorch.org/whl/cpu"
CORE = ("tests/kernels", "tests/engine", "tests/passes", "tests/frontend", "tests/rules/test_rms_norm.py",
        "tests/rules/test_single_ops.py", "tests/rules/test_moe_experts.py", "tests/rules/test_moe_gating_top_k.py",
        "tests/rules/test_swiglu.py")
"""CPU kernels, rule engine, passes, capture, and rules of each kind: what leans on torch's internals and on the schemas
of the npu ops. Without the tests marked slow; torchair's lowering and the host engine are run by the main job."""
TOOLS_ONLY = ("torch_npu", "ruff", "mypy", "librt", "ast_serialize", "pathspec")


@dataclass
class Outcome:
    """One environment: the main job's exit, parity by phase, and the core tests."""

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

    def run(self, *command: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
        """A command with this environment's Python, output kept."""
        preload = self.folder / "keys.so"
        extra = {"LD_PRELOAD": str(preload)} if preload.exists() else {}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **extra, **more}
        return subprocess.run([self.python, *command], cwd=cwd, env=env, text=True, capture_output=True, check=False)

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
        for step in steps:
            done = environment.run("-m", "pip", "--disable-pip-version-check", "install", "--quiet", *step)
            if done.returncode:
                raise SystemExit(f"compat {environment.name}: pip install {' '.join(step[:6])}\n{done.stderr[-2000:]}")
        notes = _allocator(environment)
        done = environment.run("-m", "cannopy", "host", "install")
        if done.returncode:
            raise SystemExit(f"compat {environment.name}: cannopy host install\n{done.stdout}{done.stderr[-2000:]}")
        ready.write_text(stamp, encoding="utf-8")
        return notes
    return _allocator(environment)


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


def core_tests(environment: Environment, outcome: Outcome) -> None:
    """The tests of `CORE`, two files at a time."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        environment.run("-m", "pytest", "-q", "-m", "not slow", "-n", os.environ.get("COMPAT_WORKERS", "2"), "--dist",
                        "loadfile", "-p", "no:cacheprovider", f"--junitxml={xml}", *CORE)
        cases = list(ET.parse(xml).getroot().iter("testcase")) if xml.exists() else []
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    outcome.failed = sorted(f"{c.get('classname', '').removeprefix('tests.')}::{c.get('name')}" for c in bad)
    outcome.skipped = sum(c.find("skipped") is not None for c in cases)
    outcome.passed = len(cases) - len(bad) - outcome.skipped
    if not cases:
        outcome.notes.append("core tests: pytest wrote no result")


def examine(environment: Environment) -> Outcome:
    """Set up one environment and run everything in it."""
    start = time.monotonic()
    print(f"{environment.name}: installing", flush=True)
    notes = set_up(environment)
    outcome = Outcome(*(environment.version(p) for p in ("torch", "torch_npu", "transformers")), notes=notes)
    outcome.python = environment.run("-c", "import platform; print(platform.python_version())").stdout.strip()
    print(f"{environment.name}: main job", flush=True)
    main_job(environment, outcome)
    print(f"{environment.name}: {outcome.job}; core tests", flush=True)
    core_tests(environment, outcome)
    print(f"{environment.name}: {outcome.passed} passed, {len(outcome.failed)} failed, {outcome.skipped} skipped, "
          f"{time.monotonic() - start:.0f} s", flush=True)
    return outcome


def page(found: Mapping[str, Mapping[str, Any]], reasons: Mapping[str, str]) -> str:
    """The Markdown page; ``reasons`` says why tests fail, by the beginning of their name."""
    text = [
        "# Versions of torch and torch_npu", "",
        "Written by `make compat` from what it found (docs/compat.yaml); no part of CI. Development and CI use the "
        "pair of requirements/torch.txt and requirements/dev.txt. *Main job*: `cannopy run deepseek-v3.2 --size tiny`, "
        "both phases, nothing cached; parity is that of [parity.md](parity.md). *Core tests*: "
        + ", ".join(f"`{path}`" for path in CORE) + ", without those marked slow. What differs between versions is in "
        "`fx_passes/compat.py`.", "",
        "| torch | torch_npu | transformers | Python | main job | kernels, prefill and decode | parity | core tests |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for o in found.values():
        kernels = ", ".join(str(n) for n in o["kernels"].values())
        tests = (f"{o['passed']} passed, {len(o['failed'])} failed, {o['skipped']} skipped"
                 if o["passed"] or o["failed"] else "not run")
        text.append(f"| {o['torch']} | {o['torch_npu']} | {o['transformers']} | {o['python']} | {o['job']} | {kernels} "
                    f"| {o['parity'] or 'not measured'} | {tests} |")
    for name, o in found.items():
        failed = [f"`{test}`: {_reason(test, reasons)}" for test in o["failed"]]
        if o["notes"] or failed:
            text += ["", f"## {name}", "", *(f"- {line}" for line in (*o["notes"], *failed))]
    return "\n".join([*text, ""])


def _reason(test: str, reasons: Mapping[str, str]) -> str:
    return next((why for start, why in reasons.items() if test.startswith(start)), "not looked into yet")


def main(argv: Sequence[str]) -> None:
    """Run, keep what was found, write the page."""
    kept = yaml.safe_load(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    found, reasons = dict(kept.get("found", {})), dict(kept.get("reasons", {}))
    for environment in [] if "--page" in argv else environments(argv):
        found[environment.name] = asdict(examine(environment))
        text = yaml.safe_dump({"found": found, "reasons": reasons}, sort_keys=False, width=120)
        FOUND.write_text(text, encoding="utf-8")
    PAGE.write_text(page(found, reasons), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
