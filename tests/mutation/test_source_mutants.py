"""One change in the source of a stock module, captured anew: same result fused or not, and a reason that names it."""

from __future__ import annotations

import copy

import pytest

from cannopy.backend.host import kernels
from cannopy.frontend.capture import capture
from cannopy.fusion_rules import catalog, dialect
from cannopy.fx_passes import normalise
from cannopy.fx_passes.paths import compile_path
from tests.mutation import oracle
from tests.mutation.cases import compiled
from tests.mutation.sources import MODULES, MUTANTS, SourceMutant, mutated

OF = {"norm": {"rms_norm"}, "mlp": {"swiglu"}, "router": {"moe_gating_top_k", "moe_experts", "swiglu"}}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.module}: {m.new[:40]}")
def test_mutant(mutant: SourceMutant) -> None:
    kernels.register()
    dialect.register_all()
    module, x, cls = MODULES[mutant.module]()
    with mutated(cls, mutant.old, mutant.new):
        program = capture(module, "forward", (x,))
    values = {s.name: compile_path(s.source)(module, (x,), {}).detach().clone() for s in program.inputs}
    normalise.run(program)
    after = copy.deepcopy(program)
    done = compiled(after)
    ours, recorder = oracle.lowered(after, values)
    as_is, wide = (run(program, values, recorder.picks) for run in (oracle.plain, oracle.exact))
    assert oracle.wrong(ours, as_is, wide) == []
    counts = done.log.counts()
    assert set(mutant.fuses) <= set(counts), [m.reason for m in done.log.misses]
    lost = OF[mutant.module] - set(counts)
    assert lost <= set(catalog.groups())
    if lost:
        texts = [f"{m.reason} {m.node} {m.source}" for m in done.log.misses]
        assert any(word in text for text in texts for word in mutant.words), texts
