"""npu_transpose_batchmatmul on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _numerics


def npu_transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """``y = permute(permute(input, perm_x1) @ permute(weight, perm_x2), perm_y)``.

    permuted input [B,M,K], permuted weight [B,K,N], result [M,B,N] (perm_y [1,0,2]); fp32 accumulation, one rounding.
    Defaults [0,1,2], [0,1,2], [1,0,2]. Source: op-plugin doc of npu_transpose_batchmatmul.
    """
    left = input.permute(*(perm_x1 or (0, 1, 2)))
    right = weight.permute(*(perm_x2 or (0, 1, 2)))
    return _numerics.matmul(left, right).permute(*(perm_y or (1, 0, 2))).contiguous()
