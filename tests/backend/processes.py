"""Starts `tests.backend.child` processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def start(engine: str, cache_dir: Path, *code: str, cwd: Path = ROOT, **env: str) -> subprocess.Popen[str]:
    """A child process; its output is JSON in the last line."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.backend.child", engine, str(cache_dir), *code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What the child printed; its standard error in the assertion if it failed."""
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    return dict(json.loads(out.splitlines()[-1]))


def run(engine: str, cache_dir: Path, *code: str, **kwargs: Any) -> dict[str, Any]:
    """`start` and `finish`."""
    return finish(start(engine, cache_dir, *code, **kwargs))
