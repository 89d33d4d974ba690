"""npu_prefetch on the CPU."""

from __future__ import annotations

import torch


def npu_prefetch(input: torch.Tensor, dependency: torch.Tensor | None, max_size: int, offset: int = 0) -> None:
    """Nothing: a prefetch moves bytes into the L2 cache and changes no value."""
