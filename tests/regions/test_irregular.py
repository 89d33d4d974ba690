"""One layer that differs in any way: all layers are captured, with a reason, and the result is that of eager."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cannopy.frontend import regions
from cannopy.frontend.call_trace import IrregularError
from cannopy.frontend.errors import CaptureError
from cannopy.fx_passes import stamp
from cannopy.fx_passes.weight_plan import LEAST_READ
from tests.frontend.models import run
from tests.regions.support import SLOTS, WIDTH, Layer, Mixer, Norm, Stack, found, lower, stack_call

ODD = 5
"""A layer that a regular stack of nine would leave out."""


class _Counting(Mixer):
    """Adds what depends on the layer's number."""

    def __init__(self, index: int, amount: Callable[[int], float]) -> None:
        super().__init__(index)
        self.amount = amount

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        out = super().forward(x, at, cache)
        amount = self.amount(self.index)
        return out + amount if amount else out


class _Table(Mixer):
    """Makes a tensor from a Python number."""

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        return super().forward(x, at, cache) * torch.tensor([1.0 + (self.index == ODD)])


def _mixers(make: Callable[[int], Mixer]) -> Callable[[Stack], None]:
    def change(stack: Stack) -> None:
        for i, layer in enumerate(stack.layers):
            layer.mixer = make(i).eval()

    return change




class Exiting(Stack):
    """Leaves its loop early."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        x = self.embed[ids]
        for i, layer in enumerate(self.layers):
            if i == ODD:
                break
            x = layer(x, at, caches[i])
        return self.norm(x)


class Collecting(Stack):
    """Returns the value of every layer."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> tuple[Tensor, ...]:
        x = self.embed[ids]
        values = []
        for i, layer in enumerate(self.layers):
            x = layer(x, at, caches[i])
            values.append(x)
        return tuple(values)


class Stacking(Collecting):
    """Adds the values of all layers."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        return torch.stack(super().forward(ids, at, caches)).sum(0)


class Tapped(Stack):
    """Uses the value of one layer at the end."""

    tap = ODD

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        x = tapped = self.embed[ids]
        for i, layer in enumerate(self.layers):
            x = layer(x, at, caches[i])
            tapped = x if i == self.tap else tapped
        return self.norm(x) + tapped


class TappedEarly(Tapped):
    """As `Tapped`, of a layer that the small model has."""

    tap = 2


class Between(Stack):
    """Computes between its layers."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        x = self.embed[ids]
        for i, layer in enumerate(self.layers):
            x = layer(x, at, caches[i]) * 1.5
        return self.norm(x)


class Twice(Stack):
    """Calls one layer again at the end."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        return self.layers[0](super().forward(ids, at, caches), at, caches[0])


class Shuffled(Stack):
    """Calls two layers in the other order."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        x = self.embed[ids]
        order = list(range(len(self.layers)))
        order[ODD], order[ODD - 1] = order[ODD - 1], order[ODD]
        for i in order:
            x = self.layers[i](x, at, caches[i])
        return self.norm(x)


class Crossing(Stack):
    """One layer writes into the cache of another."""

    def forward(self, ids: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        x = self.embed[ids]
        for i, layer in enumerate(self.layers):
            x = layer(x, at, caches[i - 1 if i == ODD else i])
        return self.norm(x)


def _set(name: str, value: Any) -> Callable[[Stack], None]:
    def change(stack: Stack) -> None:
        owner, _, attribute = name.rpartition(".")
        setattr(stack.layers[ODD].get_submodule(owner), attribute, value)

    return change


def _hook(stack: Stack) -> None:
    stack.layers[ODD].mixer.register_forward_hook(lambda module, args, out: out * 2)


def _patch(stack: Stack) -> None:
    layer = stack.layers[ODD]
    layer.norm.forward = lambda x: x * 3


def _tie(stack: Stack) -> None:
    stack.layers[ODD].down.weight = stack.layers[ODD + 1].down.weight


def _tie_kept(stack: Stack) -> None:
    stack.layers[ODD].down.weight = stack.layers[1].down.weight


def _tie_embedding(stack: Stack) -> None:
    stack.layers[ODD].mixer.memory = stack.layers[ODD].mixer.memory
    stack.embed = nn.Parameter(torch.randn(WIDTH, WIDTH))
    stack.layers[ODD].down.weight = stack.embed


def _share(stack: Stack) -> None:
    stack.layers[ODD].mixer = stack.layers[ODD + 1].mixer


def _slopes(stack: Stack) -> None:
    for i, layer in enumerate(stack.layers):
        layer.mixer.scale = 2.0 ** -(i + 1)


def _kinds(stack: Stack) -> None:
    for i in range(len(stack.layers)):
        class Own(Layer):
            pass

        stack.layers[i] = Own(i).eval()


def _strides(stack: Stack) -> None:
    down = stack.layers[ODD].down
    down.weight = nn.Parameter(down.weight.detach().t().contiguous().t())


CHANGES: dict[str, tuple[type[Stack], Callable[[Stack], None] | None, str]] = {
    "scale": (Stack, _set("mixer.scale", 0.25), "no run"),
    "window": (Stack, _set("mixer.window", 4), "no run"),
    "constant by index": (Stack, _mixers(lambda i: _Counting(i, lambda n: 0.5 + (n == ODD))), "other constants"),
    "operation by index": (Stack, _mixers(lambda i: _Counting(i, lambda n: 0.5 * (n == ODD))), "layers.5"),
    "even and odd": (Stack, _mixers(lambda i: _Counting(i, lambda n: 0.5 * (n % 2))), "layers.2"),
    "negative zero": (Stack, _mixers(lambda i: _Counting(i, lambda n: -0.5 if n == ODD else 0.5)), "other constants"),
    "table by index": (Stack, _mixers(_Table), "do not read corresponding|does not read"),
    "slopes": (Stack, _slopes, "no run"),
    "all different": (Stack, _kinds, "no run"),
    "hook": (Stack, _hook, "no run"),
    "patched method": (Stack, _patch, "no run"),
    "tied to a neighbour": (Stack, _tie, "read corresponding|does not read"),
    "tied to a kept layer": (Stack, _tie_kept, "share a tensor|belongs to"),
    "tied to the embedding": (Stack, _tie_embedding, "belongs to"),
    "shared module": (Stack, _share, "no run"),
    "dtype": (Stack, lambda s: s.layers[ODD].down.double() and None, "no run"),
    "strides": (Stack, _strides, "no run"),
    "other norm": (Stack, _set("norm", nn.LayerNorm(WIDTH)), "no run"),
    "without norm": (Stack, _set("norm", nn.Identity()), "no run"),
    "early exit": (Exiting, None, "not called"),
    "values of all layers": (Collecting, None, "result"),
    "sum of all layers": (Stacking, None, "outside of its layers"),
    "tap": (Tapped, None, "outside of its layers|result"),
    "tap of a kept layer": (TappedEarly, None, "outside of its layers"),
    "between": (Between, None, "between the layers"),
    "called twice": (Twice, None, "more than once"),
    "order": (Shuffled, None, "right after|not run"),
    "cache of another": (Crossing, None, "share a tensor|belongs to|read corresponding"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_noticed(name: str) -> None:
    kind, change, reason = CHANGES[name]
    model = kind(9, change)
    args = stack_call(9)
    with pytest.raises(IrregularError, match=reason):
        regions.fold(model, "forward", args, {})


@pytest.mark.parametrize("name", ["tap of a kept layer"])
def test_all_layers_are_captured_and_equal_eager(name: str) -> None:
    kind, change, reason = CHANGES[name]
    model, args = kind(9, change), stack_call(9)
    program = regions.capture(model, "forward", args)
    known = found(program)
    assert not known.found
    assert known.captured == known.layers == 9
    assert re.search(reason, known.reason)
    expected, actual = copy.deepcopy(args), copy.deepcopy(args)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(*expected)
        got = run(program, twin, actual)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(actual, expected)


def test_shared_cache() -> None:
    args = stack_call(9)
    args[2][ODD] = args[2][ODD - 1]
    with pytest.raises(IrregularError, match="read corresponding"):
        regions.fold(Stack(9), "forward", args, {})


def test_overlapping_caches_are_refused_as_ever() -> None:
    ids, at, caches = stack_call(9)
    memory = torch.zeros(SLOTS + 1, WIDTH)
    caches[ODD - 1], caches[ODD] = memory[1:], memory[:-1]
    with pytest.raises(CaptureError, match="overlaps"):
        regions.capture(Stack(9), "forward", (ids, at, caches))


def test_caches_in_one_tensor() -> None:
    ids, at, _ = stack_call(9)
    caches = list(torch.zeros(9, SLOTS, WIDTH))
    assert found(regions.capture(Stack(9), "forward", (ids, at, caches))).captured == 4


class _Noting(Mixer):
    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        if self.index == ODD:
            self.scale = self.scale + 1
        return super().forward(x, at, cache)


def test_python_state_of_one_layer_is_refused_as_ever() -> None:
    with pytest.raises(CaptureError, match="changes Python state"):
        regions.capture(Stack(9, _mixers(_Noting)), "forward", stack_call(9))


def test_short_stack_has_no_reason_to_fold() -> None:
    program = regions.capture(Stack(5), "forward", stack_call(5))
    assert (found(program).layers, found(program).captured) == (0, 0)


def test_passes_that_treat_layers_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that changes one layer only: stamping refuses, and all layers go through the passes."""
    from cannopy import pipeline
    from cannopy.fx_passes import weight_layout
    from cannopy.fx_passes.graph import Editor, aten
    from cannopy.fx_passes.program import Program

    def odd(program: Program) -> int:
        editor = Editor(program.gm)
        node = next(n for n in editor.graph.nodes if n.meta.get("module_path", "").startswith("layers.2.mixer")
                    and n.op == "call_function" and n.target is not aten.copy_.default)
        users = list(node.users)
        with editor.before(node.next, like=node):
            new = editor.call(aten.neg.default, editor.call(aten.neg.default, node))
        for user in users:
            user.replace_input_with(node, new)
        return weight_layout.run(program) + 1

    monkeypatch.setitem(pipeline._OTHER, "weight-layout", odd)  # type: ignore[arg-type]
    program, _ = lower(Stack(9), stack_call(9))
    assert found(program).captured == 9
    assert "layer" in found(program).reason


def test_what_a_rule_asked_of_values_must_hold_in_copies() -> None:
    program = regions.capture(Stack(9, lambda s: s.layers[ODD].norm.weight.data.neg_()), "forward", stack_call(9))
    program.facts[LEAST_READ] = {"self_layers_2_norm_weight"}
    with pytest.raises(stamp.StampError, match=rf"self\.layers\[{ODD}\]\.norm\.weight has another sign"):
        stamp.run(program)
    program.facts[LEAST_READ] = {"self_layers_2_after_weight"}
    assert stamp.run(program) > 0


def test_norm_of_one_layer_in_place() -> None:
    """What `Norm` has is a parameter of its own in each layer: values are free to differ."""
    model = Stack(9, lambda s: s.layers[ODD].norm.weight.data.neg_())
    assert isinstance(model.layers[ODD].norm, Norm)
    assert found(regions.capture(model, "forward", stack_call(9))).captured == 4
