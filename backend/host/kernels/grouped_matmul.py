"""npu_grouped_matmul on the CPU, unquantised."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ....fusion_rules.contracts import value_error

Tensors = Sequence[torch.Tensor]
OP = "npu_grouped_matmul"


def npu_grouped_matmul(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Tensors | None = None,
    scale: Tensors | None = None,
    offset: Tensors | None = None,
    antiquant_scale: Tensors | None = None,
    antiquant_offset: Tensors | None = None,
    per_token_scale: Tensors | None = None,
    group_list: torch.Tensor | None = None,
    activation_input: Tensors | None = None,
    activation_quant_scale: Tensors | None = None,
    activation_quant_offset: Tensors | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:
    """``y_g = x_g @ weight_g + bias_g`` for each group g of rows.

    group_type 0: the rows of x (one [M,K], or one tensor per group, taken as stacked) are cut by group_list int64 [G],
    which holds sizes (group_list_type 1) or their running sum (0); weights are one [G,K,N] or G of [K,N]; the result is
    one tensor [M,N] (split_item 2 or 3). Rows past the last group are zero, empty groups take none.
    group_type -1: x[g] [...,K] with weight[g] [K,N] gives y[g] (split_item 0 or 1).
    fp32 accumulation, one rounding per element to x's dtype. Source: op-plugin doc of npu_grouped_matmul.
    """
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    biases = _biases(bias, len(weights))
    if group_type == -1:
        return [_linear(x[g], weights[g], biases[g]) for g in range(len(x))]
    rows = x[0] if len(x) == 1 else torch.cat(list(x))
    if group_list is None:
        bounds = _bounds(torch.tensor([part.shape[0] for part in x]), 1, rows.shape[0])
    else:
        bounds = _bounds(group_list, group_list_type or 0, rows.shape[0])
    out = rows.new_zeros((rows.shape[0], weights[0].shape[-1]))
    for g, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            out[start:stop] = _linear(rows[start:stop], weights[g], biases[g])
    return [out]


def _biases(bias: Tensors | None, groups: int) -> list[torch.Tensor | None]:
    if not bias:
        return [None] * groups
    return list(bias[0]) if len(bias) == 1 and bias[0].dim() == 2 else list(bias)


def _bounds(group_list: torch.Tensor, kind: int, rows: int) -> list[int]:
    """[0, end of group 0, end of group 1, …]; `ContractError` for a list that is not one of row groups."""
    ends = group_list if kind == 0 else group_list.cumsum(0)
    bounds = [0, *ends.tolist()]
    if any(b < a for a, b in pairwise(bounds)) or bounds[-1] > rows:
        raise value_error(OP, "group-list", f"{group_list.tolist()} (group_list_type {kind}) for {rows} rows")
    return bounds


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = torch.matmul(x.float(), weight.float())
    return (y if bias is None else y + bias.float()).to(x.dtype)
