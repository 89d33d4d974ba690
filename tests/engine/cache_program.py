"""One process of test_processes: runs a module through cache_compile and prints what came of it as JSON.

usage: cache_program.py CACHE_DIR [refuse]    (with refuse: first check that a machine with CANN is left alone)
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import refusal_program
import torch

warnings.simplefilter("ignore")


def main(cache_dir: str, refuse: bool) -> None:
    """Compile or load, run twice, print."""
    refusal = refusal_program.refusal() if refuse else ""
    from cannopy.backend.host import engine, target
    from cannopy.backend.host.activate import activate

    activate()
    activate()
    import torchair
    from torch._dynamo.utils import counters

    class Step(torch.nn.Module):
        """linear, norm, cache write, read of the cache."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 32, bias=False)
            self.gamma = torch.nn.Parameter(torch.rand(32) + 0.5)
            self.to(torch.bfloat16)
            self.step = torchair.inference.cache_compile(
                self.eager, config=torchair.CompilerConfig(), dynamic=False, cache_dir=cache_dir, ge_cache=True
            )

        def eager(self, x: Any, cache: Any, index: Any) -> Any:
            y = torch.ops.npu.npu_rms_norm(self.linear(x), self.gamma)[0]
            torch.ops.npu.npu_scatter_nd_update_(cache, index, y)
            return y, cache.float().sum(0)

    torch.manual_seed(0)
    module = Step()
    x, index = torch.randn(2, 64).bfloat16(), torch.tensor([[3], [5]])
    cache, eager_cache = torch.zeros(8, 32).bfloat16(), torch.zeros(8, 32).bfloat16()
    with torch.inference_mode(), target.using("atlas-a3"):
        for _ in range(2):
            got = module.step(x, cache, index)
        want = module.eager(x, eager_cache, index)
    found = engine.recorded()[-1].summary()
    print(
        json.dumps(
            {
                "equal": [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
                + [torch.equal(cache, eager_cache)],
                "sum": got[1].sum().item(),
                "written": cache.float().abs().sum(1).ne(0).tolist(),
                "dynamo": counters["stats"].get("unique_graphs", 0),
                "refusal": refusal,
                "graphs": len(engine.recorded()),
                "kernels": found.kernels,
                "copies": found.cache_copies,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], "refuse" in sys.argv[2:])
