"""What needs a process of its own: a warm cache, and a machine that has CANN."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def _run(program: str, *args: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / program), *args], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_a_second_process_loads_the_cache(tmp_path: Path) -> None:
    """It computes the same without Dynamo. Before, it checks what activate() does where CANN is present."""
    first = _run("cache_program.py", str(tmp_path))
    second = _run("cache_program.py", str(tmp_path), "refuse")
    assert "CANN is installed here; nothing was replaced" in second.pop("refusal")
    assert first.pop("refusal") == ""
    assert first.pop("dynamo") == 1
    assert second.pop("dynamo") == 0
    assert second == first
    assert first["equal"] == [True, True, True]
    assert [i for i, w in enumerate(first["written"]) if w] == [3, 5]
    assert first["copies"] == 0
    assert first["graphs"] == 1
