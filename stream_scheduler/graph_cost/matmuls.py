"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from cannopy.stream_scheduler.graph_cost.shapes import Call, argument, itemsize, numel, shape, width

_DENSE = {4.0: "fp32_matmul", 2.0: "bf16_matmul", 1.0: "int8_matmul"}
_GROUPED = {2.0: "grouped_matmul_bf16", 1.0: "grouped_matmul_int8"}


def product(node: fx.Node) -> Call:
    """x[…, K] @ W[K, N] or W[N, K]: K is the last dimension of x, N that of the result."""
    x = argument(node, 0, "self")
    if node.target is torch.ops.aten.addmm.default:
        x = argument(node, 1, "mat1")
    k, n = width(x), width(node)
    return Call(_DENSE.get(itemsize(x), "bf16_matmul"), {"m": max(1.0, numel(node) / n), "k": k, "n": n})


def quantised(node: fx.Node) -> Call:
    """int8 @ int8; an int32 result leaves dequantisation to the next kernel."""
    found = product(node)
    return Call("int8_matmul", found.sizes, cube_only=itemsize(node) == 4.0)


def batched(node: fx.Node) -> Call:
    """A product per batch entry. 32-bit operands take two passes of 16 bits each in the formula of `batch_matmul`."""
    x, y = node.args[0], node.args[1]
    batch = numel(x) / (width(x) * max(1, shape(x)[-2]))
    return Call("batch_matmul", {"batch": batch, "m": float(max(1, shape(x)[-2])), "k": width(x) * itemsize(x) / 2.0,
                                 "n": width(y)})


def matmul(node: fx.Node) -> Call:
    """aten.matmul: a product per entry of the leading dimensions where the second operand has any."""
    return batched(node) if len(shape(argument(node, 1, "other"))) > 2 else product(node)


def transposed(node: fx.Node) -> Call:
    """npu_transpose_batchmatmul: ``perm_x1`` says which dimension of x is the batch."""
    x, w = argument(node, 0, "input"), argument(node, 1, "weight")
    perm = argument(node, 4, "perm_x1") or [0, 1, 2]
    found = [shape(x)[i] for i in perm]
    return Call("batch_matmul", {"batch": float(found[0]), "m": float(max(1, found[1])), "k": float(found[2]),
                                 "n": width(w)})


def grouped(node: fx.Node) -> Call:
    """Rows already sorted by expert: each row is one token with one target among the local experts."""
    x, w = argument(node, 0, "x"), argument(node, 1, "weight")
    first = w[0] if isinstance(w, (list, tuple)) else w
    found = shape(first)
    experts = float(found[0]) if len(found) == 3 else float(len(w))
    k, n = width(x), width(node)
    return Call(_GROUPED.get(itemsize(x), "grouped_matmul_bf16"),
                {"tokens": max(1.0, numel(x) / k), "top_k": 1.0, "experts": experts, "local_experts": experts, "k": k,
                 "n": n}, cube_only=itemsize(node) == 4.0 and itemsize(x) == 1.0)


TABLE: dict[str, Callable[[fx.Node], Call]] = {
    "aten.mm": product, "aten.linear": product, "aten.addmm": product, "aten.matmul": matmul,
    "aten.bmm": batched, "aten._grouped_mm": grouped,
    "npu.npu_quant_matmul": quantised, "npu.npu_transpose_batchmatmul": transposed, "npu.npu_grouped_matmul": grouped,
}
