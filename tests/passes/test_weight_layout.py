"""What is done to weights at load time: casts and transposes; what is computed of anything else stays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cannopy.fx_passes import weight_layout
from tests.rules.moe_support import Tensor, trace

X = torch.randn((3, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
WEIGHT = torch.randn((4, 8), generator=torch.Generator().manual_seed(1)).bfloat16()


def router(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A router that widens its weight, as LongCat's does, and a weight that is read in both dtypes."""
    logits = torch.nn.functional.linear(x.float(), weight.float())
    return logits + bias.float(), bias * 2


def test_casts_and_transposes_of_weights() -> None:
    before = trace(router, X, WEIGHT, WEIGHT[:, 0].clone(), parameters=[1, 2])
    wanted = before.run()
    assert weight_layout.run(before.program) == 3
    assert before.operations().count("aten._to_copy.default") == 1, "that of x"
    assert "aten.linear.default" not in before.operations()
    assert {e.recipe for e in before.program.weights} == {"(w[0].to(torch.float32)).t()", "w[0].to(torch.float32)"}
    for new, old in zip(before.run(), wanted, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", [{"kind": "argument"}, {"mutated": True}], ids=["an argument", "written"])
def test_values_that_are_no_weights_stay(change: dict[str, Any]) -> None:
    before = trace(lambda x, w: torch.nn.functional.linear(x.float(), w.float()), X, WEIGHT, parameters=[1])
    before.program.inputs[1] = dataclasses.replace(before.program.inputs[1], **change)
    operations = before.operations()
    assert weight_layout.run(before.program) == 0
    assert before.operations() == operations
