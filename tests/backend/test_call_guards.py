"""A call that is not like the compiled one is refused: other values, other arguments, tensors shared or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cannopy.backend.build import build
from cannopy.backend.guards import GuardError
from cannopy.backend.runtime import CompiledModel
from cannopy.frontend.capture import capture
from tests.backend.programs import eager, look, make_output

X, Y, P, Q, M, N = (torch.full((2,), float(i)) for i in range(6))


class Branches(torch.nn.Module):
    """What it computes depends on values, on what is None and on how many tensors there are."""

    def forward(
        self, x: torch.Tensor, n: int, parts: list[torch.Tensor], mode: dict[str, Any], mask: Any = None
    ) -> dict[str, torch.Tensor]:
        total = x * n + sum(parts)
        total = total * 2 if mode["a"][0] == "on" else total
        return {"y": total if mask is None else total + 1}


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x + 2 * y}


def compiled(model: torch.nn.Module, *args: Any, **kwargs: Any) -> CompiledModel:
    model.eval()
    found = look(model, args, eager(), **kwargs)
    return build(
        capture(model, "forward", args, kwargs), model, "forward", args, kwargs, eager(), found, {}, make_output
    )


def on() -> dict[str, Any]:
    return {"a": ["on", Y]}


CALLS: dict[str, tuple[Callable[[CompiledModel], Any], str]] = {
    "value": (lambda c: c(X, 4, [P, Q], on(), mask=M), r"`n` \(args\[1\]\): the graph is compiled for 3, found 4"),
    "type": (lambda c: c(X, 3.0, [P, Q], on(), mask=M), r"`n` .*compiled for 3, found 3\.0"),
    "nested value": (lambda c: c(X, 3, [P, Q], {"a": ["off", Y]}, mask=M), "compiled for 'on', found 'off'"),
    "one more": (lambda c: c(X, 3, [P, Q, N], on(), mask=M), r"`parts\[2\]` .*compiled for nothing there"),
    "one less": (lambda c: c(X, 3, [P], on(), mask=M), r"`parts\[1\]` .*expected a tensor; nothing at"),
    "more keys": (lambda c: c(X, 3, [P, Q], on() | {"b": 1}, mask=M), r"`mode\['b'\]` .*found a constant"),
    "none": (lambda c: c(X, 3, [P, Q], on(), mask=None), r"`kwargs\['mask'\]`.*found a constant"),
    "not given": (lambda c: c(X, 3, [P, Q], on()), r"`kwargs\['mask'\]`.*compiled for a tensor there"),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_other_calls_are_refused(call: Callable[[CompiledModel], Any], message: str) -> None:
    model = Branches()
    c = compiled(model, X, 3, [P, Q], on(), mask=M)
    with pytest.raises(GuardError, match=message):
        call(c)
    assert torch.equal(c(X, 3, [P, Q], on(), mask=M)["y"], model(X, 3, [P, Q], on(), M)["y"])


class State:
    """An object whose plain attributes the method reads, all but one."""

    def __init__(self, keys: torch.Tensor, scale: float = 2.0, on: bool = True, factor: int = 3) -> None:
        self.keys, self.scale, self.table, self.unread = keys, scale, {"on": on}, factor


class ReadsState(torch.nn.Module):
    def forward(self, x: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
        y = x * state.scale + state.keys
        return {"y": y + 1 if state.table["on"] else y}


def test_plain_values_that_are_read_from_objects_are_compared() -> None:
    model = ReadsState()
    c = compiled(model, X, State(Y))
    for state in (State(Q), State(Y, factor=5)):
        assert torch.equal(c(X, state)["y"], model(X, state)["y"])
    for other, message in ((State(Y, 4.0), r"`state.scale` .*compiled for 2\.0, found 4\.0"),
                           (State(Y, on=False), r"`state.table\['on'\]` .*compiled for True, found False")):
        with pytest.raises(GuardError, match=message):
            c(X, other)


@pytest.mark.parametrize(("other", "found"), [
    (torch.sparse_coo_tensor(torch.zeros(1, 1).long(), torch.ones(1), (2,)), "a sparse_coo tensor"),
    (torch.nested.nested_tensor([torch.ones(2)]), "a nested tensor"),
])
def test_tensors_without_strides_are_refused(other: torch.Tensor, found: str) -> None:
    c = compiled(Sum(), X, Y)
    for _ in range(2):  # by the guards, and by what remembers a call
        with pytest.raises(GuardError, match=rf"`y` .*found {found}"):
            c(X, other)
        c(X, Y)


def test_one_tensor_is_not_two() -> None:
    model = Sum()
    same, apart = compiled(model, X, X), compiled(model, X, Y)
    assert torch.equal(same(Y, Y)["y"], model(Y, Y)["y"])
    with pytest.raises(GuardError, match=r"`y` .*compiled for the tensor at args\[0\] there, found a tensor"):
        same(X, Y)
    with pytest.raises(GuardError, match=r"`y` .*compiled for a tensor there, found the tensor at args\[0\]"):
        apart(X, X)
    assert look(model, (X, X), eager()).fingerprint.key != look(model, (X, Y), eager()).fingerprint.key
