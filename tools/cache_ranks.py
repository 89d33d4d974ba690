#!/usr/bin/env python3
"""torchrun with several gloo processes on one compile cache: cold, warm, entry deleted, rank killed, another world.

    python tools/cache_ranks.py --world 2 4 8
    python tools/cache_ranks.py --world 2 --engine torchair     real torchair compilations

Each world size is two runs of torchrun (cold; warm, then one rank's entry deleted) and one without torchrun, whose
agent would end the others first, in which a rank is killed while it builds. All sizes use one folder: the first run of
the second size is also the run in another world. Exit code 1 when anything unexpected was seen. See docs/cache.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main(argv: list[str] | None = None) -> int:
    """Run all sessions; one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--engine", choices=("eager", "torchair"), default="eager")
    parser.add_argument("--worker", nargs=3, metavar=("SESSION", "CACHE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return worker(args.worker[0], Path(args.worker[1]), Path(args.worker[2]), args.engine)
    report: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cache-ranks-") as folder:
        for world in args.world:
            for session in ("cold", "warm", "killed"):
                report.append(run_session(session, world, Path(folder), args.engine, bool(report)))
                print(json.dumps(report[-1]), flush=True)
    return 1 if any(r["problems"] for r in report) else 0


def run_session(session: str, world: int, folder: Path, engine: str, other_world: bool) -> dict[str, Any]:
    """Start the processes of one session and judge what they wrote."""
    out = folder / f"{session}-{world}"
    out.mkdir()
    program = [str(ROOT / "tools/cache_ranks.py"), "--engine", engine]
    program += ["--worker", session, str(folder / "cache"), str(out)]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    start = time.monotonic()
    if session == "killed":
        processes = [
            subprocess.Popen([sys.executable, *program], cwd=ROOT,
                             env={**environment, "RANK": str(r), "WORLD_SIZE": str(world)})
            for r in range(world)
        ]
        codes = [p.wait(timeout=600) for p in processes]
        wrong = [] if codes == [0] * (world - 1) + [-signal.SIGKILL] else [f"exit codes {codes}"]
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        torchrun += ["--master-port", port]
        code = subprocess.run([*torchrun, *program], cwd=ROOT, env=environment, timeout=600).returncode
        wrong = [f"torchrun ended with {code}"] if code else []
    found = [json.loads(p.read_text()) for p in sorted(out.glob("*.json"), key=lambda p: int(p.stem))]
    judge = {"cold": judge_cold, "warm": judge_warm, "killed": judge_killed}[session]
    return {"session": session, "world": world, "engine": engine, "seconds": round(time.monotonic() - start, 1),
            "problems": wrong + judge(found, world, other_world), "said": found[0] if session == "killed" else None}


def judge_cold(found: list[Any], world: int, other_world: bool) -> list[str]:
    """One rank builds the shared entry, every rank its own."""
    problems = []
    shared = sorted(r["shared"]["status"] for r in found)
    if shared != ["hit"] * (world - 1) + ["miss"]:
        problems.append(f"shared: {shared}")
    own = [r["own"]["status"] for r in found]
    if own != ["miss"] * world:
        problems.append(f"own: {own}")
    reason = next(r["shared"]["reason"] for r in found if r["shared"]["status"] == "miss")
    if other_world and "world: " not in reason:
        problems.append(f"the world is not named: {reason}")
    return problems


def judge_warm(found: list[Any], world: int, other_world: bool) -> list[str]:
    """All hit; after one entry was deleted all build, and know whose it was."""
    problems = [f"{k}: {r[k]['status']}" for r in found for k in ("shared", "own", "last") if r[k]["status"] != "hit"]
    deleted = [r["deleted"] for r in found]
    if [d["status"] for d in deleted] != ["miss"] * world:
        problems.append(f"deleted: {[d['status'] for d in deleted]}")
    problems += [d["reason"] for d in deleted[:-1] if f"rank {world - 1} had no entry" not in d["reason"]]
    return problems


def judge_killed(found: list[Any], world: int, other_world: bool) -> list[str]:
    """Every other rank ends within the timeout and names the one that is missing."""
    problems = [] if len(found) == world - 1 else [f"{len(found)} ranks have ended"]
    for r in found:
        if f"rank {world - 1} " not in r["error"] or not 2.5 < r["seconds"] < 15:
            problems.append(json.dumps(r))
    return problems


def worker(session: str, cache: Path, out: Path, engine: str) -> int:
    """One rank."""
    from cannopy.environment import import_torch

    import_torch()
    import torch

    from cannopy.backend.cache import agree, key, list_entries
    from tests.backend.programs import Tiny
    from tests.cache_faults.ranks import OwnGraph, compiled_by

    key.package_digest = lambda: "pinned"
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if session == "killed":
        class Killed(OwnGraph):
            """Not in the cache yet."""

        began = time.monotonic()
        try:
            compiled_by(Killed, cache, timeout=3.0,
                        during=(lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == world - 1 else None)
        except agree.RankError as e:
            said = {"error": str(e), "seconds": round(time.monotonic() - began, 1)}
            (out / f"{rank}.json").write_text(json.dumps(said))
        time.sleep(1.0)  # this process may hold the store
        return 0
    models = {"shared": Tiny, "own": OwnGraph}
    result = {name: compiled_by(cls, cache, 300.0, engine=engine) for name, cls in models.items()}
    if session == "warm":
        torch.distributed.barrier()
        if rank == world - 1:
            (entry,) = (e for e in list_entries(cache) if e.key == result["own"]["key"])
            shutil.rmtree(entry.path)
        torch.distributed.barrier()
        result["deleted"] = compiled_by(OwnGraph, cache, 300.0, engine=engine)
        result["last"] = compiled_by(OwnGraph, cache, 300.0, engine=engine)
    (out / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
