"""npu_moe_finalize_routing on the CPU."""

from __future__ import annotations

import torch

from ....fusion_rules.contracts import value_error


def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """Sum the experts' rows of each token.

    ``out[i] = skip1[i] + skip2[i] + Σ_k scales[i,k]·(rows[idx(i,k)] + bias[e(i,k)])``

    rows [T·K,H], or [E,C,H] in the drop modes 1 and 3; expanded_src_to_dst_row int32 [T·K] is column-major in modes
    0 and 1 (``idx(i,k) = src[k·T + i]``) and row-major in modes 2 and 3 (``src[i·K + k]``); in the drop modes -1 stands
    for a row of zeros. scales [T,K] (None: ones, and K is `k`), export_for_source_row [T,K] has the expert ids that
    bias [E,H] is picked by. fp32 inside, one rounding to the dtype of the rows. Source: op-plugin doc of
    npu_moe_finalize_routing.
    """
    op = "npu_moe_finalize_routing"
    rows = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.shape[-1])
    top = scales.shape[1] if scales is not None else int(k or 1)
    tokens = scales.shape[0] if scales is not None else expanded_src_to_dst_row.numel() // top
    source = expanded_src_to_dst_row.long()
    bad = (source < (-1 if drop_pad_mode in (1, 3) else 0)) | (source >= rows.shape[0])
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise value_error(op, "row-range", f"{int(source[at])} at position {at}, {rows.shape[0]} rows")
    source = source.view(tokens, top) if drop_pad_mode in (2, 3) else source.view(top, tokens).t()
    out = torch.zeros((tokens, rows.shape[1]), dtype=torch.float32)
    for skip in (skip1, skip2):
        if skip is not None:
            out += skip.float()
    for choice in range(top):
        index = source[:, choice]
        picked = rows[index.clamp(min=0)].float().masked_fill((index < 0).unsqueeze(1), 0.0) if rows.shape[0] else 0.0
        if bias is not None and export_for_source_row is not None:
            picked = picked + bias[export_for_source_row[:, choice].long()].float()
        if scales is not None:
            picked = picked * scales[:, choice : choice + 1].float()
        out += picked
    return out.to(expanded_permuted_rows.dtype)
