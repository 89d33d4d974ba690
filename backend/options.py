"""What a build needs to know besides the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from cannopy.fx_passes.parallel import Layout

COMPILER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "mode": "max-autotune",
        "experimental_config.frozen_parameter": True,
        "experimental_config.tiling_schedule_optimize": True,
        "experimental_config.topology_sorting_strategy": "StableRDFS",
        # torchair's own fusions: they drop dst_type and smooth scales, and the table is shared between modes
        "experimental_config.pattern_fusion_pass": False,
    }
)
"""Settings of torchair's CompilerConfig by dotted name."""


@dataclass(frozen=True)
class BuildOptions:
    """How a program is compiled.

    ``engine``: ``torchair`` (the device, or the host engine where there is none) or ``eager`` (the generated method
    as it is, op by op). ``target`` is the chip that a host lowers for; a device is its own target.
    ``text`` is the textual form of everything upstream that decides the graph (options, pipeline, plan).
    ``cache_dir`` None is the default folder; ``use_cache`` False neither reads nor writes it. ``cache_timeout`` is how
    long, in seconds, to wait for another process or rank that builds the same; ``ranks`` are those that compile it
    together, None for all. ``layout`` is the place of this die among the dies that the graph is spread over.
    ``keep_weights``: results of the weight plan are kept beside the entry.
    """

    engine: Literal["torchair", "eager"] = "torchair"
    target: str = "atlas-a3"
    text: str = ""
    cache_dir: Path | None = None
    use_cache: bool = True
    cache_timeout: float = 1800.0
    ranks: tuple[int, ...] | None = None
    layout: Layout | None = None
    keep_weights: bool = False
    compiler: Mapping[str, Any] = field(default_factory=lambda: COMPILER_OPTIONS)

    def key_items(self) -> dict[str, str]:
        """What of this enters the cache key; the lines of `text` count one by one, so that a miss can name one."""
        lines = [line.partition("=") for line in self.text.splitlines()]
        items = {f"{name} (line {i})" if not eq else name: value for i, (name, eq, value) in enumerate(lines)}
        return {
            "engine": self.engine,
            **{k: str(v) for k, v in sorted(self.compiler.items())},
            "text": self.text,
            **items,
        }
