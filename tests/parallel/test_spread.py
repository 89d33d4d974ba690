"""Picks of prompts whose tokens are spread over ranks, put together on all of them; runs with such layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cannopy.backend import process_groups
from cannopy.fx_passes.parallel import Layout, Parallel
from cannopy.parity import spread
from cannopy.parity.picks import Pick, ReplayError
from tests.parallel import world
from tests.parallel.test_cli import ranks_of


def test_layouts_that_spread_nothing() -> None:
    assert spread.of(None) is None
    assert spread.of(Layout(Parallel(ep=4), 1)) is None


@pytest.mark.parametrize(("layout", "first"), [("cp=2", [0, 1, 6, 7]), ("attn_tp=2,sp=2", [0, 1, 2, 3])])
def test_rows_of_all_ranks(layout: str, first: list[int], tmp_path: Path) -> None:
    """Experts of own tokens, keys segment by segment in any order, and what every rank has picked for all tokens."""
    sizes = Parallel.parse(layout)
    experts = torch.arange(16).view(8, 2)
    keys = experts + 100

    def work(rank: int) -> str:
        found = spread.of(Layout(sizes, rank))
        assert found is not None
        process_groups.ensure(found.layout, 20.0, 20.0)
        rows = found.rows(8, rank)
        assert rank or rows.tolist() == first
        parts = rows.split(2)[:: 1 if rank else -1]
        picks = [Pick("keys", keys[part], None, int(part[-1]) + 1) for part in parts]
        picks += [Pick("experts", experts[rows], 16), Pick("topk", experts, 16)]
        joined = found.whole(picks, 8)
        assert [p.kind for p in joined] == ["keys", "experts", "topk"]
        assert torch.equal(joined[0].indices, keys)
        assert torch.equal(joined[1].indices, experts)
        assert torch.equal(joined[2].indices, experts)
        for wrong in (experts[:3], torch.cat((experts[:3], experts[:3]))):
            with pytest.raises(ReplayError, match="a rank has 4 of 8 tokens"):
                found.whole([Pick("experts", wrong, 16)], 8)
        return "ok"

    assert world.run(2, work, tmp_path, seconds=60.0) == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.usefixtures("activated")
def test_prompts_of_a_run(tmp_path: Path) -> None:
    asked = ["run", "deepseek-v3.2", "--form", "serving", "--batch", "2", "--steps", "1", "--no-cache", "--phase",
             "prefill", "--parallel", "cp=2", "--group-timeout", "200", "--json"]
    (code, out, said), (other, silence, _) = ranks_of(2, asked, tmp_path)
    assert (code, other, silence) == (0, 0, ""), said
    picks = {p["kind"]: p["tokens"] for p in json.loads(out)["parity"]["picks"] if p["phase"] == "prefill"}
    assert picks["keys"] == 4 * picks["experts"] / 3
