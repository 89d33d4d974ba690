"""Tiny models under many layouts on real ranks of this machine: `torchrun -m cannopy run MODEL --parallel …` for each.

    python tools/parallel_matrix.py [--models deepseek-v3.2 …] [--worlds 2 4 8] [--form stock|serving]

Each run compares every rank with eager mode on its own requests. Prints a line per run, exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

LAYOUTS = (
    "ep={n},dp={n}",
    "ep={n},dp={n},dense_tp=2,o_proj_tp={n}",
    "ep={n},dp={n},embed_tp={n},lm_head_tp=2",
    "attn_tp={n},dense_tp={n},moe_tp={n},embed_tp={n},lm_head_tp={n}",
)
MODELS = ("deepseek-v3.2", "deepseek-r1", "kimi-k2", "longcat-flash")


def run(model: str, world: int, layout: str, form: str, seconds: float) -> tuple[str, dict[str, Any]]:
    """The verdict of one run in a word, and what rank 0 reported."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m",
               "cannopy", "run", model, "--form", form, "--steps", "2", "--batch", "2", "--parallel", layout,
               "--no-cache", "--group-timeout", "300", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        return "hangs", {}
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = [line for line in done.stderr.splitlines() if line.startswith("cannopy:")]
        return said[0] if said else f"ended with {done.returncode}", {}
    return "holds" if done.returncode == 0 else "fails", report


def main() -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--worlds", nargs="+", type=int, default=(2, 4, 8))
    parser.add_argument("--form", choices=("stock", "serving"), default="serving")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit of one run")
    args = parser.parse_args()
    failed = 0
    for model in args.models:
        for world in args.worlds:
            for layout in (text.format(n=world) for text in LAYOUTS):
                start = time.perf_counter()
                verdict, report = run(model, world, layout, args.form, args.seconds)
                worst = max((r for rank in report.get("ranks", ()) for ratios in rank["error_ratios"].values()
                             for r in ratios), default=float("nan"))
                print(f"{model:14} {world} ranks  {layout:55} {verdict}  largest ratio {worst:.2f}  "
                      f"{time.perf_counter() - start:.0f} s", flush=True)
                failed += verdict != "holds"
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
