"""Dispatch, combine and the collectives of the host engine between real processes, against dense formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy.backend import process_groups
from cannopy.backend.host import target
from cannopy.backend.host.kernels.moe_distribute_dispatch_v2 import UNUSED, WIDTH
from cannopy.fusion_rules.contracts import ContractError
from cannopy.fx_passes.parallel import Layout, Parallel
from tests.engine.test_by_hand import one
from tests.parallel import world

TOKENS, HIDDEN, EXPERTS, CHOICES = 5, 1024, 8, 3
COPIES, ZEROS, CONSTANTS = 2, 2, 1
SPECIAL = {"zero_expert_num": ZEROS, "copy_expert_num": COPIES, "const_expert_num": CONSTANTS}
npu = torch.ops.npu


def _tokens(rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(10 * rank + seed)).bfloat16()


def _ids(rank: int, kind: str, experts: int = EXPERTS) -> torch.Tensor:
    """The experts of a rank's tokens. ``one``: every token chooses expert 0, 1 and 2; ``last``: none chooses 0."""
    if kind == "one":
        return torch.arange(CHOICES, dtype=torch.int32).expand(TOKENS, CHOICES).contiguous()
    generator = torch.Generator().manual_seed(rank)
    low = 1 if kind == "last" else 0
    rows = [torch.randperm(experts - low, generator=generator)[:CHOICES] + low for _ in range(TOKENS)]
    return torch.stack(rows).int()


def _weights(rank: int) -> torch.Tensor:
    return torch.rand(TOKENS, CHOICES, generator=torch.Generator().manual_seed(99 + rank))


def _expert(rows: torch.Tensor, expert: int) -> torch.Tensor:
    """What expert ``expert`` makes of rows; exact in bfloat16 for a power of two."""
    return rows * 2.0 ** (expert - 3) * (-1) ** expert


def _dense(rank: int, ids: torch.Tensor, mask: torch.Tensor | None, shared: torch.Tensor | None,
           constants: list[torch.Tensor]) -> torch.Tensor:
    """The whole mixture on one rank in float64."""
    x, out = _tokens(rank).double(), torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for choice in range(CHOICES):
            if mask is not None and not bool(mask[token] if mask.dim() == 1 else mask[token, choice]):
                continue
            expert, weight = int(ids[token, choice]), float(_weights(rank)[token, choice])
            if expert < EXPERTS:
                out[token] += weight * _expert(x[token], expert)
            elif EXPERTS + ZEROS <= expert < EXPERTS + ZEROS + COPIES:
                out[token] += weight * x[token]
            elif expert >= EXPERTS + ZEROS + COPIES:
                alpha_1, alpha_2, v = (t[0].double() for t in constants)
                out[token] += weight * (alpha_1 * x[token] + alpha_2 * v)
    return out if shared is None else out + shared.double()


def _mixture(rank: int, layout: Layout, ids: torch.Tensor, mask: torch.Tensor | None = None,
             shared: torch.Tensor | None = None, special: dict[str, Any] | None = None, counted: int = 1,
             ) -> dict[str, torch.Tensor]:
    """Dispatch, this rank's experts on the rows that the counts give them, combine."""
    ranks = layout.size("ep")
    where = (layout.group("ep").name, ranks, layout.position("ep"), EXPERTS)
    numbers = {k: v for k, v in (special or {}).items() if isinstance(v, int)}
    x = _tokens(rank)
    rows, _, assist, tokens, counts, _, _ = npu.npu_moe_distribute_dispatch_v2(
        x, ids, *where, x_active_mask=mask, expert_token_nums_type=counted, **numbers)
    done, local = torch.full_like(rows, 4096.0), EXPERTS // ranks
    ends = tokens.cumsum(0) if counted == 1 else tokens
    for i, (a, b) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        done[a:b] = _expert(rows[a:b], layout.position("ep") * local + i)
    y = npu.npu_moe_distribute_combine_v2(done, ids, assist, counts, _weights(rank), *where, x_active_mask=mask,
                                          shared_expert_x=shared, **(special or {}))
    return {"y": y, "rows": rows, "tokens": tokens, "counts": counts}


def _close(y: torch.Tensor, want: torch.Tensor) -> None:
    """One rounding to bfloat16 of a float32 sum of few terms."""
    torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=1e-5)


def _layout(rank: int, text: str) -> Layout:
    layout = Layout(Parallel.parse(text), rank)
    process_groups.ensure(layout, 20.0, 20.0)
    return layout


def _check_mixtures(rank: int, ranks: int) -> None:
    layout = _layout(rank, f"ep={ranks},dp={ranks}")
    nothing: list[torch.Tensor] = []
    for kind in ("spread", "one", "last"):
        found = _mixture(rank, layout, _ids(rank, kind), counted=0 if kind == "last" else 1)
        _close(found["y"], _dense(rank, _ids(rank, kind), None, None, nothing))
        used, local = int(found["counts"][-1]), EXPERTS // ranks
        assert found["rows"].shape == (TOKENS * ranks * min(local, CHOICES), HIDDEN)
        assert bool((found["rows"][used:] == UNUSED).all())
        if kind == "one":
            assert used == TOKENS * ranks * max(0, min(local, CHOICES - rank * local))
    # a rank without tokens, one with some, and choices that are left out
    masks = [torch.zeros(TOKENS, dtype=torch.bool), torch.arange(TOKENS) < 2]
    mask = masks[min(rank, 1)]
    found = _mixture(rank, layout, _ids(rank, "spread"), mask)
    _close(found["y"][mask], _dense(rank, _ids(rank, "spread"), mask, None, nothing)[mask])
    chosen = torch.rand(TOKENS, CHOICES, generator=torch.Generator().manual_seed(rank)) < 0.5
    chosen[0] = True
    found = _mixture(rank, layout, _ids(rank, "spread"), chosen)
    kept = chosen.any(1)
    _close(found["y"][kept], _dense(rank, _ids(rank, "spread"), chosen, None, nothing)[kept])
    # experts that are none, and a shared expert
    constants = [_tokens(7, seed)[:CONSTANTS] for seed in (1, 2, 3)]
    ids = _ids(rank, "spread", EXPERTS + ZEROS + COPIES + CONSTANTS)
    special = SPECIAL | {"ori_x": _tokens(rank)} | dict(
        zip(("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"), constants, strict=True))
    shared = _tokens(rank, 5)
    found = _mixture(rank, layout, ids, shared=shared, special=special)
    _close(found["y"], _dense(rank, ids, None, shared, constants))


def _check_order(rank: int, ranks: int) -> None:
    """Rows by local expert, then source rank, then token."""
    layout = _layout(rank, f"ep={ranks},dp={ranks}")
    found = _mixture(rank, layout, _ids(rank, "spread"))
    local, at = EXPERTS // ranks, 0
    sums = []
    for expert in range(rank * local, (rank + 1) * local):
        for source in range(ranks):
            tokens = (_ids(source, "spread") == expert).any(1).nonzero().flatten()
            assert torch.equal(found["rows"][at : at + len(tokens)], _tokens(source)[tokens])
            at += len(tokens)
            sums.append(at)
    assert found["counts"].tolist() == sums


def _check_scales(rank: int, ranks: int) -> None:
    """On A2 the weights of the choices come with the rows, and combine takes them back."""
    layout = _layout(rank, f"ep={ranks},dp={ranks}")
    ids, group = _ids(rank, "spread"), layout.group("ep").name
    where = (group, ranks, layout.position("ep"), EXPERTS)
    with target.using("atlas-a2"):
        rows, _, assist, tokens, counts, _, scales = npu.npu_moe_distribute_dispatch_v2(
            _tokens(rank), ids, *where, expert_scales=_weights(rank), comm_alg="fullmesh", group_tp=group)
        used, local = int(tokens.sum()), EXPERTS // ranks
        origin = assist[: used * WIDTH].view(-1, WIDTH)[:, :3].tolist()
        assert scales[:used].tolist() == [float(_weights(source)[t, k]) for source, t, k in origin]
        assert bool((scales[used:] == 0).all())
        done = rows.clone()
        for i, (a, b) in enumerate(zip([0, *tokens.cumsum(0).tolist()], tokens.cumsum(0).tolist(), strict=False)):
            done[a:b] = _expert(rows[a:b], layout.position("ep") * local + i)
        y = npu.npu_moe_distribute_combine_v2(done, ids, assist, counts, _weights(rank), *where, expand_scales=scales,
                                              comm_alg="fullmesh", group_tp=group)
    _close(y, _dense(rank, ids, None, None, []))


def _check_refusals(rank: int, ranks: int) -> None:
    """Before anything is sent, so on one rank alone."""
    layout = _layout(rank, f"ep={ranks},dp={ranks}")
    twice = _ids(rank, "one").clone()
    twice[1, 1] = 0
    far = _ids(rank, "one").clone()
    far[2, 0] = EXPERTS
    mask = torch.tensor([True, False, True, True, True])
    for ids, given, words in ((twice, None, "expert-distinct"), (far, None, "expert-range"),
                              (_ids(rank, "one"), mask, "mask-order")):
        with pytest.raises(ContractError, match=words):
            _mixture(rank, layout, ids, given)


def _hcom(type_: str, x: torch.Tensor, group: str, *rest: torch.Tensor, **attrs: Any) -> torch.Tensor:
    names = ("x", *(f"in{i}" for i in range(len(rest))))
    return one(type_, [x, *rest], names, group=group, **attrs)[0]


def _check_collectives(rank: int, ranks: int) -> None:
    layout = _layout(rank, f"dp={ranks},o_proj_tp=2,embed_tp={ranks}")
    for kind, attribute in (("embed_tp", "text"), ("o_proj_tp", "name")):
        group = layout.group(kind)
        text = group.name if attribute == "name" else f"tag={group.name};rank_list={','.join(map(str, group.ranks))}"
        size, members = group.size, group.ranks
        for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.bool):
            xs = [(torch.randn(2 * size, 3, generator=torch.Generator().manual_seed(m)) * 9).to(dtype) for m in members]
            mine = xs[members.index(rank)]
            at = slice(2 * group.ranks.index(rank), 2 * group.ranks.index(rank) + 2)
            assert torch.equal(_hcom("HcomAllGather", mine, text, rank_size=size), torch.cat(xs))
            assert torch.equal(_hcom("HcomAllToAll", mine, text), torch.cat([x[at] for x in xs]))
            assert torch.equal(_hcom("HcomBroadcast", mine, text, root_rank=size - 1), xs[-1])
            if dtype is torch.bool:
                continue
            wide = [x.float() if dtype is torch.bfloat16 else x for x in xs]
            for how, want in (("sum", sum(wide[1:], wide[0])), ("max", torch.stack(wide).amax(0))):
                want = want.to(dtype)
                assert torch.equal(_hcom("HcomAllReduce", mine, text, reduction=how), want)
                part = _hcom("HcomReduceScatter", mine, text, reduction=how, rank_size=size)
                assert torch.equal(part, want[at])
        _check_uneven(rank, members, text)


def _check_uneven(rank: int, members: tuple[int, ...], text: str) -> None:
    """Member i sends (i + j) % 3 rows to member j, some none."""
    me, size, width = members.index(rank), len(members), 4
    sends = [[(i + j) % 3 for j in range(size)] for i in range(size)]
    parts = [[torch.full((sends[i][j], width), 10.0 * i + j) for j in range(size)] for i in range(size)]
    receive = [sends[i][me] for i in range(size)]
    found = _hcom("HcomAllToAllV", torch.cat(parts[me]), text, *_counts(sends[me], width), *_counts(receive, width))
    assert torch.equal(found, torch.cat([parts[i][me] for i in range(size)]))


def _counts(rows: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.tensor(rows) * width
    return counts, counts.cumsum(0) - counts


CHECKS: tuple[Callable[[int, int], None], ...] = (
    _check_mixtures, _check_order, _check_scales, _check_refusals, _check_collectives)


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("ranks", [2, 4])
def test_between_processes(ranks: int, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for check in CHECKS:
            check(rank, ranks)

    world.run(ranks, work, tmp_path)
