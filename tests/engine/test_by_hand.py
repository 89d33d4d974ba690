"""GE types and graph forms that torchair's ATen lowering does not produce, from graphs written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cannopy.backend.host.engine import HostGraph
from cannopy.backend.host.ge_ops.op import OpError
from tests.engine.by_hand import Graph

pytestmark = pytest.mark.usefixtures("activated")
I64 = torch.int64


def run(graph: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of a graph."""
    host = HostGraph("by_hand")
    host.load(graph)
    host.compile()
    return host.run(list(inputs))


def one(
    type_: str, args: list[torch.Tensor], names: tuple[str, ...], outs: int = 1, **attrs: Any
) -> list[torch.Tensor]:
    """The outputs of one op whose first input is a graph input and whose others are constants."""
    g = Graph()
    edges = [g.data(0, args[0]), *(g.const(a) for a in args[1:])]
    op = g.op(type_, type_, tuple(edges), names, outs)
    for key, value in attrs.items():
        _set(op.attr[key], value)
    return run(g.outputs(*(f"{type_}:{i}" for i in range(outs))), args[0])


def _set(attr: Any, value: Any) -> None:
    if isinstance(value, bool):
        attr.b = value
    elif isinstance(value, int):
        attr.i = value
    elif isinstance(value, float):
        attr.f = value
    elif isinstance(value, str):
        attr.s = value.encode()
    else:
        attr.list.i.extend(value)


X = torch.arange(12.0).reshape(3, 4)


def _t(*values: Any, dtype: torch.dtype = I64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("type_", "args", "names", "attrs", "want"),
    [
        ("AddV2", [X, X], ("x1", "x2"), {}, X + X),
        ("Square", [X], ("x",), {}, X * X),
        ("Muls", [X], ("x",), {"value": 0.5}, X / 2),
        ("Exp", [X / 4], ("x",), {"base": 2.0, "scale": 3.0, "shift": 1.0}, 2 ** (X / 4 * 3 + 1)),
        ("Swish", [X], ("x",), {"scale": 2.0}, X / (1 + torch.exp(-2 * X))),
        ("FastGelu", [X], ("x",), {}, X / (1 + torch.exp(-1.702 * X))),
        ("GeluV2", [X], ("x",), {"approximate": "none"}, X * 0.5 * (1 + torch.erf(X / 2**0.5))),
        ("Axpy", [X, X], ("x1", "x2"), {"alpha": -1.0}, X * 0),
        ("Select", [X > 5, X, -X], ("c", "a", "b"), {}, torch.where(X > 5, X, -X)),
        ("ConcatV2D", [X, X], ("x0", "x1"), {"concat_dim": 1}, torch.cat([X, X], 1)),
        ("TransposeD", [X], ("x",), {"perm": [1, 0]}, X.t()),
        ("Slice", [X, _t(1, 0), _t(2, -1)], ("x", "o", "s"), {}, X[1:3]),
        ("GatherNd", [X, _t([0, 1], [2, 3])], ("x", "i"), {}, _t(1.0, 11.0, dtype=torch.float32)),
        ("ReduceSumD", [X], ("x",), {"axes": [0], "keep_dims": True}, X.sum(0, keepdim=True)),
        ("ReduceMean", [X, _t(dtype=I64)], ("x", "axes"), {"noop_with_empty_axes": True}, X),
        ("ReduceMin", [X, _t(1)], ("x", "axes"), {}, _t(0.0, 4.0, 8.0, dtype=torch.float32)),
        ("ReduceProd", [X, _t(0, 1)], ("x", "axes"), {"keep_dims": True}, torch.zeros(1, 1)),
        ("ReduceProd", [X + 1, _t(0)], ("x", "axes"), {}, (X + 1)[0] * (X + 1)[1] * (X + 1)[2]),
        (
            "TensorScatterUpdate",
            [X, _t([1], [0]), torch.ones(2, 4)],
            ("x", "i", "u"),
            {},
            torch.cat([torch.ones(2, 4), X[2:]]),
        ),
        (
            "StridedSliceV2",
            [X, _t(1, 0), _t(2, 3), _t(0, 1), _t(1, 2)],
            ("x", "begin", "end", "axes", "strides"),
            {"shrink_axis_mask": 1, "end_mask": 2},
            X[1, 0::2],
        ),
        ("BatchMatMulV2", [X, X], ("x1", "x2"), {"adj_x2": True}, X @ X.t()),
        ("MatMulV3", [X, X], ("x1", "x2"), {"transpose_x1": True}, X.t() @ X),
        ("Bitcast", [X], ("x",), {"type": 4}, X.view(torch.uint8).reshape(3, 4, 4)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_type(type_: str, args: list[torch.Tensor], names: tuple[str, ...], attrs: Any, want: torch.Tensor) -> None:
    (got,) = one(type_, args, names, **attrs)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=3e-7, atol=1e-7)


def test_types_with_several_outputs() -> None:
    values, indices = one("TopK", [X, _t(2)], ("x", "k"), 2, dim=-1, largest=False)
    assert values.tolist() == [[0, 1], [4, 5], [8, 9]]
    assert indices.dtype == torch.int32
    first, second = one("SplitD", [X], ("x",), 2, split_dim=1, num_split=2)
    assert torch.equal(first, X[:, :2])
    assert torch.equal(second, X[:, 2:])


def test_one_hot() -> None:
    (got,) = one("OneHot", [_t(2, 0), _t(3), _t(7), _t(1)], ("x", "depth", "on", "off"), axis=0)
    assert got.tolist() == [[1, 7], [1, 1], [7, 1]]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64, torch.bool),
    ],
    ids=str,
)
def test_a_constant_keeps_its_bits(dtype: torch.dtype) -> None:
    bits = torch.tensor([0, 1, 0, 1] * 8, dtype=torch.uint8) if dtype is torch.bool else torch.arange(32).byte()
    value = bits.view(dtype).reshape(2, -1)
    g = Graph()
    (got,) = run(g.outputs(g.const(value)))
    assert got.dtype == dtype
    assert got.shape == value.shape
    assert torch.equal(got.contiguous().view(torch.uint8), value.view(torch.uint8))


def test_a_constant_without_elements() -> None:
    g = Graph()
    (got,) = run(g.outputs(g.const(torch.empty(0, 3, dtype=torch.bfloat16))))
    assert got.shape == (0, 3)


def test_control_edges_order_writes() -> None:
    """A read that the graph lists first, but that a control edge puts after the write, sees the new value."""
    x = torch.zeros(2, 2)
    g = Graph()
    data, index, row = g.data(0, x), g.const(_t([0])), g.const(torch.ones(1, 2))
    g.op("Neg", "late", (data, "write:-1"), ("x",), 1)
    g.op("Neg", "early", (data,), ("x",), 1)
    g.op("ScatterNdUpdate", "write", (data, index, row, "early:-1"), ("var", "indices", "updates"), 1)
    late, early = run(g.outputs("late:0", "early:0"), x)
    assert late.tolist() == [[-1, -1], [0, 0]]
    assert early.abs().sum().item() == 0
    assert x.tolist() == [[1, 1], [0, 0]]


def test_cmo_and_noop_order_only() -> None:
    g = Graph()
    data = g.data(0, X)
    g.op("NoOp", "nothing", (data.replace(":0", ":-1"),))
    g.op("Cmo", "prefetch", (data, "nothing:-1"), ("src",))
    g.op("Neg", "neg", (data, "prefetch:-1"), ("x",), 1)
    (got,) = run(g.outputs("neg:0", "prefetch:-1"), X)
    assert torch.equal(got, -X)


def test_assign_that_stays_writes_its_input() -> None:
    x = torch.zeros(3, 4)
    g = Graph()
    g.op("Assign", "assign", (g.data(0, x), g.data(1, X)), ("ref", "value"), 1)
    run(g.outputs("assign:0"), x, X)
    assert torch.equal(x, X)


def test_scatter_outside_the_cache_is_refused() -> None:
    for index in (-1, 3):
        with pytest.raises(OpError, match=r"ScatterNdUpdate.*axis 0 is outside 0 … 2"):
            one("ScatterNdUpdate", [X.clone(), _t([index]), torch.ones(1, 4)], ("var", "indices", "updates"))


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (("missing:0",), "'missing' is not in the graph"),
        (("arg0:3",), "'arg0' has no output 3"),
        (("neg:0",), "cycle through: neg"),
    ],
)
def test_broken_graphs(edges: tuple[str, ...], message: str) -> None:
    g = Graph()
    g.data(0, X)
    g.op("Neg", "neg", edges, ("x",), 1)
    with pytest.raises(OpError, match=message):
        run(g.outputs("neg:0"), X)


def test_session_calls_out_of_order() -> None:
    host = HostGraph("g")
    for call in (host.compile, host.summary, lambda: host.run([])):
        with pytest.raises(OpError, match=r"before load\(\)"):
            call()
