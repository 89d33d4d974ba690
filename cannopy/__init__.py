"""Cannopy compiles plain PyTorch LLMs for Ascend NPUs through torchair.

    compiled = cannopy.compile(model, example_inputs=(ids,), example_kwargs={"cache": cache})

Importing this package does not import torch: `cannopy doctor` and `cannopy host install` have to work where torch
cannot be imported yet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cannopy.errors import CannopyError
from cannopy.fx_passes.parallel import Parallel
from cannopy.options import Options
from cannopy.report import CompileReport

if TYPE_CHECKING:
    from cannopy.api import Compiled, compile
    from cannopy.buckets import Buckets
    from cannopy.fusion_rules.extension import rule

__version__ = "0.1.0"
__all__ = ["Buckets", "CannopyError", "CompileReport", "Compiled", "Options", "Parallel", "compile", "rule"]

_NEED_TORCH = {
    "Buckets": "cannopy.buckets",
    "Compiled": "cannopy.api",
    "compile": "cannopy.api",
    "rule": "cannopy.fusion_rules.extension",
}


def __getattr__(name: str) -> Any:
    """What needs torch, on first use; `CannopyError` with the cure when torch cannot be imported."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'cannopy' has no attribute {name!r}")
    from cannopy.environment import import_torch

    import_torch()
    value = getattr(importlib.import_module(_NEED_TORCH[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
