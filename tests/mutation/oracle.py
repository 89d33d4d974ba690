"""Whether a lowered graph computes what the graph before all passes computes, by the error criterion of `cannopy run`.

Three runs: the lowered graph on the CPU kernels, the graph before the passes as it is, and that graph in float64. The
discrete picks of the lowered run are replayed in the two others, and checked on the scores.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.program import Program
from cannopy.parity.measure import P90_LIMIT, SUMMATION_FLOOR, compare_picks
from cannopy.parity.picks import Choice, Pick, Recorder, Replay

aten = torch.ops.aten
Tensor = torch.Tensor
POOLED_LIMIT = P90_LIMIT
"""Largest ratio of the lowered graph's error, over a whole tensor, to that of the graph as it is."""
ROW_LIMIT = 4.0
"""The same for one row and for tensors of few elements, where the ratio of two roundings scatters."""
FEW = 64
"""A tensor or row with fewer elements is compared with `ROW_LIMIT` and at least one step of its dtype."""


@dataclass
class Results:
    """Outputs, then the mutated inputs as they are afterwards, with the choices of a replayed run."""

    tensors: list[Tensor]
    choices: list[Choice] = field(default_factory=list)


class _Exact(fx.Interpreter):
    """The graph in float64: every floating dtype that the graph names becomes float64, and so do promoted integers."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return super().run(*args, **kwargs)
        finally:
            torch.set_default_dtype(usual)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {k: _wide(v) for k, v in kwargs.items()}
        if target in (aten._grouped_mm.default,) or getattr(target, "__name__", "").startswith("grouped_mm_fallback"):
            return _grouped(*args[:3])
        return super().call_function(target, tuple(_wide(a) for a in args), kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])
    expert = (rows[:, None] >= ends[None, :].to(torch.int64)).sum(-1)
    inside = expert < weight.shape[0]
    out = x.new_zeros(x.shape[0], weight.shape[-1])
    out[inside] = torch.bmm(x[inside].unsqueeze(1), weight[expert[inside]]).squeeze(1)
    return out


def bind(program: Program, values: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
    """(what the graph takes, the mutated tensors by placeholder): clones of ``values`` and derived weights."""
    bound: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for spec in program.inputs:
        tensor = values[spec.name]
        if spec.mutated:
            tensor = state[spec.name] = tensor.clone()
        bound[spec.name] = tensor if spec.view is None else tensor.view(spec.view)
    for entry in program.weights:
        sources = [values.get(s, bound.get(s)) for s in entry.sources]
        assert all(s is not None for s in sources)
        bound[entry.name] = entry.build(sources)  # type: ignore[arg-type]
    return [bound[n.name] for n in program.gm.graph.nodes if n.op == "placeholder"], state


def lowered(program: Program, values: Mapping[str, Tensor]) -> tuple[Results, Recorder]:
    """The lowered graph's results and its picks."""
    args, state = bind(program, values)
    program.gm.recompile()
    with torch.no_grad(), Recorder() as recorder:
        out = program.gm(*args)
    return Results([*out, *state.values()]), recorder


def plain(program: Program, values: Mapping[str, Tensor], picks: Sequence[Pick] | None = None) -> Results:
    """The results of the graph as it is, with the given ``picks``."""
    args, state = bind(program, values)
    return _run(fx.Interpreter(program.gm), args, state, picks)


def exact(program: Program, values: Mapping[str, Tensor], picks: Sequence[Pick] | None = None) -> Results:
    """The same in float64."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in values.items()}
    args, state = bind(program, wide)
    return _run(_Exact(program.gm), args, state, picks)


def _run(interpreter: fx.Interpreter, args: list[Any], state: dict[str, Tensor],
         picks: Sequence[Pick] | None) -> Results:
    if picks is None:
        with torch.no_grad():
            out = interpreter.run(*args)
        return Results([*out, *state.values()])
    with torch.no_grad(), Replay(picks) as replay:
        out = interpreter.run(*args)
    replay.finish()
    return Results([*out, *state.values()], replay.choices)


class _Values(_Exact):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        out = self.seen[n.name] = super().run_node(n)
        return out


def node_values(program: Program, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """The float64 value of every node by name."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in values.items()}
    args, _ = bind(program, wide)
    interpreter = _Values(program.gm)
    with torch.no_grad():
        interpreter.run(*args)
    return interpreter.seen


Pair = tuple[Results, Results]
"""What the graph as it is gives, and the same in float64, for one set of values."""


def moved(values: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """``values`` with every number of a floating tensor one rounding up, one down or where it was."""
    generator = torch.Generator().manual_seed(seed)
    out = dict(values)
    for name, tensor in values.items():
        if tensor.is_floating_point():
            steps = torch.randint(-1, 2, tensor.shape, generator=generator) * torch.finfo(tensor.dtype).eps
            out[name] = (tensor.double() * (1 + steps)).to(tensor.dtype)
    return out


def wrong(ours: Results, as_is: Results, in_float64: Results, others: Sequence[Pair] = ()) -> list[str]:
    """What is over its limit, one sentence each; empty when the lowered graph is as good as the graph as it is.

    ``others``: results of the graph as it is for `moved` values. Where few roundings decide the error of a result (all
    entries of a row are one number times weights), that of one run says little; the largest of them counts. So it is
    with integers that are rounded numbers, and with choices by such scores: one of the results has to be met.
    """
    found = []
    for i, (a, b, c) in enumerate(zip(ours.tensors, as_is.tensors, in_float64.tensors, strict=True)):
        pairs = [(one.tensors[i], wide.tensors[i]) for one, wide in others]
        found += [f"result {i}: {text}" for text in _tensor(a, b, c, pairs)]
    unfair = _unfair(as_is, in_float64)
    return found + (unfair if all(_unfair(*pair) for pair in others) else [])


def _unfair(as_is: Results, in_float64: Results) -> list[str]:
    return [text for pick in compare_picks("graph", as_is.choices, in_float64.choices) for text in pick.failures]


def _tensor(ours: Tensor, as_is: Tensor, wide: Tensor, others: Sequence[tuple[Tensor, Tensor]]) -> list[str]:
    if ours.shape != as_is.shape or ours.dtype != as_is.dtype:
        return [f"{ours.dtype}{list(ours.shape)} instead of {as_is.dtype}{list(as_is.shape)}"]
    if not ours.dtype.is_floating_point:
        apart = ours != as_is
        for other in (t for pair in others for t in pair):
            apart &= ours != other
        return [f"{int(apart.sum())} of {ours.numel()} integers differ"] if apart.any() else []
    if ours.numel() == 0:
        return []
    a, b, c = (_rows(t) for t in (ours, as_is, wide))
    special = ~(torch.isfinite(b) & torch.isfinite(c))
    loose = torch.zeros_like(special)  # where one rounding decides between infinity, its negative and NaN
    for other in others:
        loose |= _kind(_rows(other[0])) != _kind(b)
    if not torch.equal(_kind(a)[special & ~loose], _kind(b)[special & ~loose]):
        return ["infinities or NaN in other places or of another kind"]
    special |= loose
    a, b, c = (t.masked_fill(special, 0) for t in (a, b, c))
    if not torch.isfinite(a).all():
        return ["not finite where the graph as it is is"]
    pairs = [(b, c)]
    for other in others:
        x, y = (_rows(t).masked_fill(special, 0) for t in other)
        pairs += [(x, y)] if torch.isfinite(x).all() and torch.isfinite(y).all() else []
    step = torch.finfo(ours.dtype).eps
    e, p = _error(a, c), max(_error(*pair) for pair in pairs)
    bound = POOLED_LIMIT * p + SUMMATION_FLOOR if a.numel() >= FEW else ROW_LIMIT * max(p, step)
    if not e <= bound:
        return [f"error {e:.3e}, {p:.3e} as it is"]
    if a.shape[1] < FEW:
        return []
    rows, plain_rows = _by_row(a, c), torch.stack([_by_row(*pair) for pair in pairs]).amax(0)
    written = (rows > 0) | (plain_rows > 0)  # rows of a cache that no step wrote would make the mean error smaller
    p = max(_error(x[written], y[written]) for x, y in pairs)
    over = rows > ROW_LIMIT * plain_rows.clamp_min(p) + SUMMATION_FLOOR
    return [f"{int(over.sum())} of {len(over)} rows, worst error {float(rows.max()):.3e}"] if over.any() else []


def _kind(t: Tensor) -> Tensor:
    """0 for finite numbers, 1 and -1 for infinities, 2 for NaN."""
    return torch.where(t.isnan(), 2, torch.where(t.isinf(), t.sign(), 0))


def _rows(t: Tensor) -> Tensor:
    return t.double().reshape(-1, t.shape[-1] if t.dim() else 1)


def _by_row(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float64).tiny))


def outputs(program: Program) -> Sequence[fx.Node]:
    """The nodes that the graph returns."""
    found: Sequence[fx.Node] = program.gm.graph.output_node().args[0]  # type: ignore[assignment]
    return found


GETITEM = operator.getitem
