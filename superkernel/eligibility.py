"""Which kernels a SuperKernel can hold (``eligibility.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

import yaml

TARGETS = frozenset({"atlas-a2", "atlas-a3"})
"""Families on which torchair forms SuperKernels."""


@dataclass(frozen=True)
class Eligibility:
    """Whether a kernel of the cost model can be fused, and where that is published."""

    fuses: bool
    source: str


@cache
def table() -> Mapping[str, Eligibility]:
    """Kernels by name. ValueError for an entry of another form."""
    data = yaml.safe_load((files(__package__) / "eligibility.yaml").read_text(encoding="utf-8"))
    sources = data["sources"]
    found = {}
    for name, entry in data["kernels"].items():
        if set(entry) != {"fuses", "source"} or not isinstance(entry["fuses"], bool) or entry["source"] not in sources:
            raise ValueError(f"eligibility.yaml: {name}: expected fuses and a source, found {entry!r}")
        found[name] = Eligibility(entry["fuses"], sources[entry["source"]])
    return MappingProxyType(found)


def why_not(kernel: str) -> str | None:
    """Why ``kernel`` cuts a region; None when it can be fused."""
    entry = table().get(kernel)
    if entry is None:
        return f"{kernel} is not known to fuse; a kernel that does not fuse splits the region"
    return None if entry.fuses else f"{kernel} does not fuse ({entry.source})"
