"""Routing of tokens to experts and back, and the experts' products, through the CPU kernels of torch.ops.npu."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor


def moe_gating_top_k(op: Op) -> Kernel:
    """(y, expert_idx, out)."""
    k = op.integer("k", 0)
    attrs = {
        "k_group": op.integer("k_group", 1),
        "group_count": op.integer("group_count", 1),
        "group_select_mode": op.integer("group_select_mode", 0),
        "renorm": op.integer("renorm", 0),
        "norm_type": op.integer("norm_type", 0),
        "out_flag": op.flag("out_flag", False),
        "routed_scaling_factor": op.number("routed_scaling_factor", 1.0),
        "eps": op.number("eps", 1e-20),
    }

    def kernel(*args: Tensor | None) -> Sequence[Tensor]:
        given = {n: a for n, a in zip(op.inputs, args, strict=True) if a is not None}
        return torch.ops.npu.npu_moe_gating_top_k(given.pop("x"), k, **given, **attrs)  # type: ignore[no-any-return]

    return kernel


def moe_init_routing_v3(op: Op) -> Kernel:
    """(expanded_x, expanded_row_idx, expert_tokens_count_or_cumsum, expanded_scale); the op of
    npu_moe_init_routing_v2."""
    attrs = {
        "active_num": op.integer("active_num", -1),
        "expert_capacity": op.integer("expert_capacity", -1),
        "expert_num": op.integer("expert_num", -1),
        "drop_pad_mode": op.integer("drop_pad_mode", 0),
        "expert_tokens_num_type": op.integer("expert_tokens_num_type", 0),
        "expert_tokens_num_flag": op.flag("expert_tokens_num_flag", False),
        "quant_mode": op.integer("quant_mode", -1),
        "active_expert_range": op.integers("active_expert_range"),
        "row_idx_type": op.integer("row_idx_type", 0),
    }
    return lambda x, expert_idx, scale=None, offset=None: torch.ops.npu.npu_moe_init_routing_v2(
        x, expert_idx, scale=scale, offset=offset, **attrs
    )


def moe_finalize_routing_v2(op: Op) -> Kernel:
    """y, with GE's order of inputs: rows, row index, skip1, skip2, bias, scales, expert index."""
    mode, k = op.integer("drop_pad_mode", 0), op.integer("k", op.integer("K", 1))

    def kernel(
        rows: Tensor, row_idx: Tensor, x1: Tensor | None = None, x2: Tensor | None = None, bias: Tensor | None = None,
        scales: Tensor | None = None, expert: Tensor | None = None,
    ) -> Tensor:
        # k counts without scales only, and torch_npu 2.8 does not have it.
        extra = {} if scales is not None else {"k": k}
        return torch.ops.npu.npu_moe_finalize_routing(  # type: ignore[no-any-return]
            rows, x1, x2, bias, scales, row_idx, expert, mode, **extra
        )

    return kernel


def moe_finalize_routing(op: Op) -> Kernel:
    """y; the older op, for drop_pad_mode 0 with everything given."""
    return lambda rows, x1, x2, bias, scales, row_idx, expert: torch.ops.npu.npu_moe_finalize_routing(
        rows, x1, x2, bias, scales, row_idx, expert, 0
    )


def moe_re_routing(op: Op) -> Kernel:
    """(rows, their scales, their old numbers, rows of each expert)."""
    kind, idx_type = op.integer("expert_token_num_type", 1), op.integer("idx_type", 0)
    return lambda tokens, counts, scales=None: torch.ops.npu.npu_moe_re_routing(
        tokens, counts, per_token_scales=scales, expert_token_num_type=kind, idx_type=idx_type
    )


def grouped_matmul(op: Op) -> Kernel:
    """One output per y. torchair feeds an optional list that was not given as one tensor without elements."""
    if op.integer("dtype", -1) != -1 or op.flag("transpose_x", False):
        raise op.error("attributes dtype and transpose_x are for quantised forms, which the host engine does not know")
    transposed = op.flag("transpose_weight", False)
    lists = ("bias", "scale", "offset", "antiquant_scale", "antiquant_offset")
    spans = {name: op.span(name) for name in ("x", "weight", *lists)}
    group_list_at, token_scale_at = op.at("group_list"), op.at("per_token_scale")
    attrs = {
        "split_item": op.integer("split_item", 0),
        "group_type": op.integer("group_type", -1),
        "group_list_type": op.integer("group_list_type", 0),
        "act_type": op.integer("act_type", 0),
    }

    def kernel(*args: Tensor | None) -> Sequence[Tensor]:
        parts = {name: list(args[span]) for name, span in spans.items()}
        given = {n: parts[n] for n in lists if any(p is not None and p.numel() for p in parts[n])}
        weight = [w.mT if transposed else w for w in parts["weight"] if w is not None]
        group_list = None if group_list_at is None else args[group_list_at]
        token_scale = None if token_scale_at is None else args[token_scale_at]
        if token_scale is not None:
            given["per_token_scale"] = [token_scale]
        return torch.ops.npu.npu_grouped_matmul(  # type: ignore[no-any-return]
            parts["x"], weight, group_list=group_list, **given, **attrs
        )

    return kernel


OPS: dict[str, Builder] = {
    "GroupedMatmul": grouped_matmul,
    "MoeFinalizeRouting": moe_finalize_routing,
    "MoeFinalizeRoutingV2": moe_finalize_routing_v2,
    "MoeGatingTopK": moe_gating_top_k,
    "MoeInitRoutingV3": moe_init_routing_v3,
    "MoeReRouting": moe_re_routing,
}
