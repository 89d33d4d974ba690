"""Where a node comes from: the user's source line, the submodule and the layer."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .errors import SourceLine

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in .*\n(?:\s+(?P<code>\S.*))?', re.MULTILINE)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NO_SOURCE = ("<eval_with_key>", "<string>")


def innermost(frames: Iterable[traceback.FrameSummary]) -> SourceLine | None:
    """The innermost of ``frames`` (outermost first) that is not torch's own, or None."""
    found = None
    for frame in frames:
        if not frame.filename.startswith((_TORCH, *_NO_SOURCE)):
            found = SourceLine(frame.filename, frame.lineno or 0, (frame.line or "").strip())
    return found


def of_stack_text(stack_trace: str | None) -> SourceLine | None:
    """The innermost line outside of torch in the text of ``node.meta['stack_trace']``, or None."""
    found = None
    for m in _FRAME.finditer(stack_trace or ""):
        if not m["file"].startswith((_TORCH, *_NO_SOURCE)):
            found = SourceLine(m["file"], int(m["line"]), (m["code"] or "").strip())
    return found


def of_node(node: fx.Node) -> SourceLine | None:
    """The user's line that made ``node``, or None."""
    return of_stack_text(node.meta.get("stack_trace"))


def short(file: str) -> str:
    """``file`` relative to the longest entry of ``sys.path`` above it: ``transformers/models/…/modeling_x.py``."""
    roots = [p.rstrip(os.sep) + os.sep for p in sys.path if p and os.path.isabs(p)]
    longest = max((p for p in roots if file.startswith(p)), key=len, default="")
    return file[len(longest) :]


def module_path(nn_module_stack: dict[str, tuple[str, Any]] | None) -> str:
    """Dotted path of the innermost submodule of the stack (``model.layers.3.self_attn``); "" is the model itself."""
    if not nn_module_stack:
        return ""
    path = list(nn_module_stack.values())[-1][0]
    path = re.sub(r"^L\['(?!self'\])\w+'\]\[0\]", "L['self']", path)  # a decorator's wrapper takes self in *args
    # Dynamo writes "L['self'].model.layers.3" or "L['self']._modules['model']…", according to its version.
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    head, _, tail = path.partition("].")
    return tail if head.startswith("L[") else ""


def layer_index(path: str) -> int | None:
    """The first number in a dotted module path: 3 for ``model.layers.3.self_attn``."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def annotate(graph: fx.Graph) -> None:
    """Replaces each node's metadata by what the passes use.

    ``val``: fake tensor; ``source``: "file.py:line" or ""; ``source_text``: that line; ``module_path``; ``layer``: int
    or absent; ``stack_trace``: as torch wrote it, when known.
    """
    for node in graph.nodes:
        where, path = of_node(node), module_path(node.meta.get("nn_module_stack"))
        meta: dict[str, Any] = {"val": node.meta["val"]} if "val" in node.meta else {}
        if "stack_trace" in node.meta:
            meta["stack_trace"] = node.meta["stack_trace"]
        meta["source"] = f"{short(where.file)}:{where.line}" if where else ""
        meta["source_text"] = where.code if where else ""
        meta["module_path"] = path
        if (layer := layer_index(path)) is not None:
            meta["layer"] = layer
        node.meta = meta
