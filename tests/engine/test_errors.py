"""What the engine refuses, and that the message leads to the op and the FX node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cannopy.backend.host import engine
from cannopy.backend.host.engine import HostGraph
from cannopy.backend.host.ge_ops.op import OpError


def _recorded(compiled: Callable[..., Any], fn: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """A copy of the GE graph that ``fn`` lowers to."""
    lowered = compiled(fn)
    lowered(*inputs)
    graph = engine.recorded()[-1].ge_graph
    copy = type(graph)()
    copy.CopyFrom(graph)
    return copy


def _run(graph: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    host = HostGraph("tampered")
    host.load(graph)
    return host.run(list(inputs))


def _chain(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1).exp()


def _op(graph: Any, type_: str) -> Any:
    return next(op for op in graph.op if op.type == type_)


def test_unknown_type_names_type_op_and_fx_node(compiled: Callable[..., Any]) -> None:
    pool = compiled(lambda x: torch.nn.functional.avg_pool2d(x, 2))
    with pytest.raises(OpError, match=r"GE op AvgPoolV2 'AvgPoolV2' from FX node avg_pool2d-aten\.avg_pool2d\.default"):
        pool(torch.randn(1, 1, 4, 4))


@pytest.mark.parametrize(
    ("note", "found"),
    [
        (
            "Tensor(dtype=torch.float32, shape=torch.Size([2, 5])",
            r"\[2, 4\], the graph declares torch.float32 \[2, 5\]",
        ),
        (
            "Tensor(dtype=torch.float32, shape=torch.Size([4, 2])",
            r"\[2, 4\], the graph declares torch.float32 \[4, 2\]",
        ),
    ],
)
def test_tampered_shape(note: str, found: str, compiled: Callable[..., Any]) -> None:
    x = torch.randn(2, 4)
    graph = _recorded(compiled, _chain, x)
    _op(graph, "SoftmaxV2").output_desc[0].attr["_meta"].s = note.encode()
    with pytest.raises(OpError, match=rf"SoftmaxV2 'SoftmaxV2' from FX node _softmax.*output 0 is .*{found}"):
        _run(graph, x)


def test_tampered_dtype(compiled: Callable[..., Any]) -> None:
    x = torch.randn(2, 4)
    graph = _recorded(compiled, _chain, x)
    graph_desc = _op(graph, "Exp").output_desc[0]
    graph_desc.dtype = _op(graph, "Const").output_desc[0].dtype = 4  # DT_INT8 of the protobuf is 3, DT_UINT8 4
    with pytest.raises(OpError, match=r"Exp 'Exp'.*output 0 is torch.float32 .*declares torch\.\w*int"):
        _run(graph, x)


def test_untampered_graph_runs(compiled: Callable[..., Any]) -> None:
    x = torch.randn(2, 4)
    (got,) = _run(_recorded(compiled, _chain, x), x)
    assert torch.equal(got, _chain(x))


def test_a_late_view_does_not_hide_the_element_count(compiled: Callable[..., Any]) -> None:
    x = torch.randn(2, 4)
    graph = _recorded(compiled, lambda t: (t * 2).view(4, 2).exp(), x)
    _op(graph, "Mul").output_desc[0].attr["_meta"].s = b"Tensor(dtype=torch.float32, shape=torch.Size([4, 3])"
    with pytest.raises(OpError, match=r"Mul 'Mul'.*declares torch.float32 \[4, 3\]"):
        _run(graph, x)


def test_wrong_input(compiled: Callable[..., Any]) -> None:
    graph = _recorded(compiled, _chain, torch.randn(2, 4))
    with pytest.raises(OpError, match=r"graph input 0 \(\w+\) is torch.float32 \[3, 4\], the graph declares"):
        _run(graph, torch.randn(3, 4))
    with pytest.raises(OpError, match=r"graph input 0 .* is torch.float64"):
        _run(graph, torch.randn(2, 4).double())


def test_a_failing_kernel_names_the_op_and_its_inputs(compiled: Callable[..., Any]) -> None:
    lookup = compiled(lambda w, i: torch.nn.functional.embedding(i, w))
    with pytest.raises(OpError, match=r"GatherV2 'GatherV2' from FX node embedding.*x: torch.float32 \[4, 2\]"):
        lookup(torch.randn(4, 2), torch.tensor([7]))


def test_an_unknown_attribute_value(compiled: Callable[..., Any]) -> None:
    x = torch.randn(2, 4)
    graph = _recorded(compiled, lambda t: t.cumsum(-1), x)
    _op(graph, "Cumsum").attr["reverse"].b = True
    with pytest.raises(OpError, match=r"Cumsum 'Cumsum'.*reverse"):
        _run(graph, x)
