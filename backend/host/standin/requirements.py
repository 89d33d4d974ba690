"""Packages that torch_npu and torchair import but the torch_npu wheel does not declare.

Found by recording every import made by `import torch_npu, torchair, torchair.inference` of
torch_npu 2.13.0 and comparing with the wheel's Requires-Dist (torch, numpy, pyyaml). numpy, pyyaml,
sympy and typing_extensions come with torch_npu or torch. decorator, attrs, psutil and scipy, often
named with it, are imported by CANN's operator compiler (Python package `te`), not by the wheel:
they matter only where CANN is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .problem import EnvironmentProblem, pip_install


@dataclass(frozen=True)
class Requirement:
    """A distribution, the module by which its presence is seen (as a path), and what imports it."""

    distribution: str
    module: str
    used_by: str
    with_cann_only: bool = False

    def present(self, folders: Sequence[str]) -> bool:
        """Whether one of the folders of a search path has the module; nothing is imported."""
        modules = (f"{self.module}/__init__.py", f"{self.module}.py")
        return any(Path(folder or ".", module).is_file() for folder in folders for module in modules)


REQUIREMENTS = (
    Requirement("protobuf", "google/protobuf", "torchair's GE graph"),
    Requirement("packaging", "packaging", "torchair"),
    Requirement("numpy", "numpy", "torch_npu"),
    Requirement("pyyaml", "yaml", "torch_npu"),
    Requirement("decorator", "decorator", "CANN's operator compiler", with_cann_only=True),
    Requirement("attrs", "attr", "CANN's operator compiler", with_cann_only=True),
    Requirement("psutil", "psutil", "CANN's operator compiler", with_cann_only=True),
    Requirement("scipy", "scipy", "CANN's operator compiler", with_cann_only=True),
)


def demand_requirements(folders: Sequence[str], python: str | None = None, *, cann: bool = False) -> None:
    """Raise EnvironmentProblem that names all missing packages and one command for them."""
    missing = [r for r in REQUIREMENTS if (cann or not r.with_cann_only) and not r.present(folders)]
    if missing:
        needs = ", ".join(f"{r.distribution} ({r.used_by})" for r in missing)
        raise EnvironmentProblem(
            f"torch_npu imports packages that are not installed: {needs}",
            pip_install(" ".join(r.distribution for r in missing), python),
        )
