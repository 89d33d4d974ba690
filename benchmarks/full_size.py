"""What compiling the zoo's full-size models without weights costs: CPU time, wall time and peak memory, cold and warm.

    python -m benchmarks.full_size [--model NAME …] [--form stock serving] [--phase decode] [--json FILE]

Every compilation is ``cannopy compile MODEL --size full --offline`` in a process of its own with one thread, twice:
with an empty compile cache, then again with what the first has left there. Seconds count from where Python has
imported torch, torch_npu, torchair and transformers. One process at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cannopy.models import zoo

FORMS = ("stock", "serving")
COLD_SECONDS = 180.0
"""CPU time of a first compilation that the project aims at."""
WARM_SECONDS = 6.0
"""The same from the cache."""
PEAK_GB = 4.0
"""Peak resident memory (10⁹ bytes) that the project aims at."""

_CHILD = """
import contextlib, io, json, resource, sys, time
from cannopy.environment import import_torch
import_torch()
import torchair, transformers
from cannopy import api, cli
from cannopy.models import zoo
preset = zoo.preset(sys.argv[2], "full")
getattr(transformers, preset.architecture), getattr(transformers, preset.config_class)
wall, cpu = time.perf_counter(), time.process_time()
text = io.StringIO()
with contextlib.redirect_stdout(text):
    code = cli.main(sys.argv[1:])
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
report = json.loads(text.getvalue())
report = {k: v for k, v in report.items() if k not in ("misses", "hits", "layers", "passes")}
print(json.dumps({"code": code, "wall": wall, "cpu": cpu, "peak": peak, **report}))
"""


def measure(name: str, form: str, phase: str, target: str, cache: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """One compilation in a process of its own, with ``more`` arguments: seconds, bytes and the report, or ``error``."""
    command = ["compile", name, "--size", "full", "--form", form, "--phase", phase, "--offline", "--target", target,
               "--cache-dir", str(cache), "--json", *more]
    done = subprocess.run([sys.executable, "-c", _CHILD, *command], capture_output=True, text=True, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    if done.returncode or found.get("code") != 0:
        return {"error": found.get("problem") or (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return found


def row(name: str, form: str, phase: str, target: str) -> dict[str, Any]:
    """Cold and warm compilation of one model in one form."""
    with tempfile.TemporaryDirectory(prefix="cannopy-full-size-") as folder:
        cold = measure(name, form, phase, target, Path(folder))
        warm = {} if "error" in cold else measure(name, form, phase, target, Path(folder))
    return {"model": name, "form": form, "phase": phase, "target": target, "cold": cold, "warm": warm}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as a Markdown table."""
    lines = ["| model | form | layers captured | nodes | kernels | predicted step, µs | first time, s | from cache, s "
             "| peak, GB |", "|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        cold, warm = r["cold"], r["warm"]
        if "error" in cold:
            lines.append(f"| {r['model']} | {r['form']} | {cold['error'].splitlines()[0]} |  |  |  |  |  |  |")
            continue
        regions = cold["regions"]
        again = f"{warm['cpu']:.1f}" if "cpu" in warm else warm.get("error", "")
        if "cpu" in warm and warm["cache"]["status"] != "hit":
            again += f" ({warm['cache']['status']}: {warm['cache']['reason']})"
        lines.append(
            f"| {r['model']} | {r['form']} | {regions['captured']} of {regions['layers']} | {cold['nodes']['final']} "
            f"| {sum(cold['kernels'].values())} | {cold['schedule']['predicted_us']:.0f} | {cold['cpu']:.0f} | {again} "
            f"| {cold['peak'] / 1e9:.2f} |"
        )
    return lines


def over(row: Mapping[str, Any]) -> list[str]:
    """What of ``row`` is over the project's limits, one sentence each."""
    name, cold, warm = f"{row['model']}, {row['form']}", row["cold"], row["warm"]
    if "error" in cold or "error" in warm:
        return [f"{name}: {cold.get('error') or warm['error']}"]
    found = []
    if warm["cache"]["status"] != "hit":
        found.append(f"{name}: the second compilation is no hit: {warm['cache']['reason']}")
    for what, value, limit in (("s the first time", cold["cpu"], COLD_SECONDS),
                               ("s from the cache", warm["cpu"], WARM_SECONDS),
                               ("GB", max(cold["peak"], warm["peak"]) / 1e9, PEAK_GB)):
        if value > limit:
            found.append(f"{name}: {value:.2f} {what}, the limit is {limit:g}")
    return found


def main() -> int:
    """Measure and print; 1 when something fails or is over a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", default=zoo.names(), choices=zoo.names())
    parser.add_argument("--form", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--phase", default="decode", choices=("prefill", "decode"))
    parser.add_argument("--target", default="atlas-a3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    print("\n".join(table([])), flush=True)
    rows = []
    for name in args.model:
        for form in args.form:
            rows.append(row(name, form, args.phase, args.target))
            print("\n".join(table(rows[-1:])[2:]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    missed = [sentence for found in rows for sentence in over(found)]
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
