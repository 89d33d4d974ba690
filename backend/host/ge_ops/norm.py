"""Softmax and layer norm: fp32 inside, rounded once at the edge."""

from __future__ import annotations

import torch
from torch.nn import functional

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor, host_ints


def softmax(op: Op) -> Kernel:
    """Over the one axis in ``axes``; ``half_to_float`` gives fp32 for half-precision input."""
    axes, wide = op.integers("axes", [-1]), op.flag("half_to_float", False)
    if len(axes) != 1:
        raise op.error(f"axes are {axes}, the host engine knows one axis")
    return lambda x: torch.softmax(x, axes[0], dtype=torch.float32 if wide else None)


def log_softmax(op: Op) -> Kernel:
    """Over the one axis in ``axes``."""
    axes = op.integers("axes", [-1])
    if len(axes) != 1:
        raise op.error(f"axes are {axes}, the host engine knows one axis")
    return lambda logits: torch.log_softmax(logits, axes[0])


def layer_norm_v4(op: Op) -> Kernel:
    """(y, mean, rstd) over the last axes, whose sizes are input 1; mean and rstd as the graph declares them."""
    epsilon = op.number("epsilon", 1e-5)

    def kernel(
        x: Tensor, normalized_shape: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = host_ints(op, 1, normalized_shape)
        y, mean, rstd = torch.native_layer_norm(x, sizes, gamma, beta, epsilon)
        return y, _declared(op, 1, mean), _declared(op, 2, rstd)

    return kernel


def _declared(op: Op, output: int, value: Tensor) -> Tensor:
    dtype = op.out_dtypes[output] if output < len(op.out_dtypes) else None
    return value if dtype is None else value.to(dtype)


def glu(op: Op) -> Kernel:
    """First half times sigmoid of the second along ``dim``."""
    dim = op.integer("dim", -1)
    return lambda x: functional.glu(x, dim)


OPS: dict[str, Builder] = {
    "GLU": glu,
    "LayerNormV4": layer_norm_v4,
    "LogSoftmaxV2": log_softmax,
    "SoftmaxV2": softmax,
}
