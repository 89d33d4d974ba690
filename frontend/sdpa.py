"""Keeps scaled dot-product attention as one node: ``F.scaled_dot_product_attention`` → ``cannopy::attention``.

AOTAutograd would otherwise decompose it, in another way for each device and mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..fusion_rules.dialect import attention
from . import provenance
from .errors import CaptureError

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def rewrite(graph: fx.Graph) -> int:
    """Replaces every call in Dynamo's ``graph``; returns how many there were.

    Raises:
        CaptureError: ``dropout_p`` is not 0.
    """
    attention.register()
    calls = graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention)
    for node in calls:
        given = _DEFAULTS | dict(zip(_PARAMETERS, node.args, strict=False)) | node.kwargs
        if given["dropout_p"] != 0:
            raise CaptureError.at(
                provenance.of_node(node),
                f"attention with dropout_p={given['dropout_p']} draws random numbers",
                "call model.eval(), or set the model's attention dropout to 0",
            )
        q, scale = given["query"], given["scale"]
        scale = 1.0 / math.sqrt(q.meta["example_value"].shape[-1]) if scale is None else float(scale)
        node.target = torch.ops.cannopy.attention.default
        tensors = (q, given["key"], given["value"], given["attn_mask"])
        node.args = (*tensors, scale, given["is_causal"], given["enable_gqa"])
        node.kwargs = {}
    return len(calls)
