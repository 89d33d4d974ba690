"""Targets and the host engine for tests that lower graphs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def npu():
    """torch_npu imported and torchair lowering to the host engine."""
    import torch_npu  # noqa: F401 defines torch.ops.npu

    from cannopy.backend.host.activate import activate

    activate()
