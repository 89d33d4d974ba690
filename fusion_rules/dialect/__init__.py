"""The dialect: functional ``cannopy::`` operators with a plain ATen reference, one per module."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

MODULES = ("attention", "rms_norm", "rotary")


def register_all() -> None:
    """Define every operator of the dialect. Safe to call again."""
    for name in MODULES:
        module = importlib.import_module(f"{__name__}.{name}")
        if hasattr(module, "register"):
            module.register()


def references() -> dict[str, Callable[..., Any]]:
    """The plain ATen form of every operator, by its name."""
    return {name: importlib.import_module(f"{__name__}.{name}").reference for name in MODULES}
