#!/usr/bin/env python3
"""Mutation testing of the fusion rules: thousands of changed graphs, each lowered and compared with itself.

    python tools/mutate.py --runs 5000 --seed 0 --json out/mutation.json
    python tools/mutate.py --operator router_fill_zero --runs 20
    python tools/mutate.py --case qwen3 --operator norm_eps --seed 17      one mutant again, with its reasons

Exit code 1 when a result is wrong. A mutant is one change (tests/mutation) of a captured one-layer model; see
docs/mutation.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(argv: list[str] | None = None) -> int:
    """Run mutants and summarise them."""
    args = _arguments(argv)
    from cannopy.environment import import_torch

    import_torch()
    import torch
    import torch_npu  # noqa: F401 defines torch.ops.npu

    torch.set_num_threads(1)
    from tests.mutation import trial

    outcomes: list[trial.Outcome] = []
    start = time.time()
    for i in range(args.runs):
        if args.minutes and time.time() - start > 60 * args.minutes:
            break
        seed = args.seed + i
        found = trial.drawn(seed, args.case, args.operator)
        outcomes.append(found)
        if found.wrong or found.silent or (found.legal and found.lost) or args.runs == 1 or args.verbose:
            _print(found)
        if (i + 1) % 50 == 0:
            made = sum(o.made for o in outcomes)
            wrong = sum(bool(o.wrong) for o in outcomes)
            print(f"{i + 1} runs, {made} mutants, {wrong} wrong, {time.time() - start:.0f} s", file=sys.stderr,
                  flush=True)
    summary = _summary(outcomes, args.seed, time.time() - start)
    print(json.dumps(summary, indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary | {"wrong": [
            {"command": o.command, "what": o.wrong} for o in outcomes if o.wrong]}, indent=2))
    return 1 if summary["wrong_results"] else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--minutes", type=float, help="stop after so many minutes, whatever --runs says")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--operator", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(argv)


def _print(o) -> None:  # type: ignore[no-untyped-def]
    state = "WRONG" if o.wrong else "SILENT" if o.silent else "LOST" if o.legal and o.lost else "ok"
    print(f"{state} {o.command}  [{o.touched[:120]}] lost {o.lost} exposed {o.exposed} made {o.made}")
    for text in [*o.wrong, *(f"no reason: {s}" for s in o.silent), *o.reasons]:
        print("    " + text.replace("\n", "\n    ")[:1500])
    sys.stdout.flush()


def _summary(outcomes, seed: int, seconds: float) -> dict:  # type: ignore[no-untyped-def]
    made = [o for o in outcomes if o.made]
    legal = [o for o in made if o.legal]
    meant = [o for o in made if o.exposed is not None]
    return {
        "first_seed": seed,
        "runs": len(outcomes),
        "mutants": len(made),
        "operators": len({o.operator for o in made}),
        "wrong_results": sum(bool(o.wrong) for o in made),
        "exposed": sum(bool(o.exposed) for o in meant),
        "meant_to_change": len(meant),
        "legal": len(legal),
        "legal_fused": sum(not o.lost for o in legal),
        "with_lost_fusions": sum(bool(o.lost) for o in made),
        "without_naming_reason": sum(bool(o.silent) for o in made),
        "seconds": round(seconds),
        "legal_not_fused_by_operator": dict(Counter(o.operator for o in legal if o.lost).most_common()),
        "silent_by_operator": dict(Counter(o.operator for o in made if o.silent).most_common()),
        "unexposed_by_operator": dict(Counter(o.operator for o in meant if not o.exposed).most_common()),
    }


if __name__ == "__main__":
    sys.exit(main())
