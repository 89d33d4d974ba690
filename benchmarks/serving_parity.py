"""Parity of the zoo's serving models: each model, phase and batch compiled once, called with many data, as a table.

    python -m benchmarks.serving_parity [--model NAME …] [--phase prefill decode] [--json FILE]

Small models with the head and rank sizes that the fused operators fix, two layers (LongCat: one of two attentions),
random weights. Lengths are ragged and lie at and around the end of a block, requests are empty or full, packed rows
have padding. The float64 and the plain bf16 run make the same picks as the compiled one (see docs/parity.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import cannopy
from cannopy.frontend.generation import Phase
from cannopy.frontend.serving import ServingCase
from cannopy.models import zoo
from cannopy.models.requests import Requests
from cannopy.parity import serving
from cannopy.parity.measure import ParityReport

PHASES: tuple[Phase, ...] = ("prefill", "decode")
SHAPES = {"deepseek-v3.2": [(1, 3), (3, 1), (8, 0)], "deepseek-r1": [(1, 2), (3, 1), (8, 3)],
          "kimi-k2": [(1, 0), (3, 1), (8, 2)], "longcat-flash": [(1, 1), (3, 0), (8, 2)],
          "qwen2.5": [(1, 3), (3, 1), (8, 1)], "qwen3-moe": [(1, 2), (3, 0), (8, 0)]}
"""Batch and drafts per request and step."""
BLOCK = {"prefill": 16, "decode": 128}
ROUNDS = 4
"""Calls per compiled graph."""
VOCABULARY = 64
SMALL = {"num_layers": 1, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "intermediate_size": 256,
         "ffn_hidden_size": 256, "moe_intermediate_size": 128, "index_topk": 24, "expert_ffn_hidden_size": 128}


def case(name: str, batch: int, next_n: int, phase: Phase) -> ServingCase:
    """A small model of the zoo's ``name`` and the shapes of its calls."""
    preset = zoo.preset(name, "tiny")
    sizes = {k: v for k, v in SMALL.items() if k in preset.config}
    model = zoo.build_serving(replace(preset, config={**preset.config, **sizes}))
    prompt = {1: 40, 3: 33, 8: 18}[batch] if phase == "prefill" else 64
    return ServingCase(model, batch, prompt, 2 * BLOCK["decode"], 0, next_n, BLOCK[phase])


def compiled(one: ServingCase, phase: Phase, options: cannopy.Options) -> cannopy.Compiled:
    """The phase of ``one``, compiled for its shapes."""
    args, _ = one.inputs(phase)
    return cannopy.compile(one.model, phase, args, options=replace(options, phase=phase))


def call(one: ServingCase, phase: Phase, requests: Requests, lengths: Sequence[int]) -> tuple[Any, ...]:
    """Arguments of one call with ``lengths`` tokens per request.

    A prefill reads prompts of these lengths, shortened until they fit into the packed row that is compiled. A decode
    step stands behind so many tokens; what the cache holds there is random.
    """
    generator = torch.Generator().manual_seed(sum(lengths))
    if phase == "decode":
        requests.lengths = list(lengths)
        return one.decode(torch.randint(0, VOCABULARY, (one.batch, 1 + one.next_n), generator=generator), requests)[0]
    lengths = list(lengths)
    while sum(lengths) > one.packed_tokens:
        lengths = [max(1, n - 1) for n in lengths]
    requests.lengths = [0] * one.batch
    ids = torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator)
    padding = one.packed_tokens - sum(lengths)
    return (*requests.prefill_inputs(list(ids.split(lengths)), padding), requests.cache)


def edges(one: ServingCase, phase: Phase) -> list[list[int]]:
    """Lengths per request, per call: around the end of a block before and after the step, first, last and ragged."""
    block, step = one.block_size, 1 + one.next_n
    if phase == "prefill":
        around = [block - 1, block, block + 1, 1, 2 * block, 5]
    else:
        around = [block, block - 1, block - step, block + 1, 0, 2 * block - step, block - step + 1, 17]
    return [[around[(b + r) % len(around)] for b in range(one.batch)] for r in range(ROUNDS)]


def measure(one: ServingCase, phase: Phase, found: cannopy.Compiled) -> ParityReport:
    """Call ``found`` with the lengths of `edges` and compare."""
    requests = one.new_requests()
    serving.fill(requests.cache, one.seed)
    steps = [serving.run(one, {phase: found}, phase, call(one, phase, requests, lengths))
             for lengths in edges(one, phase)]
    return serving.check(one, steps)[0]


def rows(names: Sequence[str], phases: Sequence[Phase]) -> Iterator[dict[str, Any]]:
    """One row per model, batch and phase: the report, and what was fused."""
    for name in names:
        for batch, next_n in SHAPES[name]:
            for phase in phases:
                one = case(name, batch, next_n, phase)
                found = compiled(one, phase, cannopy.Options(use_cache=False))
                report = measure(one, phase, found)
                yield {"model": name, "phase": phase, "batch": batch, "next_n": next_n,
                       "fusions": found.report.fusions, "kernels": sum(found.report.kernels.values()),
                       "parity": report.to_dict()}


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    parity = row["parity"]
    errors = {e["phase"].removeprefix(f"{row['phase']} "): e for e in parity["errors"]}

    def ratios(names: Sequence[str]) -> str:
        found = [errors[n]["compiled"]["median"] / errors[n]["plain"]["median"] for n in names]
        return f"{max(found):.2f}"

    caches = [name for name in errors if name.startswith("cache ")]
    writes = parity["writes"]
    worst = max((p["worst"] for p in parity["picks"]), default=0.0)
    verdict = "holds" if parity["passed"] else "; ".join(parity["failures"])
    drafts = row["next_n"] if row["phase"] == "decode" else ""
    return (f"| {row['model']} | {row['phase']} | {row['batch']} | {drafts} | {errors['logits']['compiled']['tokens']} "
            f"| {ratios(['logits', 'hidden'])} | {ratios(caches)} | {worst:.2f} "
            f"| {sum(w['changed'] for w in writes)} of {sum(w['outside'] for w in writes)} | {verdict} |")


HEAD = ["| model | phase | batch | drafts | rows | error, results | error, cache | worst pick | rows changed outside "
        "| parity |", "|---|---|---|---|---|---|---|---|---|---|"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--phase", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    print("\n".join(HEAD), flush=True)
    done = []
    for row in rows(args.model, args.phase):
        done.append(row)
        print(line(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
