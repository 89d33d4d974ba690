"""Run a program through torchair's lowering and the host engine."""

from __future__ import annotations

from typing import Any

import torch

from cannopy.backend.host import engine, target
from cannopy.fx_passes.program import Program
from tests.passes.graphs import bind


def lower(program: Program, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """(outputs, inputs afterwards, summary of the GE graph)."""
    import torchair

    config = torchair.CompilerConfig()
    config.experimental_config.keep_inference_input_mutations = True
    bound, clones = bind(program, inputs)
    program.gm.recompile()
    with target.using("atlas-a3"), torch.no_grad():
        compiled = torchair.get_npu_backend(compiler_config=config)(program.gm, bound)
        outputs = compiled(*bound)
    return list(outputs), clones, engine.recorded()[-1].summary()
