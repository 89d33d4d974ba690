"""What rules did to the layers that were copied: the same as to the template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from cannopy.fusion_rules.engine.record import Hit, Log, Miss
from cannopy.fx_passes.collection import no_collection
from cannopy.fx_passes.regions import Regions, layer_of, prefix_of, renamed

Entry = TypeVar("Entry", Hit, Miss)


def expand(log: Log, regions: Regions) -> None:
    """Add to ``log`` the entries of copied layers, each behind that of the template.

    A node of a copy is called as in the template, with its layer behind it: ``mul_12@17``. Of the attempts only those
    stay that `Log.places` gives: what stands for a place of the template stands for that place of each copy.
    """
    if not regions.found:
        return
    log.attempts = log.places()
    with no_collection():
        for region in regions.found:
            prefixes = [copy.prefixes for copy in region.copies]
            log.hits = [one for hit in log.hits for one in (hit, *_copies(hit, region.template, prefixes))]
            log.attempts = [one for miss in log.attempts for one in (miss, *_copies(miss, region.template, prefixes))]


def _copies(entry: Entry, template: tuple[str, ...], copies: list[Mapping[str, str]]) -> list[Entry]:
    if prefix_of(entry.module_path, template) is None:
        return []
    return [_moved(entry, prefixes) for prefixes in copies]


def _moved(entry: Entry, prefixes: Mapping[str, str]) -> Entry:
    path = renamed(entry.module_path, prefixes)
    layer = layer_of(path)

    def at(name: str) -> str:
        return f"{name}@{layer}"

    names: dict[str, Any] = {"anchor": at(entry.anchor)} if isinstance(entry, Miss) else {
        "made": tuple(map(at, entry.made))}  # fmt: skip
    return replace(entry, node=at(entry.node), layer=layer, module_path=path, nodes=tuple(map(at, entry.nodes)),
                   **names)
