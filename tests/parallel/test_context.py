"""Prompts split over dies by tokens: every rank gives the results and the caches of one die."""

from __future__ import annotations

import pytest
import torch

from cannopy.fx_passes.parallel import ParallelError
from tests.parallel import lockstep, ranks

RAGGED = (3, 17, 4)
"""Prompts that end within segments; some segments have no token of some prompts."""
V32 = {"num_hidden_layers": 2, "index_topk": 8}


def error(found: torch.Tensor, single: torch.Tensor) -> float:
    return float((found.double() - single.double()).norm() / single.double().norm())


def compare(case: ranks.Case, parallel: str, limit: float) -> None:
    """All ranks next to one die."""
    programs, args = ranks.cuts(case, parallel), case.call(0)
    found = lockstep.run(programs, [ranks.values(case, program, args) for program in programs])
    (single,) = lockstep.run([case.program], [ranks.values(case, case.program, args)])
    for rank in found:
        for ours, expected in zip(rank.outputs, single.outputs, strict=True):
            assert error(ours, expected) < limit
        for name, expected in single.inputs.items():
            assert error(rank.inputs[name], expected) < limit or torch.equal(rank.inputs[name], expected)


@pytest.mark.parametrize(("name", "sizes", "gathered"), [
    ("deepseek-r1", {"num_hidden_layers": 2}, 3), ("deepseek-v3.2", V32, 7)])
def test_prompts(name: str, sizes: dict[str, int], gathered: int) -> None:
    """Latents and rotated parts of each layer (and keys of the indexer) and the result are gathered, nothing else."""
    case = ranks.serving(name, "prefill", RAGGED, **sizes)
    assert lockstep.collectives(ranks.cut(case.program, "cp=4", 2)) == {"all_gather_into_tensor cp": gathered}
    if name == "deepseek-v3.2":
        compare(case, "cp=4", 2e-3)  # only products of another number of rows may round otherwise
    else:
        compare(case, "cp=2,embed_tp=2,lm_head_tp=2", 2e-3)
        compare(case, "cp=4,o_proj_tp=2,dense_tp=4", 1.5e-2)  # partial sums in bfloat16: 1.5 × eager's own 1e-2
        for report in ranks.check(case, "cp=2"):  # next to eager in float64: limits of rounding
            assert report.passed, report.failures


def test_refused() -> None:
    case = ranks.serving("deepseek-r1", "prefill", RAGGED, num_hidden_layers=2)
    for parallel, words in (
        ("cp=5", r"24 tokens cannot be divided into 2 · 5 segments: 24 / 10 is no whole number; pad the prompt"),
        ("cp=2,dp=4", r"dp=4: 4 dies, of which cp = 2 have the same requests, are 4 / 2 = 2 replicas"),
        ("cp=2,ep=4", "a prompt is split over all dies"),
        ("cp=2,attn_tp=2", "a prompt is split over all dies, and heads are whole"),
    ):
        with pytest.raises(ParallelError, match=words):
            ranks.cut(case.program, parallel, 0)
    decode = ranks.serving("deepseek-r1", num_hidden_layers=2)
    with pytest.raises(ParallelError, match="this attention cannot be split by tokens"):
        ranks.cut(decode.program, "cp=2", 0)
