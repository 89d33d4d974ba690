"""Stock DeepSeek-V3 with q_lora_rank None: no prolog, and the kernels that are left compute what the model does."""

from __future__ import annotations

import copy

import pytest

from cannopy.backend.host import kernels
from cannopy.frontend.capture import capture
from cannopy.frontend.state import prepare_state
from cannopy.fusion_rules import dialect
from cannopy.fx_passes import normalise
from cannopy.fx_passes.paths import compile_path
from tests.mutation import oracle
from tests.mutation.cases import compiled
from tests.rules.stock_changes import LAYERS, no_low_rank_queries


def test_it_computes_the_same_without_the_prolog(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = no_low_rank_queries(monkeypatch)
    kernels.register()
    dialect.register_all()
    prepare_state(model, args, kwargs)
    before = capture(model, "forward", args, kwargs)
    normalise.run(before)
    before.gm.recompile()
    values = {s.name: compile_path(s.source)(model, args, kwargs).detach().clone() for s in before.inputs}
    after = copy.deepcopy(before)
    done = compiled(after)
    counts = done.log.counts()
    assert (counts["fused_infer_attention"], counts["kv_rmsnorm_rope_cache"]) == (LAYERS, LAYERS)
    assert "mla_prolog" not in counts
    reasons = {m.reason for m in done.log.misses if m.rule == "mla_prolog"}
    assert len(reasons) == 1
    assert "as it is with q_lora_rank" in reasons.pop()
    ours, recorder = oracle.lowered(after, values)
    as_is, wide = (run(before, values, recorder.picks) for run in (oracle.plain, oracle.exact))
    assert oracle.wrong(ours, as_is, wide) == []
    doubled = oracle.Results([2 * t if t.is_floating_point() else t for t in ours.tensors])
    assert oracle.wrong(doubled, as_is, wide)
