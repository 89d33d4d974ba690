"""Tiny models under many layouts on real ranks of this machine: `cannopy run MODEL --parallel …` as torchrun starts it.

    python tools/parallel_matrix.py [--models deepseek-v3.2 …] [--worlds 2 4 8] [--json FILE]

Each run compares every rank with eager mode on its own requests, prompts and a decode step. What takes the time is that
each rank starts and compiles: models have one layer of each kind, and ranks are forked from a process that has imported
everything, with the environment that torchrun gives. Prints a Markdown row per run, exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GROUPS = "ep={n},dp={n},dense_tp=2,o_proj_tp={n},embed_tp={n},lm_head_tp=2"
WIDTHS = "attn_tp={n},dense_tp={n},moe_tp={n},embed_tp={n},lm_head_tp={n}"
LAYERS: dict[str, dict[str, int]] = {
    "deepseek-v3.2": {"num_hidden_layers": 2}, "deepseek-r1": {"num_hidden_layers": 2},
    "kimi-k2": {"num_hidden_layers": 2}, "longcat-flash": {"num_layers": 1, "n_routed_experts": 16},
}
"""Sizes of each model that are not those of its preset ``tiny``."""
HEADS = 8
"""Heads of attention: as many as the largest ``attn_tp``."""


@dataclass(frozen=True)
class Case:
    """One run: ``layout`` with ``{n}`` for the number of ranks, which is one of ``worlds``."""

    model: str
    layout: str
    worlds: tuple[int, ...] = (2, 4, 8)
    form: str = "serving"
    phase: str = "both"


CASES = (
    Case("deepseek-v3.2", "ep={n},dp={n}", (2, 4), "stock"),
    Case("deepseek-v3.2", GROUPS),
    Case("deepseek-v3.2", WIDTHS, (2, 4)),
    Case("deepseek-v3.2", "cp={n}", phase="prefill"),
    Case("deepseek-v3.2", "attn_tp={n},sp={n},ep={n}", (4,), phase="prefill"),
    Case("deepseek-r1", GROUPS, (2, 4)),
    Case("deepseek-r1", "attn_tp={n},moe_tp={n}"),
    Case("deepseek-r1", "kvp={n},ep={n}"),
    Case("longcat-flash", "ep={n},dp={n}", (2,)),
    Case("longcat-flash", GROUPS, (4, 8)),
    Case("longcat-flash", WIDTHS, (2, 4)),
    Case("longcat-flash", "kvp={n}", (2, 4)),
    Case("kimi-k2", GROUPS, (2,)),
    Case("kimi-k2", "kvp={n}", (4,)),
)


def folders(into: Path) -> None:
    """A folder with the configuration of each model in ``into``: its weights are random ones of a seed."""
    import torch

    from cannopy.models import zoo

    for name, sizes in LAYERS.items():
        preset = zoo.preset(name, "tiny")
        with torch.device("meta"):
            model = zoo.build(replace(preset, config={**preset.config, **sizes, "num_attention_heads": HEADS,
                                                      "num_key_value_heads": HEADS}))
        config: Any = model.config
        config.save_pretrained(into / name)


def run(case: Case, world: int, folder: Path, seconds: float) -> dict[str, Any]:
    """The row of one run: its verdict in a word, and what rank 0 reported."""
    layout, start = case.layout.format(n=world), time.perf_counter()
    codes, out, err = ranks([*call(folder / case.model, case.form, case.phase), "--parallel", layout,
                             "--group-timeout", str(seconds)], world, folder, 2 * seconds)
    report: dict[str, Any] = {}
    if None in codes:
        verdict = "hangs"
    elif set(codes) <= {0, 1} and out.startswith("{"):
        verdict, report = "fails" if any(codes) else "holds", json.loads(out)
    else:
        said = [line for line in err.splitlines() if line.startswith("cannopy:")]
        verdict = said[0] if said else f"ended with {codes}"
    ratios = [r for rank in report.get("ranks", ()) for found in rank["error_ratios"].values() for r in found]
    return {"model": case.model, "form": case.form, "phase": case.phase, "ranks": world, "layout": layout,
            "verdict": verdict, "largest_ratio": max(ratios, default=None), "seconds": time.perf_counter() - start,
            "collectives": _collectives(report),
            "failures": [s for rank in report.get("ranks", ()) for s in rank["failures"]]}


def call(model: Path, form: str, phase: str = "both") -> list[str]:
    """The arguments of a run of ``model``."""
    drafts = ["--next-n", "1"] if form == "serving" else []
    return ["run", str(model), "--form", form, "--phase", phase, *drafts, "--steps", "1", "--batch", "2", "--no-cache",
            "--json"]


def ranks(arguments: list[str], world: int, folder: Path, seconds: float) -> tuple[list[int | None], str, str]:
    """Exit codes by rank, None for one that was still there after ``seconds``, and what rank 0 printed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    files = [folder / f"rank0.{name}" for name in ("out", "err")]
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _rank(arguments, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                  files if rank == 0 else [Path(os.devnull)] * 2)
        pids.append(pid)
    codes: dict[int, int | None] = dict.fromkeys(pids)
    end = time.monotonic() + seconds
    while (left := [pid for pid, code in codes.items() if code is None]) and time.monotonic() < end:
        for pid in left:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes[pid] for pid in pids], files[0].read_text(), files[1].read_text()


def _rank(arguments: list[str], environment: dict[str, str], files: list[Path]) -> None:
    """Be one rank; does not return."""
    from cannopy.cli import main as cannopy

    code = 70
    try:
        os.environ.update(environment)
        for fd, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
        code = cannopy(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


def _collectives(report: dict[str, Any]) -> dict[str, dict[str, int]]:
    """{phase: {operator: number}} of what exchanges in the lowered graphs."""
    return {phase: {op: n for op, n in found["ge_ops"].items() if op.startswith(("Hcom", "MoeDistribute"))}
            for phase, found in report.get("phases", {}).items()}


def cases(models: list[str], worlds: list[int]) -> Iterator[tuple[Case, int]]:
    """Every run, those of few ranks first."""
    for world in sorted(worlds):
        yield from ((case, world) for case in CASES if case.model in models and world in case.worlds)


def warm_up(folder: Path) -> int:
    """Run one die in this process, so that ranks find everything imported; not 0 where that fails."""
    from cannopy.cli import main as cannopy

    with contextlib.redirect_stdout(io.StringIO()):
        return cannopy(call(folder / "deepseek-r1", "serving"))


def line(row: dict[str, Any]) -> str:
    """``row`` as one of a Markdown table."""
    ratio = "" if row["largest_ratio"] is None else f"{row['largest_ratio']:.2f}"
    cells = (row["model"], row["form"], row["phase"], row["ranks"], f"`{row['layout']}`", row["verdict"], ratio,
             f"{row['seconds']:.0f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*LAYERS], default=[*LAYERS])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, default=600.0, help="what a rank waits for others; a run takes twice")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    print("| model | form | phases | ranks | layout | verdict | largest ratio | s |\n|---|---|---|---|---|---|---|---|")
    done = []
    with tempfile.TemporaryDirectory() as into:
        folders(Path(into))
        if warm_up(Path(into)):
            return 1
        for case, world in cases(args.models, args.worlds):
            done.append(run(case, world, Path(into), args.seconds))
            print(line(done[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    return int(any(row["verdict"] != "holds" for row in done))


if __name__ == "__main__":
    raise SystemExit(main())
