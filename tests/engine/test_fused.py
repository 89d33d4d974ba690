"""Fused GE types: each input and attribute of the npu call reaches the CPU kernel again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from cannopy.backend.host import engine
from tests.engine.fused_cases import FUSED, FusedCase


@pytest.mark.parametrize("case", FUSED, ids=lambda c: c.id)
def test_equals_the_kernel(case: FusedCase, compiled: Callable[..., Any]) -> None:
    torch.manual_seed(2)
    inputs = case.make()
    eager_inputs, given = [t.clone() for t in inputs], [t.clone() for t in inputs]
    with torch.no_grad():
        want = case.fn(*eager_inputs)
    got = compiled(case.fn)(*given)
    for found, expected in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    changed = tuple(i for i, (a, b) in enumerate(zip(inputs, given, strict=True)) if not torch.equal(a, b))
    assert changed == case.mutates
    for a, b in zip(given, eager_inputs, strict=True):
        assert torch.equal(a, b)
    found_summary = engine.recorded()[-1].summary()
    assert found_summary.kernels[case.ge_type] == 1
    assert found_summary.cache_copies == 0


def test_attributes_matter() -> None:
    """The values in the cases are not the defaults: with the defaults the kernels give other results."""
    torch.manual_seed(2)
    npu = torch.ops.npu
    x, gamma = torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    assert not torch.equal(npu.npu_rms_norm(x, gamma, 0.25)[0], npu.npu_rms_norm(x, gamma)[0])
    scores, bias = torch.randn(6, 16), torch.randn(16)
    full = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1, "eps": 1e-3}
    full["routed_scaling_factor"] = 2.5
    wanted = npu.npu_moe_gating_top_k(scores, 4, bias=bias, **full)
    for name in ("group_count", "routed_scaling_factor", "eps", "k_group"):
        without = {k: v for k, v in full.items() if k != name}
        if name == "group_count":
            without.pop("k_group")
        other = npu.npu_moe_gating_top_k(scores, 4, bias=bias, **without)
        assert not (torch.equal(wanted[0], other[0]) and torch.equal(wanted[1], other[1])), name
