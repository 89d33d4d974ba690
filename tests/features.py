"""What the torch and torch_npu that run the tests can do, asked of themselves: older ones lack some of it.

A test that needs a thing which may be missing is skipped with a reason that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F


def takes(op: str, name: str) -> bool:
    """Whether ``torch.ops.npu.op`` has an argument ``name``."""
    return name in {argument.name for argument in getattr(torch.ops.npu, op).default._schema.arguments}


def needs_argument(op: str, *names: str) -> None:
    """Skip the running test unless ``torch.ops.npu.op`` takes the arguments ``names``."""
    missing = [name for name in names if not takes(op, name)]
    if missing:
        pytest.skip(f"{op} of the torch_npu here has no argument {', '.join(missing)}")


def needs_shape_function(op: Any, *args: Any) -> None:
    """Skip the running test unless torch tells the shape of ``op`` of the tensors and numbers ``args``."""
    on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    try:
        op(*on_meta)
    except TypeError as error:
        pytest.skip(f"the shape function of {op} in the torch here does not take its arguments: {error}")


def lowered_or_skipped(compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The result of ``compiled``; the running test is skipped where torchair says that it has no converter."""
    try:
        return compiled(*args)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        said = next((line for line in str(error).splitlines() if line.endswith("ge_converter is not implemented!")), "")
        if not said:
            raise
        pytest.skip(f"torchair here: {said.partition(': ')[2]}")


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x [rows, K], weight [E, K, N], offs int32 [E] → [rows, N] by torch's function where there is one for the CPU
    (after torch 2.8), else by the op that transformers takes in its place."""
    if hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weight, offs=offs)
    import transformers.integrations.moe  # noqa: F401  registers the op

    out: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(x, weight, offs)
    return out
