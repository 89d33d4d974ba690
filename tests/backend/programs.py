"""A small model with everything a binding can be, its program written by hand, and helpers to compile it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from cannopy.backend.build import Lookup, build, lookup
from cannopy.backend.options import BuildOptions
from cannopy.backend.runtime import CompiledModel, OutputBuilder
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import InputKind, InputSpec, OutputSpec, Program, WeightEntry

aten = torch.ops.aten


@dataclass
class Cache:
    """A cache behind a plain attribute."""

    keys: torch.Tensor


class Tiny(torch.nn.Module):
    """``y = 2 x Wᵀ ⊙ scale``; the cache row block and a counter are updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(16, 8, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.factor = 2.0

    def forward(self, x: torch.Tensor, cache: Cache, flag: bool = False, mask: Any = None) -> dict[str, Any]:
        y = torch.nn.functional.linear(x, self.proj.weight * self.factor) * self.scale
        cache.keys.copy_((cache.keys.view(4, 8) + y).view_as(cache.keys))
        self.count.add_(1)
        return {"y": y, "cache": cache}


def tiny(seed: int = 0) -> Tiny:
    """A seeded model in eval mode."""
    torch.manual_seed(seed)
    return Tiny().eval()


def example() -> tuple[torch.Tensor, Cache]:
    """Arguments for `Tiny`."""
    torch.manual_seed(1)
    return torch.randn(4, 16), Cache(torch.randn(1, 4, 8))


def spec(
    name: str,
    kind: InputKind,
    source: str,
    value: torch.Tensor,
    view: tuple[int, ...] | None = None,
    mutated: bool = False,
) -> InputSpec:
    """The spec of a tensor as it is."""
    return InputSpec(name, kind, source, tuple(value.shape), tuple(value.stride()), value.dtype, view, mutated)


def tiny_program(model: Tiny, x: torch.Tensor, cache: Cache) -> Program:
    """The graph of ``model(x, cache)`` with the weight doubled and transposed at load time."""
    graph = fx.Graph()
    w, scale, count, keys, x_in = (graph.placeholder(n) for n in ("w", "scale", "count", "keys", "x"))
    mm = graph.call_function(aten.mm.default, (x_in, w))
    mm.meta.update(module_path="proj", source="tiny.py:30", rule="linear")
    y = graph.call_function(aten.mul.Tensor, (mm, scale))
    y.meta.update(source="tiny.py:30")
    new_keys = graph.call_function(aten.add.Tensor, (keys, y))
    new_count = graph.call_function(aten.add.Tensor, (count, 1))
    graph.call_function(aten.copy_.default, (keys, new_keys))
    graph.call_function(aten.copy_.default, (count, new_count))
    graph.output((y,))
    weight = model.proj.weight
    return Program(
        gm=fx.GraphModule(torch.nn.Module(), graph),
        inputs=[
            spec("weight", "parameter", "self.proj.weight", weight),
            spec("scale", "buffer", "self.scale", model.scale),
            spec("count", "buffer", "self.count", model.count, mutated=True),
            spec("keys", "state", "args[1].keys", cache.keys, view=(4, 8), mutated=True),
            spec("x", "argument", "args[0]", x),
        ],
        output=OutputSpec(
            pytree.treespec_dumps(pytree.tree_structure({"cache": 0, "y": 0})),
            (("source", "args[1]"), ("tensor", 0)),
        ),
        weights=[WeightEntry("w", ("weight",), f"(w[0] * {model.factor}).t()")],
    )


def make_output(output: OutputSpec) -> OutputBuilder:
    """Containers around tensors, written apart from the frontend's."""
    tree = pytree.treespec_loads(output.treespec)

    def build_result(
        tensors: Sequence[torch.Tensor], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves = []
        for kind, value in output.leaves:
            if kind == "tensor":
                leaves.append(tensors[value])
            elif kind == "source":
                leaves.append(compile_path(value)(module, args, kwargs))
            else:
                leaves.append(value)
        return pytree.tree_unflatten(leaves, tree)

    return build_result


def eager(cache_dir: Path | None = None, **changes: Any) -> BuildOptions:
    """Options that run the generated method op by op."""
    return BuildOptions(engine="eager", cache_dir=cache_dir, use_cache=cache_dir is not None, **changes)


def look(model: torch.nn.Module, args: tuple[Any, ...], options: BuildOptions, **kwargs: Any) -> Lookup:
    """`lookup` of ``forward``."""
    return lookup(model, "forward", args, kwargs, options, make_output)


def compile_tiny(
    model: Tiny, options: BuildOptions, program: Program | None = None, report: Mapping[str, Any] | None = None
) -> tuple[CompiledModel, torch.Tensor, Cache]:
    """Look up, build on a miss; the compiled model and its example arguments."""
    x, cache = example()
    found = look(model, (x, cache), options)
    if found.compiled is not None:
        return found.compiled, x, cache
    with found:
        program = program or tiny_program(model, x, cache)
        return build(program, model, "forward", (x, cache), {}, options, found, report or {}, make_output), x, cache


def check_same_as_eager(
    compiled: CompiledModel, model: Tiny, x: torch.Tensor, cache: Cache, atol: float = 1e-6
) -> None:
    """One compiled and one eager call from the same state give the same result and the same new state."""
    twin = Cache(cache.keys.clone())
    count = int(model.count)
    got = compiled(x, cache)
    assert int(model.count) == count + 1
    with torch.no_grad():
        expected = model(x, twin)
    model.count.fill_(count + 1)
    torch.testing.assert_close(got["y"], expected["y"], rtol=1e-6, atol=atol)
    torch.testing.assert_close(cache.keys, twin.keys, rtol=1e-6, atol=atol)
    assert got["cache"] is cache
