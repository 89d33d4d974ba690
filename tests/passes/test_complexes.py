"""Complex numbers between real ones become pairs of real ones; others are refused where the graph is legalised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.legalise import LegaliseError, complexes
from tests.passes.graphs import program_of, run

Tensor = torch.Tensor


def turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(4, 3, -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def backwards(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(4, 3, -1, 2))
    turn = torch.polar(torch.full_like(angles, 2.0), angles).conj()
    return torch.view_as_real(turn.unsqueeze(1) * pairs).flatten(-2)


def summed(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(4, 3, -1, 2)).transpose(0, 1)
    other = torch.complex(angles, angles * 2)
    return torch.view_as_real((pairs - other) * angles + other)


def real_first(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(4, 3, -1, 2))
    return torch.view_as_real((angles[:, None] - pairs) + angles[:, None])


def operands() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn((4, 3, 16), generator=g), torch.randn((4, 8), generator=g)


def complex_nodes(program: Any) -> list[str]:
    return [str(n.target) for n in program.gm.graph.nodes if n.op == "call_function" and n.meta["val"].is_complex()]


@pytest.mark.parametrize("form", [turned, backwards, summed, real_first])
def test_is_the_same_in_real_numbers(form: Callable[..., Tensor]) -> None:
    program = program_of(form, *operands())
    assert complex_nodes(program)
    normalise.run(program)
    program.gm.graph.eliminate_dead_code()
    assert complex_nodes(program) == []
    assert complexes.run(program, Editor(program.gm)) == 0
    (found, *_), wanted = run(program, *operands()), form(*(t.double() for t in operands()))
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-6, atol=1e-6)


def table(positions: Tensor, x: Tensor, turns: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.reshape(4, 3, -1, 2)) * turns[positions][:, None])


def test_a_complex_buffer_becomes_two_weights() -> None:
    x, angles = operands()
    inputs = (torch.tensor([2, 0, 1, 1]), x, torch.polar(torch.ones_like(angles), angles))
    program = program_of(table, *inputs)
    program.inputs[2] = dataclasses.replace(program.inputs[2], kind="buffer", source="self.turns")
    normalise.run(program)
    program.gm.graph.eliminate_dead_code()
    assert complex_nodes(program) == []
    recipes = {e.recipe for e in program.weights}
    assert recipes == {"w[0].real.contiguous()", "w[0].imag.contiguous()"}
    real, imaginary = (e.build([inputs[2]]) for e in program.weights)
    assert torch.equal(torch.complex(real, imaginary), inputs[2])


def test_others_are_refused_with_line_and_remedy() -> None:
    program = program_of(lambda x: torch.view_as_real(torch.fft.fft(x)), operands()[0])
    normalise.run(program)
    with pytest.raises(LegaliseError, match=r"_fft_r2c.default at model.py:1 .*expected real numbers.*x \* cos"):
        complexes.run(program, Editor(program.gm))
