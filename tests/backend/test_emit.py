"""The generated source: it says what the graph does, and nothing else enters its identity."""

from __future__ import annotations

import ast
import operator

import pytest
import torch
from torch import fx

from cannopy.backend.emit import EmitError, emit, identifier, readable_name
from cannopy.fx_passes.program import InputSpec, OutputSpec, Program
from tests.backend.programs import aten, example, tiny, tiny_program


def emitted(program: Program):
    return emit(program, "Tiny", "forward", "f" * 64)


def one_node(target, *args, placeholders: int = 1, **kwargs) -> Program:
    graph = fx.Graph()
    xs = [graph.placeholder(f"x{i}") for i in range(placeholders)]
    node = graph.call_function(target, tuple(a(xs) if callable(a) else a for a in args), kwargs)
    node.meta["source"] = "model.py:7"
    graph.output((node,))
    inputs = [InputSpec(f"x{i}", "argument", f"args[{i}]", (2, 2), (2, 1), torch.float32) for i in range(placeholders)]
    return Program(fx.GraphModule(torch.nn.Module(), graph), inputs, OutputSpec("", (("tensor", 0),)))


def test_statements_and_provenance() -> None:
    model = tiny()
    module = emitted(tiny_program(model, *example()))
    tree = ast.parse(module.source)
    assert [n.names[0].name for n in tree.body if isinstance(n, ast.Import)] == ["torch", "torch_npu"]
    assert module.arguments == ("count", "keys", "x")
    assert module.written == ("count", "keys")
    assert {(a.name, a.kind) for a in module.attributes} == {("w", "weight"), ("scale", "buffer")}
    assert (
        "        # proj tiny.py:30 [linear]\n        mm_default = torch.ops.aten.mm.default(arg_0, self.w)\n"
        in module.source
    )
    assert "torch.ops.aten.copy_.default(arg_1_keys, add_tensor)" in module.source
    assert "= torch.ops.aten.copy_" not in module.source
    assert f"class {module.class_name}(torch.nn.Module)" in module.source
    assert module.digest[:12] in module.class_name
    assert module.digest[:12] in module.method_name


def test_fingerprint_is_in_the_repr() -> None:
    namespace: dict = {}
    module = emitted(tiny_program(tiny(), *example()))
    exec(module.source, namespace)
    assert "f" * 64 in repr(namespace[module.class_name]())


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda p: None, True),
        (lambda p: [n.meta.update(source="/elsewhere/tiny.py:99") for n in p.gm.graph.nodes], True),
        (lambda p: p.weights.__setitem__(0, type(p.weights[0])("w", ("weight",), "(w[0] * 3.0).t()")), False),
        (
            lambda p: setattr(
                next(iter(p.gm.graph.find_nodes(op="call_function", target=aten.add.Tensor))), "args", ()
            ),
            False,
        ),
    ],
    ids=["nothing", "provenance", "recipe", "node"],
)
def test_digest(change, same: bool) -> None:
    a, b = (tiny_program(tiny(), *example()) for _ in range(2))
    change(b)
    assert (emitted(a).digest == emitted(b).digest) is same


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "text"),
    [
        (aten.clamp.default, (lambda x: x[0], float("-inf"), float("inf")), {}, 'x, float("-inf"), float("inf"))'),
        (aten.add.Scalar, (lambda x: x[0], float("nan")), {}, 'x, float("nan"))'),
        (aten._to_copy.default, (lambda x: x[0],), {"dtype": torch.bfloat16}, "x, dtype=torch.bfloat16)"),
        (aten.view.default, (lambda x: x[0], [4]), {}, "x, [4])"),
        (aten.full.default, ([], True), {"device": torch.device("cpu")}, "[], True, device=torch.device('cpu'))"),
        (aten.clone.default, (lambda x: x[0],), {"memory_format": torch.contiguous_format}, "torch.contiguous_format)"),
    ],
)
def test_literals(target, args, kwargs, text: str) -> None:
    source = emitted(one_node(target, *args, **kwargs)).source
    assert text.replace("x,", "arg_0,") in source
    ast.parse(source)


class SymbolicSize:
    """Stands for a size that is only known at run time."""

    def __repr__(self) -> str:
        return "Size0"


def test_refuses_what_it_cannot_say() -> None:
    with pytest.raises(EmitError, match=r"node relu \(model.py:7\): .*not an operator of torch.ops"):
        emitted(one_node(torch.relu, lambda x: x[0]))
    with pytest.raises(EmitError, match=r"model.py:7.*SymbolicSize.*not a constant"):
        emitted(one_node(aten.add.Tensor, lambda x: x[0], SymbolicSize()))
    program = one_node(aten.relu.default, lambda x: x[0])
    program.inputs.clear()
    with pytest.raises(EmitError, match="x0 has neither"):
        emitted(program)


def test_getitem_and_multiple_outputs() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    topk = graph.call_function(aten.topk.default, (x, 1))
    graph.output((graph.call_function(operator.getitem, (topk, 1)), x))
    inputs = [InputSpec("x", "argument", "args[0]", (2,), (1,), torch.float32)]
    source = emitted(Program(fx.GraphModule(torch.nn.Module(), graph), inputs, OutputSpec("", ()))).source
    assert "getitem = topk_default[1]" in source
    assert "return (getitem, arg_0,)" in source


def test_names_never_collide() -> None:
    graph = fx.Graph()
    names = ["a", "b", "c", "d"]
    sources = ["self.torch", "args[0]", "self.a.b", "self.a_b"]
    a, b, c, d = (graph.placeholder(n) for n in names)
    first = graph.call_function(aten.add.Tensor, (a, b), name="arg_0")
    second = graph.call_function(aten.add.Tensor, (c, d), name="torch_1")
    graph.output((graph.call_function(aten.sub.Tensor, (first, second)),))
    inputs = [InputSpec(n, "state", s, (1,), (1,), torch.float32) for n, s in zip(names, sources, strict=True)]
    module = emitted(Program(fx.GraphModule(torch.nn.Module(), graph), inputs, OutputSpec("", ())))
    namespace: dict = {}
    exec(module.source, namespace)
    run = getattr(namespace[module.class_name](), module.method_name)
    values = [torch.tensor([float(10**i)]) for i in range(4)]
    (result,) = run(*[values[names.index(n)] for n in module.arguments])
    assert result.item() == 1 + 10 - 100 - 1000


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("self._modules['model']._modules['layers']._modules['0']._parameters['weight']", "model_layers_0_weight"),
        ("self.model.layers[3].mlp.gate.weight", "model_layers_3_mlp_gate_weight"),
        ("kwargs['cache'].layers[0].keys", "cache_layers_0_keys"),
        ("args[0]", "arg_0"),
    ],
)
def test_readable_names(source: str, name: str) -> None:
    assert readable_name(InputSpec("x", "state", source, (), (), torch.float32)) == name


@pytest.mark.parametrize(
    ("name", "result"), [("Ab1", "Ab1"), ("1x", "_1x"), ("模型 a'b", "___a_b"), ("", "_"), ("x" * 99, "x" * 48)]
)
def test_identifier(name: str, result: str) -> None:
    assert identifier(name) == result
