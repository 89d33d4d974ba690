"""Every ATen program of `cases`, lowered by torchair and run by the engine, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.engine.cases import GROUPS, Group
from tests.features import lowered_or_skipped


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference in units in the last place of the largest finite magnitude wanted."""
    if torch.equal(got, want) or torch.equal(torch.nan_to_num(got), torch.nan_to_num(want)):
        return 0.0
    if not want.is_floating_point():
        return float("inf")
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return float("inf")
    top = want[finite].double().abs().max()
    unit = torch.finfo(want.dtype).eps * 2.0 ** torch.floor(torch.log2(top)).item()
    return float((got[finite].double() - want[finite].double()).abs().max() / unit)


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
def test_group_equals_eager(group: Group, compiled: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    inputs = group.make()

    def program(*args: torch.Tensor) -> Any:
        return {name: fn(*args) for name, fn in group.programs.items()}

    want = program(*[t.clone() for t in inputs])
    given = [t.clone() for t in inputs]
    got = lowered_or_skipped(compiled(program), given)
    wrong = {}
    for name in group.programs:
        expected, found = pytree.tree_leaves(want[name]), pytree.tree_leaves(got[name])
        assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in expected], name
        distance = max(off_by(f, e) for f, e in zip(found, expected, strict=True))
        if distance > group.ulps.get(name, 0):
            wrong[name] = distance
    assert not wrong, f"further from eager than stated, in ulps: {wrong}"
    assert all(torch.equal(a, b) for a, b in zip(given, inputs, strict=True)), "an input was changed"


def test_gelu_is_the_tanh_form(compiled: Callable[..., Any]) -> None:
    """The GE op Gelu has one form; a model that asks for the exact one gets tanh on the device, and here."""
    x = torch.linspace(-3, 3, 64)
    got = compiled(lambda t: torch.nn.functional.gelu(t))(x)
    tanh = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    torch.testing.assert_close(got, tanh, rtol=0, atol=3e-7)
    assert (got - torch.nn.functional.gelu(x)).abs().max() > 1e-4


def test_the_distance_sees_a_doubled_value() -> None:
    want = torch.tensor([1.0, 3.0])
    assert off_by(want, want) == 0
    assert off_by(torch.nextafter(want, torch.tensor(9.0)), want) <= 1
    assert off_by(want * 2, want) > 1e6
    assert off_by(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
