"""Cut models on all ranks against eager, and the collectives that each layer has."""

from __future__ import annotations

import pytest

from cannopy.fx_passes.parallel import ParallelError
from tests.parallel import lockstep, ranks

DATA = "dp=2,o_proj_tp=2,dense_tp=2,embed_tp=2,lm_head_tp=2"
HEADS = "attn_tp=2,dense_tp=2,moe_tp=2,embed_tp=2,lm_head_tp=2"
R1, V32, LONGCAT = ("deepseek-r1", {"num_hidden_layers": 2}), ("deepseek-v3.2", {"num_hidden_layers": 2}), (
    "longcat-flash", {"num_layers": 1})


def counts(attention: int, dense: int, mixtures: int) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of `DATA` and of `HEADS` for a model with so many of each."""
    data = {"all_to_all_single o_proj_tp": attention, "reduce_scatter_tensor o_proj_tp": attention,
            "all_gather_into_tensor dense_tp": dense, "reduce_scatter_tensor dense_tp": dense,
            "all_gather_into_tensor embed_tp": 1, "reduce_scatter_tensor embed_tp": 1,
            "all_gather_into_tensor lm_head_tp": 1, "all_to_all_single lm_head_tp": 1}
    heads = {"all_reduce attn_tp": attention, "all_reduce dense_tp": dense, "all_reduce moe_tp": mixtures,
             "all_reduce embed_tp": 1, "all_gather_into_tensor lm_head_tp": 1}
    return data, heads


MODELS = [(R1, "decode", counts(2, 1, 1)), (V32, "decode", counts(2, 1, 1)), (LONGCAT, "decode", counts(2, 2, 1)),
          (R1, "prefill", counts(2, 1, 1)), (V32, "prefill", counts(2, 1, 1))]
TEXTS = [f"{model[0]} {phase}" for model, phase, _ in MODELS]


@pytest.mark.parametrize(("model", "phase", "collectives"), MODELS, ids=TEXTS)
def test_models(model: tuple[str, dict[str, int]], phase: str, collectives: tuple[dict[str, int], ...]) -> None:
    case = ranks.serving(model[0], phase, **model[1])
    for parallel, expected in zip((DATA, HEADS), collectives, strict=True):
        assert lockstep.collectives(ranks.cut(case.program, parallel, 1)) == expected
        for report in ranks.check(case, parallel):
            assert report.passed, report.failures


FOUR = ["dp=4,o_proj_tp=4,dense_tp=2,embed_tp=2,lm_head_tp=4",
        "attn_tp=2,dp=2,dense_tp=2,moe_tp=2,embed_tp=2,lm_head_tp=2"]


@pytest.mark.parametrize("parallel", FOUR)
def test_four_dies(parallel: str) -> None:
    for report in ranks.check(ranks.serving("deepseek-r1", num_hidden_layers=2), parallel):
        assert report.passed, report.failures


def test_heads_refused() -> None:
    case = ranks.serving("deepseek-r1", num_hidden_layers=2)
    for parallel, words in (
        ("attn_tp=8", "4 attention heads cannot be divided: 4 / 8 is no whole number"),
        ("attn_tp=2,dp=2,dense_tp=4", "dense_tp=4 does not fit attn_tp=2: .* 2 / 4 is no whole number"),
        ("attn_tp=2,o_proj_tp=2", "attn_tp cuts the output projections already"),
        ("moe_tp=2,ep=2", "experts are cut in width or spread, not both"),
    ):
        with pytest.raises(ParallelError, match=words):
            ranks.cut(case.program, parallel, 0)
    latents = ranks.cut(case.program, "attn_tp=4", 3)
    parameters = {spec.name for spec in latents.inputs}
    read = {e.recipe for e in latents.weights if any("kv_b" in s and s in parameters for s in e.sources)}
    assert read == {"w[0][768:1024]"}
    odd = ranks.serving("qwen2.5", num_attention_heads=6, num_key_value_heads=2, hidden_size=768).program
    with pytest.raises(ParallelError, match="6 query heads share 2 heads of keys: neither 2 / 3 nor 3 / 2"):
        ranks.cut(odd, "attn_tp=3", 0)
