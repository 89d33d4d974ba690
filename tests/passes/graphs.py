"""Small programs for the tests of passes: traced from a function or built node by node, run on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.program import InputSpec, OutputSpec, Program

Tensor = torch.Tensor


def program_of(fn: Callable[..., Any], *inputs: Tensor, mutated: Sequence[int] = ()) -> Program:
    """The ATen graph of ``fn`` with fake values. Inputs numbered in ``mutated`` get a trailing ``copy_``.

    ``fn`` returns its results, then one new value per mutated input.
    """
    return _finish(make_fx(functionalize(fn), tracing_mode="fake")(*inputs), inputs, mutated)


def built(build: Callable[..., Any], *inputs: Tensor, mutated: Sequence[int] = ()) -> Program:
    """The program of exactly the nodes that ``build(call, *placeholders)`` makes with ``call(target, *args)``."""
    graph = fx.Graph()
    mode = FakeTensorMode()
    placeholders = []
    for i, x in enumerate(inputs):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = mode.from_tensor(x)
        placeholders.append(node)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        fakes, options = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = target(*fakes, **options)
        return node

    results = build(call, *placeholders)
    graph.output(tuple(results) if isinstance(results, list | tuple) else (results,))
    return _finish(fx.GraphModule(torch.nn.Module(), graph), inputs, mutated)


def _finish(gm: fx.GraphModule, inputs: Sequence[Tensor], mutated: Sequence[int]) -> Program:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    output = next(iter(reversed(gm.graph.nodes)))
    results = output.args[0]
    results = list(results) if isinstance(results, list | tuple) else [results]
    keep = results[: len(results) - len(mutated)]
    with gm.graph.inserting_before(output):
        for index, value in zip(mutated, results[len(keep) :], strict=True):
            copy = gm.graph.call_function(aten.copy_.default, (placeholders[index], value))
            copy.meta["val"] = placeholders[index].meta["val"]
    output.args = (tuple(keep),)
    for number, node in enumerate(gm.graph.nodes):
        if node.op == "call_function":
            node.meta["source"] = f"model.py:{number}"
    specs = [
        InputSpec(n.name, "state" if i in mutated else "argument", f"args[{i}]", tuple(x.shape), x.stride(), x.dtype,
                  mutated=i in mutated)
        for i, (n, x) in enumerate(zip(placeholders, inputs, strict=True))
    ]
    gm.recompile()
    return Program(gm, specs, OutputSpec("", ()))


def bind(program: Program, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(what the graph takes, the callers' tensors): clones of ``inputs`` through their views, and derived weights."""
    clones = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in inputs]
    by_name = {
        s.name: x if s.view is None else x.view(s.view) for x, s in zip(clones, program.inputs, strict=True)
    }
    for weight in program.weights:
        by_name[weight.name] = weight.build([by_name[s] for s in weight.sources])
    return [by_name[n.name] for n in program.gm.graph.nodes if n.op == "placeholder"], clones


def run(program: Program, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, inputs afterwards) of the program on clones of ``inputs``."""
    bound, clones = bind(program, inputs)
    program.gm.recompile()
    with torch.no_grad():
        results = program.gm(*bound)
    return [results] if isinstance(results, Tensor) else list(results), clones


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
