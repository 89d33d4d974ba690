"""The dialect's attention against a loop over queries in float64, and the rewrite that puts it in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cannopy.frontend.capture import capture
from cannopy.fusion_rules.dialect import attention


def by_hand(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool) -> torch.Tensor:
    """One query at a time, one key at a time."""
    batch, heads, queries, _ = q.shape
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h * k.shape[1] // heads
            for i in range(queries):
                total, weights = torch.zeros(v.shape[-1], dtype=torch.float64), 0.0
                for j in range(k.shape[2]):
                    score = float((q[b, h, i].double() * k[b, g, j].double()).sum()) * scale
                    if causal and j > i:
                        continue
                    if mask is not None:
                        entry = mask.expand(batch, heads, queries, k.shape[2])[b, h, i, j]
                        if mask.dtype == torch.bool and not entry:
                            continue
                        score += 0.0 if mask.dtype == torch.bool else float(entry)
                    weights += math.exp(score)
                    total += math.exp(score) * v[b, g, j].double()
                out[b, h, i] = total / weights if weights else 0.0
    return out


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_reference(mask: str, kv_heads: int, dtype: torch.dtype, rtol: float) -> None:
    attention.register()
    torch.manual_seed(0)
    q = torch.randn(2, 4, 5, 8).to(dtype)
    k, v = torch.randn(2, kv_heads, 7, 8).to(dtype), torch.randn(2, kv_heads, 7, 6).to(dtype)
    masks: dict[str, Any] = {"none": None, "causal": None, "float": torch.randn(2, 1, 5, 7).to(dtype)}
    masks["bool"] = torch.rand(2, 1, 5, 7) > 0.5
    masks["bool"][1, 0, 2] = False  # a query that sees nothing
    given = masks[mask]
    found = torch.ops.cannopy.attention(q, k, v, given, 0.3, mask == "causal", kv_heads != 4)
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), by_hand(q, k, v, given, 0.3, mask == "causal"), rtol=rtol, atol=rtol)


def test_fake_kernel_agrees_and_registration_is_idempotent() -> None:
    attention.register()
    attention.register()
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    for args in [(q, k, v, None, 0.5, False, True), (q, k[:, :1], v[:, :1], torch.randn(5, 7), 0.5, False, True)]:
        torch.library.opcheck(torch.ops.cannopy.attention.default, args, test_utils=("test_schema", "test_faketensor"))


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        options = dict(self.options)
        given = mask if options.pop("masked", False) else None
        return F.scaled_dot_product_attention(q, k, v, given, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (None, 16**-0.5, False, False)),
        ({"masked": True, "scale": 0.25}, ("mask", 0.25, False, False)),
        ({"is_causal": True, "dropout_p": 0.0}, (None, 16**-0.5, True, False)),
        ({"enable_gqa": True, "scale": 2}, (None, 2.0, False, True)),
    ],
)
def test_capture_keeps_one_node_with_all_arguments(options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 3, 16)
    if options.get("enable_gqa"):
        k = torch.randn(1, 2, 3, 16)
    program = capture(Attends(**options), "forward", (q, k, k.clone(), torch.zeros(3, 3)))
    (node,) = [n for n in program.gm.graph.nodes if n.op == "call_function"]
    assert node.target is torch.ops.cannopy.attention.default
    mask, *rest = node.args[3:]
    assert (mask is not None) == (expected[0] is not None)
    assert tuple(rest) == expected[1:]
    assert isinstance(rest[0], float)
    assert not node.kwargs
