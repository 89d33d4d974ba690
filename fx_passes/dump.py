"""A graph as text to read: one line per node with shapes and provenance."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes import provenance
from cannopy.fx_passes.program import InputSpec, Program, WeightEntry

_DUMP = re.compile(r"\d{3}-[A-Za-z0-9_.-]+\.(txt|diff)")
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64", "bool": "b8"}


def kind(value: Any) -> str:
    """``bf16[1, 4]`` for a tensor, the same in brackets for several, the type's name for anything else."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        short = _DTYPES.get(name, re.sub(r"^(u?)int(\d+)$", r"\1i\2", name).replace("ui", "u"))
        return f"{short}{[int(d) for d in value.shape]}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(kind, value))})"
    return type(value).__name__


def line(node: fx.Node) -> str:
    """``%name: bf16[1, 4] = aten.add.Tensor(%a, 1)  # file.py:12 model.layers.3``."""
    arguments = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    call = f"%{node.name}: {kind(node.meta.get('val'))} = {target_name(node)}({', '.join(arguments)})"
    came = provenance.describe(node)
    return f"{call}  # {came}" if came else call


def target_name(node: fx.Node) -> str:
    """``aten.add.Tensor``; the plain name of a Python function."""
    if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def is_dump(name: str) -> bool:
    """Whether a file of this name is one that a `Folder` writes."""
    return _DUMP.fullmatch(name) is not None


def text(program: Program) -> str:
    """The whole program: inputs with their bindings, derived weights, nodes, result."""
    entries: list[InputSpec | WeightEntry] = [*program.inputs, *program.weights]
    bound = {entry.name: entry for entry in entries}
    rows = []
    for node in program.gm.graph.nodes:
        if node.op == "placeholder":
            rows.append(f"%{node.name}: {kind(node.meta.get('val'))} <- {_binding(bound.get(node.name))}")
        elif node.op == "output":
            rows.append(f"return {_text(node.args[0])}")
        else:
            rows.append(line(node))
    return "\n".join(rows) + "\n"


def diff(before: str, after: str, name_before: str, name_after: str, context: int = 3) -> str:
    """The unified diff of two texts with ``context`` lines around each change; "" when they are equal."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name_before, name_after, lineterm="",
                                 n=context)
    return "".join(f"{one}\n" for one in lines)


class Folder:
    """A folder of numbered dumps: ``007-name.txt`` after a pass, and ``007-name.diff`` against the dump before it.

    Dumps that are in the folder already are removed: they are of another compilation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = ("", "")
        path.mkdir(parents=True, exist_ok=True)
        for old in path.iterdir():
            if is_dump(old.name):
                old.unlink()

    def write(self, program: Program, number: int, name: str) -> None:
        """Write the program as it is after pass ``number`` and what that pass changed."""
        stem = f"{number:03d}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}"
        now = text(program)
        (self.path / f"{stem}.txt").write_text(now, encoding="utf-8")
        last, before = self._last
        if last:
            (self.path / f"{stem}.diff").write_text(diff(before, now, last, f"{stem}.txt"), encoding="utf-8")
        self._last = f"{stem}.txt", now


def _binding(entry: InputSpec | WeightEntry | None) -> str:
    if isinstance(entry, WeightEntry):
        return f"weight {entry.recipe} of {', '.join(entry.sources)}{' (NZ)' if entry.nz else ''}"
    if entry is None:
        return "nothing"
    seen = f" as {list(entry.view)}" if entry.view is not None else ""
    return f"{entry.kind} {entry.source} {list(entry.shape)}{seen}{', mutated' if entry.mutated else ''}"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value).removeprefix("torch.")
