"""The CPU kernels are registered once for this folder."""

from __future__ import annotations

import pytest
import torch

from cannopy.backend.host.kernels import register


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    register()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20260821)
