"""What a restart costs: DeepSeek-V3.2 of 61 layers with tiny widths, compiled cold and then loaded by other processes.

    python -m benchmarks.warm_start [--layers 61] [--cache-dir DIR] [--json]

Seconds are CPU time of a process on one thread after all imports, so other load on the machine counts little. ``cold``
and ``warm`` go from the call of `cannopy.compile` to the first result; ``steady`` is one more call. Of a warm start:
``key`` the identity from the live objects, ``read`` the entry with its checksums, ``weights`` the weight plan on the
live weights, ``torchair`` its load, of which ``unpickle`` and ``code`` (compiling the generated source), and ``graph``
the first load of the GE graph, which on a device is GE's own work. Takes some minutes, nearly all for the cold start.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def timed(owner: Any, name: str, total: dict[str, float], part: str) -> None:
    """Add the CPU time of each call of ``owner.name`` to ``total[part]``."""
    original = getattr(owner, name)
    total[part] = 0.0

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            total[part] += time.process_time() - start

    setattr(owner, name, call)


def watch() -> dict[str, float]:
    """CPU seconds by part of the load, filled from now on."""
    import torchair.inference._cache_compiler as stored
    import torchair.npu_fx_compiler as code

    from cannopy.backend import build, torchair
    from cannopy.backend.cache import store
    from cannopy.backend.host.engine import session
    from cannopy.backend.weights import binder

    parts: dict[str, float] = {}
    for owner, name, part in (
        (build, "fingerprint", "key"),
        (store, "find", "read"),
        (binder.WeightBinder, "bind", "weights"),
        (torchair.TorchairFactory, "__call__", "torchair"),
        (stored.CompiledModel, "load", "unpickle"),
        (code, "_compile_py_code", "code"),
        (next(v for v in vars(session).values() if isinstance(v, type) and hasattr(v, "load")), "load", "graph"),
    ):
        timed(owner, name, parts, part)
    return parts


def child(layers: int, cache_dir: Path, pipeline: str | None, keep: bool) -> dict[str, Any]:
    """One compilation, hit or miss, and two calls."""
    import cannopy.api  # cannopy loads it on first use
    from benchmarks.layers import decode
    from cannopy.backend.host.activate import activate

    torch.set_num_threads(1)
    sys.modules["cannopy.backend.cache.key"].package_digest = lambda: "pinned"  # type: ignore[attr-defined]
    activate()
    model, call = decode(layers)
    parts = watch()
    start = time.process_time()
    chosen = {} if pipeline is None else {"pipeline": pipeline}
    options = cannopy.Options(phase="decode", cache_dir=cache_dir, keep_weights=keep, **chosen)
    compiled = cannopy.compile(model, "forward", (), call, options)
    ready = time.process_time()
    compiled(**call)
    first = time.process_time()
    compiled(**call)
    return {
        "status": compiled.report.cache["status"],
        "reason": compiled.report.cache["reason"],
        "compile": ready - start,
        "total": first - start,
        "steady": time.process_time() - first,
        "parts": parts,
        "own memory": own_memory(),
        "weights": compiled.report.weights,
        "bytes": sum(p.stat().st_size for p in cache_dir.rglob("*") if p.is_file()),
    }


def own_memory() -> int:
    """Bytes of this process that no other can share and no file can give back."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_Dirty:"))


def run(layers: int, cache_dir: Path, pipeline: str | None, keep: bool) -> dict[str, Any]:
    """`child` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.warm_start", "--child", "--layers", str(layers)]
    command += ["--cache-dir", str(cache_dir), *([] if pipeline is None else ["--pipeline", pipeline])]
    command += ["--keep-weights"] * keep
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(layers: int, cache_dir: Path, pipeline: str | None = None, keep: bool = False) -> dict[str, Any]:
    """Cold (unless the folder has the entry) and warm, and what follows from them."""
    cold, warm = (run(layers, cache_dir, pipeline, keep) for _ in range(2))
    load = warm["total"] - warm["steady"]
    return {
        "layers": layers, "cold": cold, "warm": warm,
        "warm start": load, "without the weight plan": load - warm["parts"]["weights"],
        "cold / warm": (cold["total"] - cold["steady"]) / load,
    }  # fmt: skip


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=61, help="layers of the model (61, as DeepSeek-V3.2)")
    parser.add_argument("--cache-dir", type=Path, help="a folder to keep; a temporary one if not given")
    parser.add_argument("--pipeline", help="stages of the compiler; the default ones if not given")
    parser.add_argument("--keep-weights", action="store_true", help="keep results of the weight plan and map them")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.layers, args.cache_dir, args.pipeline, args.keep_weights)))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args.layers, args.cache_dir or Path(folder), args.pipeline, args.keep_weights)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    cold, warm = result["cold"], result["warm"]
    print(f"cold {cold['total']:8.2f} s ({cold['status']})   warm {warm['total']:8.2f} s ({warm['status']})")
    for part, seconds in warm["parts"].items():
        print(f"  {part:10} {seconds:8.3f} s")
    print(f"  {'steady':10} {warm['steady']:8.3f} s   one call, part of both totals")
    print(f"warm start {result['warm start']:.2f} s, {result['without the weight plan']:.2f} s of it not weight plan")
    print(f"cold / warm {result['cold / warm']:.1f}   entry {warm['bytes'] / 1e6:.1f} MB   {warm['weights']}")
    print(f"memory of the process alone: {warm['own memory'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
