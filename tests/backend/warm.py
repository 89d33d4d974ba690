"""One process of the warm-start test: ``python -m tests.backend.warm CACHE_DIR`` prints a JSON line.

A target and its MTP draft (embedding and head shared), two phases of the target, a second instance of its class with
other weights, and several equal layers in each. ``calls`` counts calls of Python functions by the part of torch or of
this package that they belong to, from the first compilation to the last result.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

PARTS = {
    "Dynamo": r"/torch/_dynamo/(convert_frame|symbolic_convert|output_graph|bytecode_|guards|variables/|backends/)",
    "AOT": r"/torch/_functorch/|/torch/_subclasses/",
    "graphs": r"/torch/fx/(?!_lazy)",
    "capture": r"/frontend/(capture|regions|dynamo|call_trace|bindings)",
    "passes": r"/fx_passes/(manager|normalise|legalise|graph|verifier|stamp|regions)",
    "rules": r"/fusion_rules/engine/(apply|match)",
    "lowering": r"/torchair/_ge_concrete_graph/(ge_converter|graph_pass)",
}
"""Part -> files. Dynamo's ``eval_frame`` is left out: its stubs stand around every function marked `disable`."""


class Attention(nn.Module):
    """A layer: norm, projection, a cache of rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.norm
        gate, up = self.up(h).chunk(2, -1)
        rows.index_copy_(0, at, self.down(nn.functional.silu(gate) * up))
        return x + rows.index_select(0, at)


class Target(nn.Module):
    """Some equal layers between an embedding and a head."""

    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(layers))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(
        self, ids: torch.Tensor, cache: list[torch.Tensor], at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.embed(ids)
        for layer, rows in zip(self.layers, cache, strict=True):
            h = layer(h, rows, at)
        return self.head(h), h


class Draft(nn.Module):
    """One layer more, on the hidden state of the target."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embed, self.head = target.embed, target.head
        self.mix = nn.Linear(64, 32, bias=False)
        self.layer = Attention(32)

    def forward(
        self, ids: torch.Tensor, h: torch.Tensor, cache: list[torch.Tensor], at: torch.Tensor
    ) -> torch.Tensor:
        x = self.mix(torch.cat([self.embed(ids), h], -1))
        return self.head(self.layer(x, cache[0], at))


def cases() -> dict[str, tuple[nn.Module, tuple[Any, ...], str]]:
    """Name -> (model, arguments, phase)."""

    def made(kind: Any, *args: Any, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return kind(*args).to(torch.bfloat16).eval()

    def call(tokens: int, layers: int) -> tuple[Any, ...]:
        rows = [torch.zeros(8, 32, dtype=torch.bfloat16) for _ in range(layers)]
        return torch.arange(tokens) % 16, rows, torch.arange(tokens)

    target, other = made(Target), made(Target, seed=1)
    ids, rows, at = call(2, 1)
    draft = made(Draft, target)
    return {
        "decode": (target, call(2, 3), "decode"),
        "prefill": (target, call(6, 3), "prefill"),
        "other weights": (other, call(2, 3), "decode"),
        "draft": (draft, (ids, torch.ones(2, 32, dtype=torch.bfloat16), rows, at), "decode"),
    }


def count(calls: Counter[str]) -> Any:
    """A profile function that counts calls by part; a module that is imported meanwhile counts too."""
    known: dict[str, str | None] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file not in known:
            known[file] = next((name for name, part in PARTS.items() if re.search(part, file)), None)
        if known[file] is not None:
            calls[f"{known[file]}: {Path(file).name} {frame.f_code.co_name}"] += 1

    return profile


def main() -> None:
    """Compile and run every case; print statuses, seconds and calls."""
    import torch._dynamo
    import torch._functorch.aot_autograd

    import cannopy
    import cannopy.api  # cannopy loads it on first use
    from cannopy.backend.host.activate import activate

    sys.modules["cannopy.backend.cache.key"].package_digest = lambda: "pinned"  # type: ignore[attr-defined]
    activate()
    made = cases()
    expected, states = {}, {}
    with torch.no_grad():
        for name, (model, args, _) in made.items():
            twin = [[t.clone() for t in a] if isinstance(a, list) else a for a in args]
            expected[name] = torch.utils._pytree.tree_leaves(model(*twin))
            states[name] = twin
    calls: Counter[str] = Counter()
    result: dict[str, Any] = {}
    sys.setprofile(count(calls))
    compiled, got = {}, {}
    for name, (model, args, phase) in made.items():
        options = cannopy.Options(phase=phase, cache_dir=Path(sys.argv[1]))
        compiled[name] = cannopy.compile(model, "forward", args, options=options)
        got[name] = torch.utils._pytree.tree_leaves(compiled[name](*args))
    sys.setprofile(None)
    leaves = torch.utils._pytree.tree_leaves
    for name, (_, args, _) in made.items():
        pairs = [*zip(got[name] + leaves(args), expected[name] + leaves(states[name]), strict=True)]
        error = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
        report = compiled[name].report
        result[name] = {**report.cache, "error": error, "weights": report.weights, "steps": list(report.timings)}
    print(json.dumps({"cases": result, "calls": calls}))


if __name__ == "__main__":
    main()
