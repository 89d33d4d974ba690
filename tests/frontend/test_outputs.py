"""Results come back in eager's containers, with eager's aliases (hazards CAP-15 and CAP-27)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from cannopy.frontend import outputs
from cannopy.frontend.capture import capture
from cannopy.frontend.errors import ResultError
from cannopy.fx_passes.program import OutputSpec

from .models import assert_same, captured_and_eager, run


class Returns(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        a, b = x + 1, x * 2
        return {
            "tensor": a,
            "one-tuple": (a,),
            "list": [a, b],
            "dict": {"b": b, "a": a},
            "ordered": OrderedDict(z=a, y=b),
            "none inside": (a, None, b),
            "constants": (a, 3, 2.5, "text", True, torch.float16, a.shape),
            "nested": [{"a": (a, [b, None])}, ()],
            "twice": (a, b, a),
            "integer tensors": (x.argmax(), a > 0),
        }[self.shape]


@pytest.mark.parametrize(
    "shape",
    [
        "tensor",
        "one-tuple",
        "list",
        "dict",
        "ordered",
        "none inside",
        "constants",
        "nested",
        "twice",
        "integer tensors",
    ],
)
def test_structure_equals_eager(shape: str) -> None:
    _, found, expected, _ = captured_and_eager(Returns(shape), (torch.randn(3),))
    assert type(found) is type(expected)
    assert_same(found, expected)


def test_a_tensor_returned_twice_is_one_output() -> None:
    program, found, _, _ = captured_and_eager(Returns("twice"), (torch.randn(3),))
    assert len(program.gm.graph.output_node().args[0]) == 2
    assert found[0] is found[2]


def test_none_is_a_result() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            x.add_(1)

    x = torch.zeros(2)
    _, found, expected, _ = captured_and_eager(Writes(), (x,))
    assert found is None
    assert expected is None
    assert x.tolist() == [1.0, 1.0]


def test_model_output_of_transformers() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, cache: Any) -> CausalLMOutputWithPast:
            return CausalLMOutputWithPast(logits=x + 1, cache=cache, hidden_states=(x * 2, None))

    cache = object()
    _, found, expected, _ = captured_and_eager(Model(), (torch.randn(3), cache))
    assert type(found) is CausalLMOutputWithPast
    assert list(found.keys()) == list(expected.keys()) == ["logits", "cache", "hidden_states"]
    assert found.loss is None
    assert found.cache is cache
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.hidden_states[0], expected.hidden_states[0])


class ReturnsCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv = torch.zeros(4, 2)

    def forward(self, x: torch.Tensor, kv: torch.Tensor, p: int, what: str) -> Any:
        kv[:, p] = x
        self.kv.add_(1)
        return {
            "the cache": kv,
            "a slice": kv[:, : p + 1],
            "a transpose": (kv.t(), kv.flatten()),
            "an input": (x, x[1:]),
            "own state": (self.kv, self.kv[2:]),
            "a copy": kv.clone(),
            "computed from it": kv * 2,
        }[what]


@pytest.mark.parametrize(
    "what", ["the cache", "a slice", "a transpose", "an input", "own state", "a copy", "computed from it"]
)
def test_aliases_of_the_callers_tensors(what: str) -> None:
    model, args = ReturnsCache(), (torch.randn(4), torch.randn(4, 6)[:, 1:4], 1, what)
    program, found, expected, (twin, twin_args, _) = captured_and_eager(model, args)
    assert_same(found, expected)
    assert torch.equal(args[1], twin_args[1])
    assert torch.equal(model.kv, twin.kv)

    def touches(result: Any, owner: nn.Module, call: tuple[Any, ...]) -> list[list[bool]]:
        tensors = result if isinstance(result, tuple) else (result,)
        return [
            [t.untyped_storage().data_ptr() == o.untyped_storage().data_ptr() for o in (call[0], call[1], owner.kv)]
            for t in tensors
        ]

    assert touches(found, model, args) == touches(expected, twin, twin_args)
    # A second call with other tensors aliases those, not the captured ones.
    again = (torch.randn(4), torch.zeros(4, 6)[:, 1:4], 1, what)
    assert touches(run(program, model, again), model, again) == touches(expected, twin, twin_args)


def test_a_view_follows_the_callers_storage_offset() -> None:
    class Slices(nn.Module):
        def forward(self, kv: torch.Tensor) -> torch.Tensor:
            kv.add_(1)
            return kv[1:, 1]

    storage = torch.arange(24.0)
    program = capture(Slices(), "forward", (storage[:8].view(4, 2),))
    other = storage[16:].view(4, 2)
    assert run(program, Slices(), (other,)).tolist() == [20.0, 22.0, 24.0]


def test_objects_reached_through_attributes_return_by_identity() -> None:
    class State:
        def __init__(self) -> None:
            self.inner = [State.Part()]

        class Part:
            pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = State()

        def forward(self, x: torch.Tensor, options: dict[str, Any]) -> Any:
            return x + 1, self.state.inner[0], options, self

    model, options = Model(), {"a": 1}
    program = capture(model, "forward", (torch.ones(2), options))
    found = run(program, model, (torch.ones(2), options))
    assert found[1] is model.state.inner[0]
    assert found[2] is options
    assert found[3] is model


def test_a_container_unknown_to_this_process_is_named() -> None:
    spec = OutputSpec('[1, {"type": "gone.Result", "context": "null", "children_spec": []}]', ())
    with pytest.raises(ResultError, match=r"gone\.Result"):
        outputs.builder(spec)
