"""Capture computes nothing, leaves nothing behind and gives a clean functional graph."""

from __future__ import annotations

import gc
import itertools
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import orig_code_map

from cannopy.frontend.capture import capture

from .models import assert_same, captured_and_eager, run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(x))
        q = h.view(1, 2, 3, 4)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(3, 8)
        return x + self.up(h)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.kv = torch.zeros(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.kv.add_(x)
        return x


X = torch.randn(3, 8)


def test_nothing_is_computed_or_changed() -> None:
    model = Stack()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {m: set(vars(m)) for m in model.modules()}
    versions = [t._version for t in (*model.parameters(), model.kv, X)]
    rng = torch.get_rng_state()

    capture(model, "forward", (X,))
    assert torch.equal(rng, torch.get_rng_state())
    assert model.kv.abs().max() == 0
    assert [t._version for t in (*model.parameters(), model.kv, X)] == versions
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert {m: set(vars(m)) for m in model.modules()} == attributes


def test_dynamo_is_left_as_it_was() -> None:
    model = Stack()
    code = Stack.forward.__code__
    names, known = set(globals()), len(orig_code_map.values)
    settings = torch._dynamo.config.get_config_copy()
    for _ in range(3):
        capture(model, "forward", (X,))
    assert _debug_get_cache_entry_list(code) == []
    assert len(orig_code_map.values) == known
    assert set(globals()) == names
    assert torch._dynamo.config.get_config_copy() == settings


def test_torch_compile_before_and_after() -> None:
    graphs: list[Any] = []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    model = Stack()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(X)
        assert len(graphs) == 1
        capture(model, "forward", (X,))
        capture(model, "forward", (torch.randn(3, 8),))
        compiled(X)
    assert len(graphs) == 1, "capture must not drop or invalidate the user's compiled code"
    torch._dynamo.reset()


def test_captured_modules_can_be_freed() -> None:
    import weakref

    model = Stack()
    ref = weakref.ref(model)
    program = capture(model, "forward", (X,))
    del model
    gc.collect()
    assert ref() is None
    assert program.inputs


def test_the_graph_is_functional_and_free_of_asserts() -> None:
    program, found, expected, _ = captured_and_eager(Stack().eval(), (X,))
    assert_same(found, expected)
    calls = [n.target for n in program.gm.graph.nodes if n.op == "call_function"]
    targets = [t for t in calls if t is not operator.getitem]
    assert all(isinstance(t, torch._ops.OpOverload) for t in targets)
    assert [t for t in targets if t._schema.is_mutable] == [torch.ops.aten.copy_.default]
    assert not [t for t in targets if "assert" in t.name() or "sym_" in t.name()]
    assert targets.count(torch.ops.cannopy.attention.default) == 2
    assert all("val" in n.meta for n in program.gm.graph.nodes)
    program.gm.graph.lint()


def test_casts_leave_no_assert_nodes() -> None:
    class Casts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.float32) + 1).to(torch.bfloat16)

    program = capture(Casts(), "forward", (X.bfloat16(),))
    placeholder = program.gm.graph.find_nodes(op="placeholder")[0]
    assert len(placeholder.users) == 1
    assert [str(n.target) for n in program.gm.graph.nodes if n.op == "call_function"] == [
        "aten._to_copy.default",
        "aten.add.Tensor",
        "aten._to_copy.default",
    ]


def test_provenance_of_every_node() -> None:
    program = capture(Stack(), "forward", (X,))
    first, _ = _lines(Block.forward)
    nodes = [n for n in program.gm.graph.nodes if n.op == "call_function"]
    attention = [n for n in nodes if n.target is torch.ops.cannopy.attention.default]
    assert [n.meta["module_path"] for n in attention] == ["layers.0", "layers.1"]
    assert [n.meta["layer"] for n in attention] == [0, 1]
    assert all(n.meta["source"].endswith(f"test_capture.py:{first + 3}") for n in attention)
    assert all("scaled_dot_product_attention" in n.meta["source_text"] for n in attention)
    norms = [n for n in nodes if n.target is torch.ops.aten.native_layer_norm.default]
    assert [n.meta["module_path"] for n in norms] == ["layers.0.norm", "layers.1.norm"]
    assert all(n.meta["source"].endswith(f"test_capture.py:{first + 1}") for n in norms), "not torch's own file"
    (write,) = [n for n in nodes if n.target is torch.ops.aten.copy_.default]
    assert write.meta["source_text"] == "self.kv.add_(x)"
    assert "layer" not in write.meta
    assert write.meta["module_path"] == ""


def _lines(function: Any) -> tuple[int, int]:
    code = function.__code__
    numbers = [line for *_, line in code.co_lines() if line is not None]
    return code.co_firstlineno, max(numbers)


@pytest.mark.parametrize("training", [True, False])
def test_training_flag_with_dropout_zero(training: bool) -> None:
    _, found, expected, _ = captured_and_eager(Stack().train(training), (X,))
    assert_same(found, expected)


MODES = {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize(("built", "captured"), list(itertools.product(MODES, MODES)))
def test_grad_and_inference_modes(built: str, captured: str) -> None:
    with MODES[built]():
        model, x = Stack(), torch.randn(3, 8)
    with MODES[captured]():
        program = capture(model, "forward", (x,))
        assert torch.is_inference_mode_enabled() == (captured == "inference")
        assert torch.is_grad_enabled() == (captured == "plain")
    with torch.inference_mode():
        expected = model.layers[1](model.layers[0](x))
        assert torch.equal(run(program, model, (x,)), expected)
        assert torch.equal(model.kv, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    program, found, expected, _ = captured_and_eager(_stack(dtype), (X.to(dtype),))
    assert_same(found, expected)
    assert {s.dtype for s in program.inputs} == {dtype}


def _stack(dtype: torch.dtype) -> Stack:
    model = Stack().to(dtype).eval()
    model.kv = model.kv.to(dtype)
    return model


def test_two_models_and_two_phases_in_one_process() -> None:
    one, two = Stack(), Stack()
    programs = [capture(m, "forward", (x,)) for m in (one, two) for x in (X,)]
    for model, program in zip((one, two), programs, strict=True):
        model.kv.zero_()
        found = run(program, model, (X,))
        with torch.no_grad():
            assert torch.equal(found, model.layers[1](model.layers[0](X)))
        assert torch.equal(model.kv, found)


def test_another_method_than_forward() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def decode(self, x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
            return x * self.weight * times

    _, found, expected, _ = captured_and_eager(Model(), (torch.randn(4),), {"times": 5}, method="decode")
    assert_same(found, expected)


def test_inherited_forward() -> None:
    class Sub(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    _, found, expected, _ = captured_and_eager(Sub(), (X,))
    assert_same(found, expected)


def test_tensor_constants_travel_with_the_graph() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3)

    _, found, expected, _ = captured_and_eager(Model(), (torch.randn(3),))
    assert_same(found, expected)


def test_meta_parameters_are_captured_as_cpu() -> None:
    def tokens() -> torch.Tensor:
        return torch.tensor([1, 2])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100_000, 8_192)
            self.head = nn.Linear(8_192, 100_000, bias=False)
            self.head.weight = self.embed.weight
            self.cache = torch.zeros(1 << 20, 8_192)
            self.where = self.cache.device

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.embed(ids) + torch.arange(8_192, device=self.where)
            self.cache[:2].copy_(h)
            return self.head(h)

    with torch.device("meta"):
        model = Model()
    program = capture(model, "forward", (tokens(),))
    assert model.embed.weight.is_meta
    assert model.where == torch.device("meta")
    assert {s.source: s.mutated for s in program.inputs} == {
        "self.embed.weight": False,
        "args[0]": False,
        "self.cache": True,
    }
    vals = [n.meta["val"] for n in program.gm.graph.nodes if n.op != "output"]
    assert {v.device for v in vals} == {torch.device("cpu")}
    assert {n.kwargs["device"] for n in program.gm.graph.nodes if "device" in n.kwargs} == {torch.device("cpu")}
    assert tuple(program.gm.graph.output_node().args[0][0].meta["val"].shape) == (2, 100_000)
