"""Run mypy over the repository as the one package `cannopy` that its folders import as.

mypy knows nothing of setuptools' package-dir, so the folders are laid out as symbolic links under
build/typecheck/cannopy and mypy runs there; paths in its output are put back.

    python tools/typecheck.py                     everything
    python tools/typecheck.py backend/host        only the errors below these paths (all of it is still checked)
"""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typecheck"
MAPPED = ("frontend", "fx_passes", "fusion_rules", "stream_scheduler", "superkernel", "models", "backend")


def lay_out() -> None:
    """Make build/typecheck/cannopy a folder of links to what is there now."""
    package = TREE / "cannopy"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {entry.name: entry for entry in (ROOT / "cannopy").iterdir() if entry.name != "__pycache__"}
    wanted |= {name: ROOT / name for name in MAPPED if (ROOT / name / "__init__.py").is_file()}
    for link in package.iterdir():
        if link.name not in wanted or not link.exists():
            link.unlink()
    for name, target in wanted.items():
        link = package / name
        if not link.is_symlink():
            link.symlink_to(target)


def run_mypy() -> subprocess.CompletedProcess[str]:
    """mypy's exit status and output for the laid-out tree; 0 no errors, 1 errors, 2 mypy failed."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "-p", "cannopy"]
    return subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)


def main(arguments: list[str]) -> int:
    TREE.mkdir(parents=True, exist_ok=True)
    with (TREE / "lock").open("w") as lock:  # runs at the same time would each read torch from scratch
        fcntl.flock(lock, fcntl.LOCK_EX)
        lay_out()
        done = run_mypy()
    mapped = "|".join(MAPPED)
    lines = [re.sub(rf"^cannopy/({mapped})/", r"\1/", line) for line in done.stdout.splitlines()]
    sys.stderr.write(done.stderr)
    if not arguments:
        print("\n".join(lines))
        return done.returncode
    prefixes = tuple(str(Path(a).resolve().relative_to(ROOT)) for a in arguments)
    chosen = [line for line in lines if line.startswith(prefixes) and ": error:" in line]
    for line in lines:
        if ": error:" not in line and ": note:" not in line and not line.startswith("Found"):
            chosen.append(line)
    print("\n".join(chosen) if chosen else f"no errors below {', '.join(prefixes)}")
    return 1 if any(": error:" in line for line in chosen) or done.returncode > 1 else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
