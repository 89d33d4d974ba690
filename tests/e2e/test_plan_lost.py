"""A lowered graph without its plan: the scheduler's own plan is left out, a user's is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import cannopy
from cannopy.backend.ge_graph import plan_check
from cannopy.backend.torchair import PlanLostError


class Small(nn.Module):
    """Two products that could run side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def test_only_an_automatic_plan_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan_check, "check", lambda *_: ["kernel mm is somewhere else"])
    model, x = Small().eval(), torch.randn(4, 32)
    options = cannopy.Options(use_cache=False)
    compiled = cannopy.compile(model, "forward", (x,), options=options)
    torch.testing.assert_close(compiled(x), model(x))
    (decision,) = compiled.report.schedule["decisions"]
    assert decision["applied"] is False
    assert "kernel mm is somewhere else" in decision["reason"]
    assert "schedule" not in compiled.report.pipeline
    pins = tmp_path / "pins.yaml"
    pins.write_text("target: atlas-a3\npins: {features: {prefetch: forbid}}\n")
    with pytest.raises(PlanLostError, match="kernel mm is somewhere else"):
        cannopy.compile(model, "forward", (x,), options=cannopy.Options(use_cache=False, plan=pins))
