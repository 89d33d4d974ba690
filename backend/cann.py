"""The CANN version that is compiled for."""

from __future__ import annotations

import importlib
import sys


def cann_version() -> str | None:
    """The CANN version to lower for: that of the host's target inside `host.target.using`, else the installed one;
    None when there is none. A device path never loads the host's targets, so they are asked where they are loaded."""
    host = sys.modules.get("cannopy.backend.host.target")
    if host is not None and (chosen := host.current()) is not None:
        return str(chosen.cann)
    if "torch_npu" not in sys.modules:
        return None
    found = str(importlib.import_module("torch_npu.npu.utils").get_cann_version() or "")
    return found if any(c.isdigit() for c in found) else None
