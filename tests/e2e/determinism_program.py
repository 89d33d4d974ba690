"""Prints the graph, the weights, the output and the report of two models, compiled in the order of the arguments."""

from __future__ import annotations

import json
import sys
from typing import Any

from cannopy.environment import import_torch

import_torch()

import torch  # noqa: E402

from cannopy import api  # noqa: E402
from cannopy.backend.host.activate import activate  # noqa: E402
from cannopy.fx_passes import dump  # noqa: E402
from cannopy.options import Options  # noqa: E402
from tests.rules.support import build, inputs  # noqa: E402

TIMES = ("seconds", "timings", "versions")


class Mlp(torch.nn.Module):
    """Two RMSNorms around a gated MLP, and a counter that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.RMSNorm(64), torch.nn.RMSNorm(64)
        self.gate, self.up = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128)
        self.down = torch.nn.Linear(128, 64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = self.first(x)
        return self.second(x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y)))


def call(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    if name == "mlp":
        return Mlp().to(torch.bfloat16).eval(), (torch.zeros(4, 64, dtype=torch.bfloat16),), {}
    model = build(first_k_dense_replace=0)
    return model, *inputs(model, 1, past=3)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list | tuple) else value


def text(name: str) -> str:
    """Everything that a compilation decides."""
    model, args, kwargs = call(name)
    options = Options()
    with torch.no_grad():
        program, done = api.lower(model, "forward", args, kwargs, options, {})
    report = api._report(program, done, options.target, False, {})
    plan = "\n".join(map(repr, [*program.inputs, *program.weights, program.output]))
    return f"{dump.text(program)}\n{plan}\n{program.gm.code}\n{json.dumps(without_times(report), indent=1)}"


if __name__ == "__main__":
    activate()
    print(json.dumps([[name, text(name)] for name in sys.argv[1:]]))
