"""Parity of a graph between passes: what is compared, what is left as it was, how sharp it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cannopy.frontend.capture import capture
from cannopy.fx_passes.graph import Editor, aten
from cannopy.fx_passes.program import Program
from cannopy.parity.graph import GraphParity
from cannopy.parity.measure import FEW_ROWS

Tensor = torch.Tensor
WIDTH = 32


class Owner(nn.Module):
    """A model that keeps its cache, counts its calls and returns two results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("cache", torch.zeros(64, WIDTH))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.cache[3 : 3 + x.shape[0]] = self.up(x)
        self.calls.add_(1)
        return torch.tanh(x) + self.cache.mean(0), torch.exp(x)


def case(rows: int = FEW_ROWS) -> tuple[GraphParity, Program, Owner]:
    model = Owner().to(torch.bfloat16).eval()
    x = torch.randn(rows, WIDTH).to(torch.bfloat16)
    program = capture(model, "forward", (x,))
    return GraphParity(model, "forward", (x,), {}, program.inputs), program, model


def scaled(program: Program, target: object, factor: float) -> None:
    """Multiply the result of the call of ``target`` by ``factor``."""
    editor = Editor(program.gm)
    node = next(n for n in program.gm.graph.nodes if n.target is target)
    with editor.before(node.next, like=node):
        new = editor.call(aten.mul.Tensor, node, factor)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    program.gm.recompile()


@pytest.mark.parametrize("rows", [1, FEW_ROWS])
def test_a_captured_graph_passes_and_leaves_the_model_alone(rows: int) -> None:
    parity, program, model = case(rows)
    report = parity.check(program)
    assert report.passed
    assert [e.phase for e in report.errors] == ["result 0", "result 1", "self.cache", "self.calls"]
    assert {e.phase: e.compiled.tokens for e in report.errors}["self.cache"] == rows
    assert not model.cache.any()
    assert not model.calls.any()
    assert parity.check(program).to_dict() == report.to_dict()


@pytest.mark.parametrize(
    ("rows", "factor"), [(1, 1.05), (1, 2.0), (FEW_ROWS, 1.01), (FEW_ROWS, 0.5), (FEW_ROWS, float("nan"))]
)
@pytest.mark.parametrize(
    ("target", "names"),
    [(aten.tanh.default, "result 0"), (aten.exp.default, "result 1"), (aten.mm.default, "self.cache")],
)
def test_a_wrong_factor_fails(rows: int, factor: float, target: object, names: str) -> None:
    parity, program, _ = case(rows)
    scaled(program, target, factor)
    assert any(sentence.startswith(f"{names}: ") for sentence in parity.check(program).failures)


def _stop_counting(program: Program) -> None:
    add = next(n for n in program.gm.graph.nodes if n.target is aten.add.Tensor and n.meta["val"].dtype == torch.int64)
    add.args = (add.args[0], 0)


def _write_elsewhere(program: Program) -> None:
    write = next(n for n in program.gm.graph.nodes if n.target is aten.slice_scatter.default)
    write.args = (*write.args[:3], 4, 4 + FEW_ROWS)


@pytest.mark.parametrize("spoil", [_stop_counting, _write_elsewhere])
def test_what_is_written_counts(spoil: Callable[[Program], None]) -> None:
    parity, program, _ = case()
    spoil(program)
    program.gm.recompile()
    assert any(sentence.startswith("self.c") for sentence in parity.check(program).failures)
