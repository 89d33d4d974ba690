"""Models on real ranks: captured once, cut, lowered by torchair and run by every rank, next to one die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy.fx_passes.parallel import Layout, Parallel
from tests.parallel import compiled, ranks, world

pytestmark = pytest.mark.usefixtures("activated")
R1, V32 = ("deepseek-r1", {"num_hidden_layers": 2}), ("deepseek-v3.2", {"num_hidden_layers": 2})
LONGCAT = ("longcat-flash", {"num_layers": 1})
EVERY = {"MoeDistributeDispatchV2": 1, "MoeDistributeCombineV2": 1}


@pytest.mark.parametrize(("model", "parallel"), [
    (R1, "ep=2,dp=2,dense_tp=2,o_proj_tp=2,embed_tp=2,lm_head_tp=2"),
    pytest.param(V32, "ep=4,dp=4,dense_tp=2,o_proj_tp=4", marks=pytest.mark.slow),
    pytest.param(LONGCAT, "ep=4,dp=4,dense_tp=2,o_proj_tp=2,lm_head_tp=4", marks=pytest.mark.slow),
    pytest.param(R1, "attn_tp=2,dp=2,ep=4,dense_tp=2,embed_tp=2", marks=pytest.mark.slow),
    pytest.param(R1, "ep=8,dp=8,dense_tp=4,embed_tp=8", marks=pytest.mark.slow),
], ids=lambda value: value if isinstance(value, str) else value[0])
def test_ranks_give_what_one_die_gives(model: tuple[str, dict[str, Any]], parallel: str, tmp_path: Path) -> None:
    """Requests of every replica; then all tokens to the same experts; then one rank without any token."""
    case, sizes = ranks.serving(model[0], **model[1]), Parallel.parse(parallel)
    one_die = compiled.compiled(case, None)
    replicas = sizes.dies // sizes.attn_tp
    plain = [compiled.call(one_die, case.call(replica)) for replica in range(replicas)]
    router = {n: t.detach().clone() for n, t in case.model.state_dict().items() if n.endswith("correction_bias")}
    compiled.one_choice(case.model)
    uneven = [compiled.call(one_die, case.call(replica)) for replica in range(replicas)]
    case.model.load_state_dict(router, strict=False)
    if router:
        chosen = torch.cat([pick.indices for pick in uneven[0].picks if pick.kind == "experts"]).sort(-1).values
        assert bool((chosen == chosen[0]).all())

    def work(rank: int) -> dict[str, int]:
        method = compiled.compiled(case, Layout(sizes, rank))
        replica = rank // sizes.attn_tp
        every = torch.ones(len(plain[replica].rows), dtype=torch.bool)
        compiled.assert_close(compiled.call(method, case.call(replica)), plain[replica], every)
        compiled.one_choice(case.model)
        compiled.assert_close(compiled.call(method, case.call(replica)), uneven[replica], every)
        case.model.load_state_dict(router, strict=False)
        if sizes.dp > 1:
            if replica == replicas - 1:
                args = compiled.idle(case.call(replica))
                before = compiled.caches(args)
                after = compiled.call(method, args).caches
                assert all(torch.equal(a[1:], b[1:]) for a, b in zip(after, before, strict=True))
            else:
                compiled.assert_close(compiled.call(method, case.call(replica)), plain[replica], every)
        ops: dict[str, int] = method.report["ge_ops"]
        return {name: count for name, count in ops.items() if name.startswith("MoeDistribute")}

    assert world.run(sizes.dies, work, tmp_path, seconds=240.0) == [EVERY] * sizes.dies
