"""Small programs for the tests of passes: traced from a function, run on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.program import InputSpec, OutputSpec, Program

Tensor = torch.Tensor


def program_of(fn: Callable[..., Any], *inputs: Tensor, trace: bool = True, mutated: Sequence[int] = ()) -> Program:
    """The ATen graph of ``fn`` with fake values. Inputs numbered in ``mutated`` get a trailing ``copy_``.

    ``fn`` returns its results, then one new value per mutated input.
    """
    traced = make_fx(functionalize(fn), tracing_mode="fake")(*inputs) if trace else fn
    graph: fx.Graph = traced.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(iter(reversed(graph.nodes)))
    results = output.args[0]
    results = list(results) if isinstance(results, list | tuple) else [results]
    keep = results[: len(results) - len(mutated)]
    with graph.inserting_before(output):
        for index, value in zip(mutated, results[len(keep) :], strict=True):
            copy = graph.call_function(aten.copy_.default, (placeholders[index], value))
            copy.meta["val"] = placeholders[index].meta["val"]
    output.args = (tuple(keep),)
    for number, node in enumerate(graph.nodes):
        if node.op == "call_function":
            node.meta["source"] = f"model.py:{number}"
    specs = [
        InputSpec(n.name, "state" if i in mutated else "argument", f"args[{i}]", tuple(x.shape), x.stride(), x.dtype,
                  mutated=i in mutated)
        for i, (n, x) in enumerate(zip(placeholders, inputs, strict=True))
    ]
    traced.recompile()
    return Program(traced, specs, OutputSpec("", ()))


def run(program: Program, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, inputs afterwards) of the program on clones of ``inputs`` (bound through their views)."""
    clones = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in inputs]
    bound = [x if s.view is None else x.view(s.view) for x, s in zip(clones, program.inputs, strict=True)]
    program.gm.recompile()
    with torch.no_grad():
        results = program.gm(*bound)
    results = [results] if isinstance(results, Tensor) else list(results)
    return results, clones


def targets(program: Program) -> list[str]:
    """The names of the operations in graph order."""
    return [
        str(n.target).removesuffix(".default") for n in program.gm.graph.nodes if n.op == "call_function"
    ]


def count(program: Program, *wanted: Any) -> int:
    """How many calls of ``wanted`` the graph has."""
    return sum(is_call(n, *wanted) for n in program.gm.graph.nodes)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Equal shapes, dtypes and bits (-0.0 differs from 0.0, nan equals nan)."""
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.is_floating_point():
        both_nan = x.isnan() & y.isnan()
        return bool((both_nan | ((x == y) & (x.signbit() == y.signbit()))).all())
    return torch.equal(x, y)
