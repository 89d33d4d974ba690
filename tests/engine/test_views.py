"""Views behind an npu op whose operand was permuted: torchair must not take the op's result for permuted memory."""

from __future__ import annotations

import torch

from cannopy.backend import torchair


def test_a_permuted_result_is_lowered_as_it_is(activated: None) -> None:
    from torchair import get_npu_backend

    from cannopy.backend.host import target

    x, angles = torch.randn(48, 768).bfloat16(), torch.randn(1, 1, 24, 64)

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 24, 4, 192).permute(0, 2, 1, 3)[..., 128:]
        tables = (t.expand(2, 1, 24, 64) for t in (cos, sin))
        out: torch.Tensor = torch.ops.npu.npu_interleave_rope(heads, *tables).permute(0, 2, 1, 3).reshape(48, 4, 64)
        return out

    inputs = (x, angles.cos().bfloat16(), angles.sin().bfloat16())
    backend = get_npu_backend(compiler_config=torchair.compiler_config({}))
    lowered = torch.compile(turned, backend=backend, fullgraph=True, dynamic=False)
    with target.using("atlas-a3"), torch.no_grad():
        assert torch.equal(lowered(*inputs), turned(*inputs))
