"""The operator that a contract is about, as compiled graphs call it."""

from __future__ import annotations

from typing import Any

import torch

from cannopy.fusion_rules.engine.torchair_ops import FUSED_INFER_ATTENTION, torchair_op


def operator(op: str) -> Any:
    """torchair's operator where graphs want its tensors for lengths, else that of torch_npu."""
    return torchair_op(op) if op == FUSED_INFER_ATTENTION else getattr(torch.ops.npu, op).default
