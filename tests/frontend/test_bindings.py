"""Each placeholder is bound to the user's own tensor by a path that a later process can follow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cannopy.frontend.capture import capture
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import InputSpec, Program

from .models import assert_same, captured_and_eager


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Everything(nn.Module):
    """Reads one tensor of every kind that can be bound."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.blocks = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.named = nn.ModuleDict({"0": nn.LayerNorm(4), "a b": nn.LayerNorm(4)})
        self.plain = torch.randn(4)
        self.in_list = [torch.randn(4)]
        self.in_dict = {"a,\"b']": torch.randn(4)}
        self.holder = Holder(torch.randn(4))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, *rest: torch.Tensor, flag: bool = True, **more: Any
    ) -> torch.Tensor:
        h = x + 2 * y + self.weight + 3 * self.table + 5 * self.plain + 7 * self.in_list[0]
        h = h + 11 * self.in_dict["a,\"b']"] + 13 * self.holder.tensor + 17 * rest[1] + 19 * more["cache"].tensor
        h = self.blocks[1](h) + more["nested"]["k"][0]
        return self.named["0"](self.named["a b"](h)) if flag else h


EXPECTED = {
    "args[0]": "argument",
    "args[1]": "argument",
    "args[3]": "argument",
    "kwargs['nested']['k'][0]": "argument",
    "kwargs['cache'].tensor": "state",
    "self.weight": "parameter",
    "self.table": "buffer",
    "self.plain": "state",
    "self.in_list[0]": "state",
    "self.in_dict['a,\"b\\']']": "state",
    "self.holder.tensor": "state",
    "self.blocks[1].weight": "parameter",
    "self.blocks[1].bias": "parameter",
    "self.named['a b'].weight": "parameter",
    "self.named['a b'].bias": "parameter",
    "self._modules['named']._modules['0']._parameters['weight']": "parameter",
    "self._modules['named']._modules['0']._parameters['bias']": "parameter",
}


def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(torch.randn(4) for _ in range(4))
    return args, {"cache": Holder(torch.randn(4)), "nested": {"k": [torch.randn(4)]}}


def specs(program: Program) -> dict[str, InputSpec]:
    return {s.source: s for s in program.inputs}


def test_every_kind_of_tensor_is_bound() -> None:
    model, (args, kwargs) = Everything(), call()
    program, found, expected, _ = captured_and_eager(model, args, kwargs)
    kinds = {s.source: s.kind for s in program.inputs}
    # A ModuleDict has no index 0, so this module keeps the long form.
    assert kinds == EXPECTED
    bias = compile_path("self._modules['named']._modules['0']._parameters['bias']")(model, (), {})
    assert bias is model.named["0"].bias
    assert_same(found, expected)


def test_specs_describe_the_users_tensors_and_placeholders_in_order() -> None:
    model, (args, kwargs) = Everything(), call()
    program = capture(model, "forward", args, kwargs)
    placeholders = program.gm.graph.find_nodes(op="placeholder")
    assert [n.name for n in placeholders] == [s.name for s in program.inputs]
    for node, spec in zip(placeholders, program.inputs, strict=True):
        tensor = compile_path(spec.source)(model, args, kwargs)
        assert (spec.shape, spec.stride, spec.dtype) == (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        assert tuple(node.meta["val"].shape) == spec.shape
        assert spec.view is None
        assert not spec.mutated
    assert "self_blocks_1_weight" in {s.name for s in program.inputs}


SCALE, BIAS = torch.full((4,), 2.0), torch.ones(4)


class Named(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor = SCALE, *, bias: torch.Tensor = BIAS) -> torch.Tensor:
        return x * scale + bias


@pytest.mark.parametrize(
    ("args", "kwargs", "sources"),
    [
        (1, (), ["args[0]", "self.forward.__defaults__[0]", "self.forward.__kwdefaults__['bias']"]),
        (2, (), ["args[0]", "args[1]", "self.forward.__kwdefaults__['bias']"]),
        (0, ("scale", "x"), ["kwargs['x']", "kwargs['scale']", "self.forward.__kwdefaults__['bias']"]),
        (1, ("bias",), ["args[0]", "self.forward.__defaults__[0]", "kwargs['bias']"]),
    ],
)
def test_named_parameters_follow_the_callers_spelling(args: int, kwargs: tuple[str, ...], sources: list[str]) -> None:
    positional, named = tuple(torch.randn(4) for _ in range(args)), {k: torch.randn(4) for k in kwargs}
    program, found, expected, _ = captured_and_eager(Named(), positional, named)
    assert sorted(s.source for s in program.inputs) == sorted(sources)
    assert_same(found, expected)


class PopsOptions(nn.Module):
    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return x * 2 if options.pop("double") else x + options["y"]


def test_the_callers_keywords_may_be_consumed() -> None:
    kwargs = {"double": False, "y": torch.randn(4)}
    program, found, expected, _ = captured_and_eager(PopsOptions(), (torch.randn(4),), kwargs)
    assert_same(found, expected)
    assert set(kwargs) == {"double", "y"}
    assert program.facts["constants"] == {"kwargs['double']": False}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_tied_weights_are_one_placeholder() -> None:
    program, found, expected, _ = captured_and_eager(Tied(), (torch.tensor([1, 3]),))
    assert [s.source for s in program.inputs if s.kind == "parameter"] == ["self.embed.weight"]
    assert_same(found, expected)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_one_tensor_twice_stays_one_tensor() -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x + 2 * y

    x = torch.ones(2)
    program, found, expected, _ = captured_and_eager(Sums(), (x, x))
    assert_same(found, expected)
    assert len(program.inputs) == 1


def test_strides_of_weights_are_kept() -> None:
    program, found, expected, _ = captured_and_eager(Strided(), (torch.randn(2, 4),))
    assert specs(program)["self.weight"].stride == (1, 4)
    assert_same(found, expected)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.length = torch.zeros((), dtype=torch.long)
        self.kv = torch.zeros(8, 4)
        self.unused = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kv.index_copy_(0, self.length + torch.arange(2), x)
        self.length.add_(2)
        return self.kv.sum(0)


def test_mutated_state_is_marked_and_written_back_once() -> None:
    model = Counter()
    twin = copy.deepcopy(model)
    program = capture(model, "forward", (torch.randn(2, 4),))
    assert {s.source: s.mutated for s in program.inputs} == {"self.kv": True, "self.length": True, "args[0]": False}
    copies = program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert sorted(str(n.args[0]) for n in copies) == ["self_kv", "self_length"]
    assert all(not n.users for n in copies)
    mutable = [n for n in program.gm.graph.nodes if n.op == "call_function" and n.target._schema.is_mutable]
    assert mutable == copies
    for step in range(3):
        x = torch.full((2, 4), step + 1.0)
        tensors = [compile_path(s.source)(model, (x,), {}) for s in program.inputs]
        program.gm(*tensors)
        twin(x)
        assert torch.equal(model.kv, twin.kv)
        assert int(model.length) == int(twin.length) == 2 * step + 2


def test_python_values_are_recorded() -> None:
    class Switch(nn.Module):
        def forward(self, x: torch.Tensor, n: int, mode: dict[str, Any], flag: bool | None = None) -> torch.Tensor:
            return x * n if mode["a"][0] == "on" and flag is None else x

    program = capture(Switch(), "forward", (torch.ones(2), 3, {"a": ["on", torch.zeros(2)]}), {"flag": None})
    assert program.facts["constants"] == {"args[1]": 3, "args[2]['a'][0]": "on", "kwargs['flag']": None}
