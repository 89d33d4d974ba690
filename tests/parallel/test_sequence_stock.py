"""Rows of a prompt over dies in models of transformers, which give logits of all tokens from caches with heads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import lockstep, ranks
from tests.parallel.test_grouped_heads import Stock, compare

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.mark.parametrize(("architecture", "tokens", "sizes", "gathers"), [
    ("Llama", 4, {"tie_word_embeddings": True}, 2 + 1),
    ("Cohere", 16, {"eos_token_id": 1}, 2 + 1),
])
def test_rows_and_vocabulary(architecture: str, tokens: int, sizes: dict[str, Any], gathers: int) -> None:
    """The head's columns are cut though a gather of rows stands between it and the result. As many tokens as heads, and
    a model that adds attention and MLP at once, has norms written in full and stacks the halves of rotated pairs."""
    model = Stock(architecture, **sizes)
    case = ranks.of(model, "step", lambda seed: model.call(tokens, 0, seed, 1))
    parallel = "attn_tp=2,sp=2,dense_tp=2,embed_tp=2,lm_head_tp=2"
    assert lockstep.collectives(ranks.cut(case.program, parallel, 1)) == {
        f"{GATHER} attn_tp": gathers, f"{SCATTER} attn_tp": 2, f"{GATHER} dense_tp": 2, f"{SCATTER} dense_tp": 2,
        f"{SCATTER} embed_tp": 1, f"{GATHER} lm_head_tp": 1, "all_to_all_single lm_head_tp": 1}
    compare(case, parallel, case.call(1))
