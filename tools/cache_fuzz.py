#!/usr/bin/env python3
"""Kills processes that share a compile cache, at random moments, and checks after every kill that nothing was lost.

    python tools/cache_fuzz.py --kills 500                 the store and the whole way through the eager engine
    python tools/cache_fuzz.py --kills 500 --mode store    the store alone
    python tools/cache_fuzz.py --kills 40 --mode torchair  real torchair compilations

A round: four processes at once look up two tiny models and build what is missing, one of them is killed (in one of
five rounds another prunes), then: every other process has succeeded, entries that were good still are, byte for byte,
and one more run succeeds and leaves both entries. Exit code 1 when anything else was seen. See docs/cache.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MODES = ("store", "eager", "torchair")


def main(argv: list[str] | None = None) -> int:
    """Run the rounds and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="processes to kill before they have finished (500)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after this time with fewer kills")
    parser.add_argument("--mode", choices=MODES, default="eager")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    from cannopy.environment import import_torch

    import_torch()
    from cannopy.backend.cache import key
    from tests.cache_faults.kills import Fuzz

    key.package_digest = lambda: "pinned"  # files of the package may be saved while this runs
    logging.getLogger("cannopy.backend").setLevel(logging.ERROR)
    start = time.time()
    with tempfile.TemporaryDirectory(prefix="cache-fuzz-") as folder:
        fuzz = Fuzz(Path(folder), args.mode, args.seed, args.processes)
        while fuzz.tally.killed < args.kills and time.time() - start < 60 * args.minutes:
            fuzz.round()
            if fuzz.tally.rounds % 50 == 0:
                t = fuzz.tally
                print(f"{t.rounds} rounds, {t.killed} kills, {len(t.problems)} problems, {time.time() - start:.0f} s",
                      file=sys.stderr, flush=True)
    tally = fuzz.tally
    print(json.dumps({
        "mode": args.mode, "rounds": tally.rounds, "processes killed before they had finished": tally.killed,
        "of them": dict(tally.landed), "problems": tally.problems,
        "seconds": round(time.time() - start),
    }, indent=1))
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
