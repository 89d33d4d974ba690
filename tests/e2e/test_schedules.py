"""Schedules change no bit: a small serving model with expert layers, on the host engine, in many orders.

`benchmarks.schedule_parity` does the same for every tiny model, form and phase, all through torchair.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import serving_parity
from benchmarks.schedule_parity import Case, fill, in_other_orders, random_plans, same


@pytest.fixture(scope="module")
def case() -> Case:
    one = serving_parity.case("kimi-k2", 3, 1, "decode")
    args, kwargs = one.inputs("decode")
    fill((args, kwargs))
    return Case(one.model, "decode", args, dict(kwargs), "decode")


def test_automatic_and_random_schedules_change_no_bit(case: Case) -> None:
    """One by one through torchair and in random orders of the lowered graph, more of them as generated code."""
    plain = case.results(case.build(None, "eager"))
    plan = case.planned("schedule").plan
    assert not plan.changes_nothing
    compiled = case.build(plan, "torchair")
    lowered = case.results(compiled)
    assert same(lowered, case.results(case.build(None, "torchair")))
    assert in_other_orders(case, compiled, lowered, 2) == []
    found = list(random_plans(case, 6))
    assert len(found) == 6
    assert max(len(one.streams) for _, one in found) > 2
    assert any(one.waits for _, one in found)
    for name, one in found:
        assert same(case.results(case.build(one, "eager")), plain), name


def test_the_comparison_sees_one_bit() -> None:
    one = torch.randn(4, 4).to(torch.bfloat16)
    other = one.clone()
    assert same([one], [other])
    other.view(torch.int16)[2, 3] ^= 1
    assert not same([one], [other])
    assert not same([one], [one.float()])
    assert not same([torch.tensor(1)], [torch.tensor(2)])
    assert same([torch.tensor([float("nan")])], [torch.tensor([float("nan")])])
