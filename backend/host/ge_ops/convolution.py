"""Convolutions: fp32 accumulation, one rounding to the output dtype (bias included)."""

from __future__ import annotations

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor


def conv2d(op: Op) -> Kernel:
    """Conv2D: x [N, C, H, W] with filter [O, C / groups, h, w] (+ bias [O]); zeros around it on both sides alike."""
    layout = op.text("data_format", "NHWC")
    if layout != "NCHW":
        raise op.error(f"data_format {layout}: the host engine knows NCHW")
    top, bottom, left, right = op.integers("pads", (0, 0, 0, 0))
    if top != bottom or left != right:
        raise op.error(f"pads {[top, bottom, left, right]}: the host engine knows the same on both sides")
    if op.integer("offset_x", 0):
        raise op.error("offset_x other than 0 is for int8, which the host engine does not know")
    strides, dilations = op.integers("strides"), op.integers("dilations", (1, 1, 1, 1))
    groups = op.integer("groups", 1)

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None, offset_w: Tensor | None = None) -> Tensor:
        if offset_w is not None:
            raise op.error("offset_w is for int8, which the host engine does not know")
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.nn.functional.conv2d(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide),
                                       strides[2:], (top, left), dilations[2:], groups)
        return y.to(x.dtype)

    return kernel


OPS: dict[str, Builder] = {"Conv2D": conv2d}
