"""Matrix products: fp32 accumulation, one rounding to the output dtype (bias included)."""

from __future__ import annotations

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor


def matmul(op: Op) -> Kernel:
    """MatMul, MatMulV2, MatMulV3: y = x1 @ x2 (+ bias), with transpose_x1, transpose_x2; 2-D."""
    t1, t2 = op.flag("transpose_x1", False), op.flag("transpose_x2", False)
    if op.integer("offset_x", 0):
        raise op.error("offset_x other than 0 is for int8, which the host engine does not know")

    def kernel(x1: Tensor, x2: Tensor, bias: Tensor | None = None, offset_w: Tensor | None = None) -> Tensor:
        a = x1.mT if t1 else x1
        b = x2.mT if t2 else x2
        if offset_w is not None:
            raise op.error("offset_w is for int8, which the host engine does not know")
        if bias is None:
            return _product(a, b)
        return torch.addmm(bias.to(a.dtype), a, b)

    return kernel


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b. 16-bit numbers are multiplied in fp32 and rounded once: torch's own 16-bit product of a K-major weight is
    up to two hundred times slower on CPUs without 16-bit units."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.matmul(a, b)
    return torch.matmul(a.float(), b.float()).to(a.dtype)


def batch_matmul(op: Op) -> Kernel:
    """BatchMatMul, V2, V3: y = x1 @ x2 (+ bias) over broadcast batch axes, with adj_x1, adj_x2."""
    t1, t2 = op.flag("adj_x1", False), op.flag("adj_x2", False)

    def kernel(x1: Tensor, x2: Tensor, bias: Tensor | None = None, offset_w: Tensor | None = None) -> Tensor:
        y = _product(x1.mT if t1 else x1, x2.mT if t2 else x2)
        return y if bias is None else y + bias

    return kernel


OPS: dict[str, Builder] = {
    "BatchMatMul": batch_matmul,
    "BatchMatMulV2": batch_matmul,
    "BatchMatMulV3": batch_matmul,
    "MatMul": matmul,
    "MatMulV2": matmul,
    "MatMulV3": matmul,
}
