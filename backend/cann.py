"""The CANN version that is compiled for."""

from __future__ import annotations

import importlib


def cann_version() -> str | None:
    """The CANN version to lower for: the target's inside `using`, else the installed one; None when there is none."""
    if (chosen := current()) is not None:
        return chosen.cann
    if "torch_npu" not in sys.modules:
        return None
    found = str(importlib.import_module("torch_npu.npu.utils").get_cann_version() or "")
    return found if any(c.isdigit() for c in found) else None
