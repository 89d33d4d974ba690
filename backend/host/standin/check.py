"""The check that runs before torch is imported."""

from __future__ import annotations

import sys

from .cann import demand_sane_variables, find_cann
from .problem import EnvironmentProblem
from .requirements import demand_requirements
from .status import demand_platform, wheel_status
from .wheel import Search, locate


def ensure_importable() -> None:
    """Raise EnvironmentProblem when `import torch, torch_npu, torchair` would fail for a known reason.

    Looks, in this order, at the platform, torch and torch_npu and their versions, the packages
    they import without declaring them, CANN, and the stand-in. Imports none of it, and takes about
    5 ms when all is well. To be called by every entry point before it imports torch.
    """
    if "torch_npu" in sys.modules:
        return
    demand_platform()
    search = Search.here()
    wheel = locate(search)
    demand_requirements(search.folders)
    standin = wheel_status(wheel)
    if not standin.usable:
        raise EnvironmentProblem(f"the CANN stand-in is {standin.state}: {standin.reason}", standin.cure)
    cann = find_cann()
    if cann is not None:
        cann.demand_loadable()
    else:
        demand_sane_variables()
