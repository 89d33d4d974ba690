"""Starts processes for the cache tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(cache_dir: Path, module: str = "tests.backend.child") -> dict[str, Any]:
    """What a fresh process that runs ``module`` prints."""
    child = subprocess.run(
        [sys.executable, "-m", module, str(cache_dir)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    return dict(json.loads(child.stdout.splitlines()[-1]))


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; the process id. `work` must not compute with torch."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except Exception:  # noqa: BLE001 whatever it is, the parent must learn of it
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pids: list[int]) -> None:
    """Wait for forked processes; each must have succeeded."""
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)
