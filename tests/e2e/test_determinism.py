"""One model gives one result, byte for byte: again in the same process, in another one, and next to other models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def texts(seed: int, *names: str) -> list[tuple[str, str]]:
    """(name, everything that its compilation decides) of models compiled one after the other in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.determinism_program", *names], cwd=ROOT, check=True, capture_output=True,
        text=True, env={**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"},
    )
    return [(name, text) for name, text in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.slow
def test_a_model_gives_the_same_bytes_whatever_was_compiled_before_and_however_python_hashes():
    found: dict[str, list[str]] = {"mlp": [], "deepseek": []}
    for name, text in [*texts(1, "mlp", "deepseek", "mlp"), *texts(2, "deepseek", "mlp", "deepseek")]:
        found[name].append(text)
    for name, all_of_it in found.items():
        assert len(all_of_it) == 3
        assert "npu." in all_of_it[0], f"nothing of {name} was fused"
        lines = [text.splitlines() for text in all_of_it]
        for other in lines[1:]:
            differing = [(a, b) for a, b in zip(lines[0], other, strict=False) if a != b]
            assert differing[:1] == [], name
        assert len(set(all_of_it)) == 1, name
