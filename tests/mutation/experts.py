"""Mutations of routed experts and of the shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import EXPERTS, Edit, Operator, calls, through, user

Skip = tuple[fx.Node, fx.Node, fx.Node]


@dataclass
class Routed:
    """Experts over sorted tokens."""

    sort: fx.Node
    perm: fx.Node
    token: fx.Node
    rows: fx.Node
    histc: fx.Node
    cumsum: fx.Node
    first: fx.Node
    second: fx.Node
    scale: fx.Node
    weighted: fx.Node
    inverse: fx.Node
    unsorted: fx.Node
    total: fx.Node
    result: fx.Node


def routed(p: Program) -> list[Routed]:
    """Every expert block in the form of grouped_mm."""
    found = []
    for sort in calls(p, aten.sort.default):
        perm = next(u for u in sort.users if u.args[1] == 1)
        token = user(perm, aten.floor_divide.default)
        first, second = calls(p, aten._grouped_mm.default)[:2]
        weighted = user(second, aten.mul.Tensor)
        unsorted = user(weighted, aten.index.Tensor)
        total = user(user(unsorted, aten.reshape.default), aten.sum.dim_IntList)
        scale = next(u for u in perm.users if is_call(u, aten.index.Tensor))
        found.append(Routed(sort, perm, token, user(token, aten.index.Tensor), calls(p, aten.histc.default)[0],
                            calls(p, aten.cumsum.default)[0], first, second, scale, weighted,
                            user(perm, aten.index_put.default), unsorted, total,
                            user(total, aten._to_copy.default) or total))
    return found


def _descending(e: Edit, r: Routed) -> None:
    e.become(r.sort, aten.sort.default, r.sort.args[0], -1, True)


def _stable(e: Edit, r: Routed) -> None:
    e.become(r.sort, aten.sort.stable, r.sort.args[0], stable=True)


def _token_plus_one(e: Edit, r: Routed) -> None:
    plus = e.before(r.rows, aten.add.Tensor, r.token, 1)
    e.become(r.rows, aten.index.Tensor, r.rows.args[0], [e.before(r.rows, aten.remainder.Scalar, plus,
                                                                  shape(r.rows.args[0])[0])])


def _token_remainder(e: Edit, r: Routed) -> None:
    e.become(r.token, aten.remainder.Scalar, r.perm, shape(r.rows.args[0])[0])


def _histc_range(e: Edit, r: Routed) -> None:
    bins = r.histc.args[1]
    e.become(r.histc, aten.histc.default, r.histc.args[0], bins, e.rng.choice([(0, bins), (1, bins - 1)])[0],
             e.rng.choice([bins, bins - 1]) if e.rng.random() < 0.5 else bins)


def _weights_unsorted(e: Edit, r: Routed) -> None:
    """The weights keep their old order."""
    e.bypass(r.scale, r.scale.args[0])


def _weights_dropped(e: Edit, r: Routed) -> None:
    e.bypass(r.weighted, r.second)


def _weights_before_down(e: Edit, r: Routed) -> None:
    """The weight multiplies the input of the down projection."""
    hidden: Any = r.second.args[0]
    scale = next(a for a in r.weighted.args if a is not r.second)
    narrow = scale if dtype(scale) == dtype(hidden) else e.before(r.second, aten._to_copy.default, scale,
                                                                  dtype=dtype(hidden))
    if narrow is scale:
        r.second.prepend(scale)
    else:
        narrow.prepend(scale)
    wide = dtype(r.weighted)
    e.swap_input(r.second, hidden, e.before(r.second, aten.mul.Tensor, hidden, narrow))
    out = r.second if dtype(r.second) == wide else e.before(r.weighted, aten._to_copy.default, r.second, dtype=wide)
    e.bypass(r.weighted, out)


def _weights_one_column(e: Edit, r: Routed) -> None:
    scale = next(a for a in r.weighted.args if a is not r.second)
    e.swap_input(r.weighted, scale, e.before(r.weighted, aten.slice.Tensor, scale, 0, 0, 1))


def _not_unsorted(e: Edit, r: Routed) -> None:
    e.bypass(r.unsorted, r.weighted)


def _unsorted_by_perm(e: Edit, r: Routed) -> None:
    e.become(r.unsorted, aten.index.Tensor, r.weighted, [r.perm])


def _argsort(e: Edit, r: Routed) -> None:
    e.bypass(r.inverse, e.before(r.inverse, aten.argsort.default, r.perm))


def _inverse_shifted(e: Edit, r: Routed) -> None:
    count = shape(r.perm)[0]
    plus = e.before(r.unsorted, aten.add.Tensor, r.inverse, 1)
    e.become(r.unsorted, aten.index.Tensor, r.weighted, [e.before(r.unsorted, aten.remainder.Scalar, plus, count)])


def _mean_of_experts(e: Edit, r: Routed) -> None:
    e.become(r.total, aten.mean.dim, *r.total.args)


def _largest_of_experts(e: Edit, r: Routed) -> None:
    e.become(r.total, aten.amax.default, *r.total.args)


def _same_expert(which: str) -> Any:
    def apply(e: Edit, r: Routed) -> None:
        grouped: fx.Node = getattr(r, which)
        weight: Any = grouped.args[1]
        source = through(weight, aten.permute.default)
        one = e.before(weight, aten.slice.Tensor, source, 0, 0, 1)
        e.swap_input(weight, source, e.before(weight, aten.expand.default, one, list(shape(source))))

    return apply


def _weight_scaled(e: Edit, r: Routed) -> None:
    grouped: fx.Node = e.rng.choice([r.first, r.second])
    weight: Any = grouped.args[1]
    e.swap_input(grouped, weight, e.before(grouped, aten.mul.Tensor, weight, e.factor()))


def _weight_flipped(e: Edit, r: Routed) -> None:
    """Expert e has the weights of expert E - 1 - e."""
    grouped: fx.Node = e.rng.choice([r.first, r.second])
    weight: Any = grouped.args[1]
    e.swap_input(grouped, weight, e.before(grouped, aten.flip.default, weight, [0]))


def _weight_read_elsewhere(e: Edit, r: Routed) -> None:
    weight = through(r.first.args[1], aten.permute.default)
    e.returned(e.before(r.first, aten.select.int, weight, 0, 0))


def _rows_scaled(e: Edit, r: Routed) -> None:
    e.after(r.rows, aten.mul.Tensor, e.factor())


def _other_offsets(e: Edit, r: Routed) -> None:
    """The second product counts the experts' tokens backwards."""
    flipped = e.before(r.second, aten.flip.default, r.histc, [0])
    ends = e.before(r.second, aten.cumsum.default, flipped, 0, dtype=torch.int32)
    e.become(r.second, aten._grouped_mm.default, *r.second.args[:2], ends)


def _offsets_shifted(e: Edit, r: Routed) -> None:
    """Each expert takes one token of the next: ends + 1 except the last."""
    experts, count = shape(r.cumsum)[0], shape(r.perm)[0]
    plus = e.after(r.cumsum, aten.add.Tensor, 1, users=[])
    capped = e.after(plus, aten.clamp_max.default, count, users=[])
    del experts
    for grouped in (r.first, r.second):
        e.swap_input(grouped, r.cumsum, capped)


def skips(p: Program) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """(sum, routed part, shared part) of blocks with a shared expert."""
    found = []
    for r in routed(p):
        node = user(r.result, aten.reshape.default) or r.result
        total = user(node, aten.add.Tensor)
        if total is not None:
            found.append((total, node, next(a for a in total.args if a is not node)))
    return found


def _shared_subtracted(e: Edit, s: Skip) -> None:
    e.become(s[0], aten.sub.Tensor, s[1], s[2])


def _shared_swapped(e: Edit, s: Skip) -> None:
    e.become(s[0], aten.add.Tensor, s[2], s[1])


def _shared_dropped(e: Edit, s: Skip) -> None:
    e.bypass(s[0], s[1])


def _shared_scaled(e: Edit, s: Skip) -> None:
    e.swap_input(s[0], s[2], e.before(s[0], aten.mul.Tensor, s[2], e.factor()))


def _routed_scaled(e: Edit, s: Skip) -> None:
    e.swap_input(s[0], s[1], e.before(s[0], aten.mul.Tensor, s[1], e.factor()))


def _shared_gated(e: Edit, s: Skip) -> None:
    """Qwen2-MoE: the shared expert behind a sigmoid gate."""
    gate = e.before(s[0], aten.sigmoid.default, s[2])
    e.swap_input(s[0], s[2], e.before(s[0], aten.mul.Tensor, s[2], gate))


def _shared_one_row(e: Edit, s: Skip) -> None:
    dims = [d for d in range(len(shape(s[2]))) if shape(s[2])[d] > 1]
    e.swap_input(s[0], s[2], e.before(s[0], aten.slice.Tensor, s[2], e.rng.choice(dims), 0, 1))


def _shared_returned(e: Edit, s: Skip) -> None:
    e.returned(s[2])


def _shared_alpha(e: Edit, s: Skip) -> None:
    e.become(s[0], aten.add.Tensor, s[1], s[2], alpha=2)


def _shared_number(e: Edit, s: Skip) -> None:
    e.become(s[0], aten.add.Tensor, s[1], 0.5)


OPERATORS = (
    Operator("experts_sorted_downwards", EXPERTS, routed, _descending, words=("upwards", "sort")),
    Operator("experts_sorted_stably", EXPERTS, routed, _stable, legal=True, same=True),
    Operator("experts_token_off_by_one", EXPERTS, routed, _token_plus_one, words=("remainder", "floor_divide")),
    Operator("experts_token_by_remainder", EXPERTS, routed, _token_remainder, words=("remainder", "floor_divide")),
    Operator("experts_count_range", EXPERTS, routed, _histc_range, words=("histc",)),
    Operator("experts_weights_unsorted", EXPERTS, routed, _weights_unsorted, words=("index", "reshape", "weights")),
    Operator("experts_weights_dropped", EXPERTS, routed, _weights_dropped, words=("mul", "_grouped_mm")),
    Operator("experts_weights_before_down", EXPERTS, routed, _weights_before_down, words=("mul", "_grouped_mm")),
    Operator("experts_one_weight", EXPERTS, routed, _weights_one_column, words=("slice", "weights")),
    Operator("experts_stay_sorted", EXPERTS, routed, _not_unsorted, words=("index", "mul")),
    Operator("experts_unsorted_by_permutation", EXPERTS, routed, _unsorted_by_perm, words=("index_put", "getitem")),
    Operator("experts_inverse_by_argsort", EXPERTS, routed, _argsort, legal=True, same=True),
    Operator("experts_inverse_off_by_one", EXPERTS, routed, _inverse_shifted, words=("remainder", "index_put")),
    Operator("experts_mean", EXPERTS, routed, _mean_of_experts, words=("mean", "sum")),
    Operator("experts_largest", EXPERTS, routed, _largest_of_experts, words=("amax", "sum")),
    Operator("experts_gate_up_of_first", EXPERTS, routed, _same_expert("first"), words=("weight", "parameter")),
    Operator("experts_down_of_first", EXPERTS, routed, _same_expert("second"), words=("weight", "parameter")),
    Operator("experts_weight_computed", EXPERTS, routed, _weight_scaled, words=("weight", "parameter")),
    Operator("experts_weight_flipped", EXPERTS, routed, _weight_flipped, words=("weight", "parameter")),
    Operator("experts_weight_read_elsewhere", EXPERTS, routed, _weight_read_elsewhere, legal=True),
    Operator("experts_rows_scaled", EXPERTS, routed, _rows_scaled, words=("mul", "index")),
    Operator("experts_second_offsets_differ", EXPERTS, routed, _other_offsets, words=("flip", "histc", "cumsum")),
    Operator("experts_offsets_off_by_one", EXPERTS, routed, _offsets_shifted, words=("clamp", "cumsum", "add")),
    Operator("shared_expert_subtracted", EXPERTS, skips, _shared_subtracted, legal=True),
    Operator("shared_expert_swapped", EXPERTS, skips, _shared_swapped, legal=True, same=True),
    Operator("shared_expert_dropped", (), skips, _shared_dropped),
    Operator("shared_expert_scaled", EXPERTS, skips, _shared_scaled, legal=True),
    Operator("routed_experts_scaled", EXPERTS, skips, _routed_scaled, legal=True),
    Operator("shared_expert_gated", EXPERTS, skips, _shared_gated, legal=True),
    Operator("shared_expert_one_row", EXPERTS, skips, _shared_one_row, legal=True),
    Operator("shared_expert_returned", EXPERTS, skips, _shared_returned, legal=True),
    Operator("shared_expert_alpha", EXPERTS, skips, _shared_alpha, legal=True),
    Operator("shared_expert_is_number", EXPERTS, skips, _shared_number),
)
