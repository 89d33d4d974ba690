"""Regular stacks of plain layers: few are captured, the result is that of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cannopy import Options
from cannopy.errors import CannopyError
from cannopy.explain import explain
from cannopy.fx_passes import dump
from tests.regions.support import SLOTS, WIDTH, Layer, Stack, assert_same, counts, found, lower, stack_call


class ByIndex(Stack):
    """Counts its layers instead of walking over them."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        x = self.embed[ids]
        for i in range(len(self.layers)):
            x = self.layers[i](x, at, caches[self.layers[i].index])
        return self.norm(x)


class Sliced(Stack):
    """As transformers: a slice of the list, and layers that know their place in the cache."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = self.embed[ids]
        for layer in self.layers[: len(caches)]:
            x = layer(x, at, caches[layer.index])
        return self.norm(x), caches


class Narrow(Layer):
    """Another kind of layer."""

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        return torch.tanh(super().forward(x, at, cache))


class Alternating(Stack):
    """Kinds 1 1 0 1 0 1 … 0: the first and the last layer are in no run."""

    def __init__(self) -> None:
        super().__init__(14)
        for i in [0, *range(1, 14, 2)]:
            self.layers[i] = Narrow(i).eval()
        self.layers[13] = Layer(13).eval()


REGULAR = {
    "enumerated": (lambda: Stack(7), 7, 4),
    "by index": (lambda: ByIndex(7), 7, 4),
    "sliced": (lambda: Sliced(7), 7, 4),
    "alternating": (Alternating, 14, 1 + 4 * 2 + 1),
}


@pytest.mark.parametrize("name", REGULAR)
def test_stamped_is_whole(name: str) -> None:
    make, layers, captured = REGULAR[name]
    model, args = make(), stack_call(layers)
    stamped, done = lower(model, args)
    assert (found(stamped).reason, found(stamped).layers, found(stamped).captured) == ("", layers, captured)
    whole, done_whole = lower(model, args, regions=False)
    assert (found(whole).layers, found(whole).captured) == (layers, layers)
    assert_same(stamped, whole)
    assert counts(stamped, done) == counts(whole, done_whole)


def test_explanation_is_that_of_all_layers() -> None:
    few, every = (
        explain(Stack(7), "forward", stack_call(7), options=Options(regions=regions)) for regions in (True, False)
    )

    def told(kind: str, of: Any) -> list[Any]:
        return [{k: v for k, v in one.items() if k not in ("node", "anchor")} for one in of.to_dict()[kind]]

    for kind in ("hits", "misses"):
        assert told(kind, few) == told(kind, every)
    assert any(hit["layers"] == list(range(7)) for hit in told("hits", few))
    assert few.absent == every.absent
    silu = next(name for name, (what, *_) in every.lineage.captured.items() if "silu" in what or "sigmoid" in what)
    assert every.lineage.fate(silu).steps
    with pytest.raises(CannopyError, match="3 layers were copied"):
        few.lineage.fate(silu)


def test_twice_the_same_text() -> None:
    first, second = (lower(Stack(6), stack_call(6))[0] for _ in range(2))
    assert dump.text(first) == dump.text(second)


def test_the_model_is_not_changed() -> None:
    model = Stack(6)
    before = [(name, id(module), sorted(module.__dict__)) for name, module in model.named_modules()]
    lower(model, stack_call(6))
    assert before == [(name, id(module), sorted(module.__dict__)) for name, module in model.named_modules()]


def test_two_lists() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Stack(6), Stack(7)

        def forward(self, ids: Tensor, at: Tensor, a: list[Tensor], b: list[Tensor]) -> Tensor:
            return self.two(ids, at, b) + self.one(ids, at, a)

    ids, at, a = stack_call(6)
    args: tuple[Any, ...] = (ids, at, a, [torch.zeros(SLOTS, WIDTH) for _ in range(7)])
    model = Two()
    stamped, whole = lower(model, args)[0], lower(model, args, regions=False)[0]
    assert (found(stamped).layers, found(stamped).captured, found(stamped).reason) == (13, 8, "")
    assert_same(stamped, whole)
