"""The report of written inputs: in place or copied, and which condition fails; the GE graph says the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cannopy
from cannopy import Options, api
from cannopy.backend.host.activate import activate
from cannopy.fx_passes import writes
from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.program import Program
from tests.passes.graphs import built

Tensor = torch.Tensor
ROWS, WIDTH = 512, 512
CACHE, NEW, SLOTS = torch.zeros(ROWS, WIDTH), torch.ones(3, WIDTH), torch.tensor([[1], [4], [5]])


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    activate()


def scatter(call: Any, *args: Any) -> Any:
    return call(torch.ops.npu.npu_scatter_nd_update.default, *args)


def failing(program: Program) -> list[str]:
    (write,) = writes.report(program)
    assert write.copies == any(not c.holds for c in write.conditions)
    assert write.copies == (write.verdict == "copied")
    return [f"{c.name}; {c.found}" for c in write.conditions if not c.holds]


def program(build: Any, *more: Tensor, cache: Tensor = CACHE) -> Program:
    return built(build, cache, NEW, SLOTS, *more, mutated=[0])


def test_in_place() -> None:
    assert failing(program(lambda c, x, new, at: scatter(c, x, at, new))) == []
    # A later reader of the new value, and a prefetch of the old one, do not matter.
    assert failing(program(lambda c, x, new, at: (c(aten.neg.default, y := scatter(c, x, at, new)), y))) == []


def test_between_two_views() -> None:
    def build(call: Any, x: Any, new: Any, at: Any) -> Any:
        rows = call(aten.reshape.default, x, [ROWS, WIDTH])
        return call(aten.reshape.default, scatter(call, rows, at, new), [2, ROWS // 2, WIDTH])

    assert failing(program(build, cache=CACHE.view(2, ROWS // 2, WIDTH))) == []

    def two_readers(call: Any, x: Any, new: Any, at: Any) -> Any:
        rows = call(aten.reshape.default, x, [ROWS, WIDTH])
        y = scatter(call, rows, at, new)
        return call(aten.neg.default, rows), call(aten.reshape.default, y, [2, ROWS // 2, WIDTH])

    (reason,) = failing(program(two_readers, cache=CACHE.view(2, ROWS // 2, WIDTH)))
    assert reason.startswith("it writes the graph input itself; it writes %reshape_default")


CASES = {
    "concatenation": (lambda c, x, new, at: c(aten.cat.default, [c(aten.slice.Tensor, x, 0, 3), new]),
                      ["the new value comes from an op that GE runs in place; aten::cat makes a new tensor"]),
    "old value is read": (lambda c, x, new, at: (c(aten.neg.default, x), scatter(c, x, at, new)),
                          ["nothing else uses the value from before the write; aten::neg reads it at model.py:"]),
    "two writes": (lambda c, x, new, at: scatter(c, scatter(c, x, at, new), at, c(aten.neg.default, new)),
                   ["it writes the graph input itself; it writes what an earlier write left"]),
    "a copy is written": (lambda c, x, new, at: scatter(c, c(aten.clone.default, x), at, new),
                          ["it writes the graph input itself; it writes %clone_default"]),
}


@pytest.mark.parametrize("name", CASES)
def test_copies_name_the_condition(name: str) -> None:
    build, expected = CASES[name]
    found = failing(program(build))
    assert len(found) == len(expected)
    for reason, start in zip(found, expected, strict=True):
        assert reason.startswith(start)


def test_strides_of_the_caller() -> None:
    found = failing(program(lambda c, x, new, at: scatter(c, x, at, new), cache=torch.zeros(WIDTH, ROWS).T))
    assert found == ["the caller's tensor is contiguous; strides [1, 512] for shape [512, 512]: torchair works on a "
                     "clone"]


def test_the_prolog_writes_two_inputs() -> None:
    """Outputs 5 and 6 are the caches, arguments 9 and 10, which the schema of the mutating twin says as well."""
    twin = torch.ops.npu.npu_mla_prolog_v3.default._schema
    written = [i for i, a in enumerate(twin.arguments) if a.alias_info is not None and a.alias_info.is_write]
    assert list(writes.IN_PLACE["npu::npu_mla_prolog_v3_functional"].items()) == [
        (len(twin.returns) + i, argument) for i, argument in enumerate(written)
    ]


def test_a_counter_is_not_a_copy() -> None:
    counter = built(lambda c, n: c(aten.add.Tensor, n, 1), torch.zeros(1, dtype=torch.int64), mutated=[0])
    (write,) = writes.report(counter)
    assert write.verdict == "one element"
    assert "one element" in writes.text([write])


class Cached(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
        before = cache.sum(0) if self.how == "read before" else 0
        if self.how == "whole":
            cache.mul_(2)
        elif self.how == "slices":
            cache.copy_(torch.cat((cache[3:], new)))
        else:
            cache.index_copy_(0, at, new)
        return cache.sum(0) + before


@pytest.mark.parametrize("how", ["once", "read before", "slices", "whole"])
def test_the_ge_graph_agrees(how: str) -> None:
    """``cache_copies`` counts what torchair submitted."""
    model, args = Cached(how), (CACHE.clone(), NEW, SLOTS[:, 0])
    program, _ = api.lower(model, "forward", args, {}, Options(), {})
    copies = [write for write in writes.report(program) if write.copies]
    report = cannopy.compile(model, "forward", args, options=Options(use_cache=False)).report
    assert bool(copies) == bool(report.cache_copies) == (how in ("read before", "slices"))
    assert (writes.report(program)[0].verdict == "rewritten") == (how == "whole")
