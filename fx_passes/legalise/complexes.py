"""Complex numbers that `normalise.complexes` could not take apart are refused: torchair has no kernel for them."""

from __future__ import annotations

import torch

from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.legalise.error import LegaliseError
from cannopy.fx_passes.program import Program


def run(program: Program, editor: Editor) -> int:
    """Changes nothing; raises `LegaliseError` at the first operation that gives complex numbers."""
    del program
    for node in editor.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.is_complex():
            raise LegaliseError(node, "real numbers", str(value.dtype),
                                "compute with real and imaginary parts, a rotation as x * cos + rotated(x) * sin")
    return 0
