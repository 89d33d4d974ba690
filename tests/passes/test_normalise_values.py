"""Normalisation of random graphs changes no bit of the result and reaches a fixed point."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cannopy.fx_passes import normalise
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import program_of, run, same

STEPS = {
    "half and back": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "double and back": lambda x: x.to(torch.float64).to(torch.float32),
    "integer and back": lambda x: x.clamp(-9, 9).to(torch.int32).to(torch.int64).to(torch.float32),
    "times one": lambda x: x * 1,
    "plus zero": lambda x: x + 0,
    "minus zero": lambda x: x - 0.0,
    "square": lambda x: x * x,
    "power two": lambda x: x**2.0,
    "power minus half": lambda x: (x.abs() + 1) ** -0.5,
    "transpose": lambda x: x.transpose(0, 1).transpose(0, 1),
    "swap": lambda x: x.transpose(0, 1).contiguous().view(x.shape[0], -1)[:, : x.shape[1]],
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1).sum(0),
    "split": lambda x: torch.cat(list(x.split(2, 1))[::-1], -1),
    "slice": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "whole slice": lambda x: x[:, 0 : x.shape[1]],
    "negative": lambda x: -x,
    "zeros like": lambda x: x + torch.zeros_like(x),
    "full": lambda x: x * torch.full((), 2.0),
    "ones": lambda x: x + x.new_ones(x.shape),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "assign both halves": lambda x: _assigned(x, [(0, 2), (2, 4)]),
    "assign a part": lambda x: _assigned(torch.ones_like(x), [(1, 3)]),
    "assign overlapping": lambda x: _assigned(torch.ones_like(x), [(0, 3), (1, 4)]),
    "row": lambda x: _row(x),
    "matmul": lambda x: x @ x.t() @ x,
    "linear": lambda x: torch.nn.functional.linear(x, x[:4].reshape(-1, x.shape[1])),
    "top": lambda x: torch.gather(x, 1, x.topk(4, 1).indices.to(torch.int32).to(torch.int64)),
    "counted": lambda x: x * (torch.arange(1) + torch.tensor(3)),
}


def _assigned(x, ranges):
    y = x.clone()
    for start, end in ranges:
        y[:, start:end] = x[:, start:end] * 2
    return y


def _row(x):
    y = x.clone()
    y[1] = 7
    return y


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.5, 2.0, 1e-3, 3e4, float("inf"), float("nan")])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), st.lists(VALUES, min_size=16, max_size=16))
def test_random_chain(names, values):
    def model(x):
        for name in names:
            y = STEPS[name](x)
            x = y if y.shape == (4, 4) else y.reshape(-1)[:16].reshape(4, 4)
        return x, x.sum(0)

    x = torch.tensor(values).reshape(4, 4)
    program = program_of(model, x)
    before = run(program, x)
    verifier = Verifier(program)
    normalise.run(program)
    verifier.verify(program)
    assert normalise.run(program) == 0
    assert same(run(program, x)[0], before[0])
