"""The files of `cannopy dump`: graphs and diffs, provenance, written inputs, ingredients of the cache key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cannopy import api, pipeline
from cannopy.backend.artifact import Fingerprint
from cannopy.backend.cache.key import fingerprint
from cannopy.backend.torchair import have_npu
from cannopy.frontend import state
from cannopy.fx_passes import dump, writes
from cannopy.fx_passes.program import Program
from cannopy.options import Options


@dataclass(frozen=True)
class Dump:
    """What was written. ``files`` are paths in the order of their names; ``passes`` names and what each changed."""

    files: list[str]
    pipeline: str
    passes: list[dict[str, Any]]
    nodes: dict[str, int]
    fusions: dict[str, int]
    provenance: list[dict[str, Any]]
    writes: list[writes.Write]
    key: Fingerprint

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON takes, the same in every run."""
        return {
            "files": self.files,
            "pipeline": self.pipeline,
            "passes": self.passes,
            "nodes": self.nodes,
            "fusions": self.fusions,
            "provenance": self.provenance,
            "writes": [write.to_dict() for write in self.writes],
            "key": {"key": self.key.key, "ingredients": {k: dict(v) for k, v in self.key.details.items()}},
        }

    def summary(self) -> str:
        """What a person wants to know first."""
        copied = [write.input for write in self.writes if write.copies]
        written = f"{len(self.writes)} inputs written, {len(copied)} with a full copy" + (
            f": {', '.join(copied)} (writes.txt says why)" if copied else "")
        return (f"pipeline {self.pipeline}\n{self.nodes['captured']} nodes captured, {self.nodes['final']} left\n"
                f"{written}\ncache key {self.key.key[:16]}…")


def write(model: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options,
          folder: Path) -> Dump:
    """Compile up to the final graph and write the files to ``folder``; dumps that are there already are replaced.

    ``options.dump_dir`` should be ``folder``. Raises what `cannopy.compile` raises before it emits.
    """
    if not have_npu():
        from cannopy.backend.host.activate import activate

        activate()
    state.prepare_state(model, args, dict(kwargs), method=method)
    made = pipeline.plan(options)
    key = fingerprint(model, method, args, kwargs, api.build_options(made))
    program, done = api.lower(model, method, args, kwargs, options, {}, made)
    found = writes.report(program)
    rows = rows_of(program)
    for name, content in (("provenance.txt", _provenance_text(rows)), ("writes.txt", writes.text(found)),
                          ("key.txt", key_text(key))):
        (folder / name).write_text(content, encoding="utf-8")
    mine = {"provenance.txt", "writes.txt", "key.txt"}
    files = sorted(str(path) for path in folder.iterdir() if path.name in mine or dump.is_dump(path.name))
    passes = [{"name": r.name, "nodes_before": r.nodes_before, "nodes_after": r.nodes_after, "changes": r.changes}
              for r in done.records]
    return Dump(files, done.pipeline, passes, dict(done.nodes), done.log.counts(), rows, found, key)


def rows_of(program: Program) -> list[dict[str, Any]]:
    """Per operation of the graph where it comes from."""
    return [
        {
            "node": node.name,
            "op": dump.target_name(node),
            "rule": str(node.meta.get("rule") or ""),
            "layer": node.meta.get("layer"),
            "module_path": str(node.meta.get("module_path") or ""),
            "source": str(node.meta.get("source") or ""),
        }
        for node in program.gm.graph.nodes
        if node.op == "call_function"
    ]


def key_text(key: Fingerprint) -> str:
    """The ingredients of a cache key to read: a section per field, a line per item."""
    rows = [f"key {key.key}"]
    for name in sorted(key.fields):
        rows.append(f"\n[{name}] {key.fields[name]}")
        rows += [f"{item} = {_one_line(value)}" for item, value in sorted(key.details.get(name, {}).items())]
    return "\n".join(rows) + "\n"


def _provenance_text(rows: list[dict[str, Any]]) -> str:
    columns = ("node", "op", "rule", "layer", "module_path", "source")
    cells = [columns, *(tuple("" if row[c] is None else str(row[c]) for c in columns) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in cells)


def _one_line(value: str) -> str:
    return value.replace("\n", "; ")

