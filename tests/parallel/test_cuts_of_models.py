"""Cut models on all ranks against eager, and the collectives that each layer has."""

from __future__ import annotations

import pytest

from tests.parallel import lockstep, ranks

R1 = {"num_hidden_layers": 2}
LAYOUTS = [
    ("dp=2,dense_tp=2", {"all_gather_into_tensor dense_tp": 1, "reduce_scatter_tensor dense_tp": 1}),
    ("dp=4,o_proj_tp=4", {"all_to_all_single o_proj_tp": 2, "reduce_scatter_tensor o_proj_tp": 2}),
    ("dp=4,embed_tp=2,lm_head_tp=4", {
        "all_gather_into_tensor embed_tp": 1, "reduce_scatter_tensor embed_tp": 1,
        "all_gather_into_tensor lm_head_tp": 1, "all_to_all_single lm_head_tp": 1}),
    ("dp=8,dense_tp=8,o_proj_tp=8,embed_tp=8,lm_head_tp=8", None),
]


@pytest.mark.parametrize(("parallel", "collectives"), LAYOUTS, ids=[text for text, _ in LAYOUTS])
def test_deepseek_r1(parallel: str, collectives: dict[str, int] | None) -> None:
    case = ranks.serving("deepseek-r1", **R1)
    for report in ranks.check(case, parallel):
        assert report.passed, report.failures
    if collectives is not None:
        assert lockstep.collectives(ranks.cut(case.program, parallel, 0)) == collectives
