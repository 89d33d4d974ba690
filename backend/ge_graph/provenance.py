"""Which statement of a generated method each op of its lowered graph comes from."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import Any

from torch import fx


@contextlib.contextmanager
def recording(filename: str) -> Iterator[dict[str, int]]:
    """While this lasts, torchair's conversion notes ``{GE op: line of filename}`` in the dictionary that it gives.

    torchair interprets the traced graph node by node and each node adds its ops at the end of the GE graph; tracing has
    kept the line of the call that a node comes from. Ops of nodes without a line (inputs, the output) are left out.
    """
    converter: Any = importlib.import_module("torchair.npu_fx_compiler")._NpuGraphConverter
    original = converter.run_node
    line_of = re.compile(rf'File "{re.escape(filename)}", line (\d+)')
    found: dict[str, int] = {}

    def run_node(self: Any, node: fx.Node) -> Any:
        ops = self._graph.graph.op
        first = len(ops)
        result = original(self, node)
        lines = line_of.findall(node.stack_trace or "")
        if lines:
            found.update({op.name: int(lines[-1]) for op in ops[first:]})
        return result

    converter.run_node = run_node
    try:
        yield found
    finally:
        converter.run_node = original


def statements(source: str, graph: fx.Graph) -> dict[int, str]:
    """{line of ``source``: node}: `emit.emit` writes one statement for each node of ``graph`` that is no input."""
    tree = ast.parse(source)
    method = next(n for c in tree.body if isinstance(c, ast.ClassDef)
                  for n in reversed(c.body) if isinstance(n, ast.FunctionDef))
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr")]
    return {line.lineno: node.name for line, node in zip(method.body, nodes, strict=True)}
