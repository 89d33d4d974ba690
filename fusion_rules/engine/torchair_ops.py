"""Operators that torchair defines for graphs of mode max-autotune, in its namespace ``air``.

They take tensors where those of torch_npu want lists of numbers, so that a length may change without a new graph.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

FUSED_INFER_ATTENTION = "npu_fused_infer_attention_score_v2"


def torchair_op(name: str) -> Any:
    """The operator ``torch.ops.air.<name>``, None where torchair is missing or has none of that name.

    torchair defines it when the module that it is in is imported.
    """
    if not hasattr(torch.ops.air, name):
        with contextlib.suppress(ImportError):
            lazy = importlib.import_module("torch_npu.dynamo.torchair")  # makes the plain name importable
            lazy.CompilerConfig  # noqa: B018 the import is lazy; this runs it
            importlib.import_module(f"torchair.ops._{name}")
    packet = getattr(torch.ops.air, name, None)
    return None if packet is None else packet.default
