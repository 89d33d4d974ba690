"""Mutations of the residual sum in front of an RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.norms import Norm, norms
from tests.mutation.operators import NORM, Edit, NotHereError, Operator, through


@dataclass
class Residual:
    """A sum whose norm is taken."""

    total: fx.Node
    norm: Norm


def residuals(p: Program) -> list[Residual]:
    """The sums that norms read."""
    found = []
    for n in norms(p):
        total = through(n.wide, aten._to_copy.default)
        if is_call(total, aten.add.Tensor) and all(isinstance(a, fx.Node) for a in total.args):
            found.append(Residual(total, n))
    return found


def _swapped_sum(e: Edit, r: Residual) -> None:
    e.become(r.total, aten.add.Tensor, r.total.args[1], r.total.args[0])


def _broadcast_sum(e: Edit, r: Residual) -> None:
    node: fx.Node = e.rng.choice(r.total.args)
    dims = [d for d in range(len(shape(node))) if shape(node)[d] > 1]
    dim = e.rng.choice(dims)
    e.swap_input(r.total, node, e.before(r.total, aten.slice.Tensor, node, dim, 0, 1))


def _bias_sum(e: Edit, r: Residual) -> None:
    node: fx.Node = e.rng.choice(r.total.args)
    e.swap_input(r.total, node, e.argument(e.noise(shape(node)[-1], dtype=dtype(node))))


def _difference(e: Edit, r: Residual) -> None:
    e.become(r.total, aten.sub.Tensor, *r.total.args)


def _alpha(e: Edit, r: Residual) -> None:
    e.become(r.total, aten.add.Tensor, *r.total.args, alpha=e.rng.choice([2, -1, 3]))


def _scaled_branch(e: Edit, r: Residual) -> None:
    node: fx.Node = e.rng.choice(r.total.args)
    e.swap_input(r.total, node, e.before(r.total, aten.mul.Tensor, node, e.factor()))


def _constant_branch(e: Edit, r: Residual) -> None:
    e.become(r.total, aten.add.Tensor, r.total.args[0], 0.75)


def _doubled(e: Edit, r: Residual) -> None:
    e.become(r.total, aten.add.Tensor, r.total.args[0], r.total.args[0])


def _three_terms(e: Edit, r: Residual) -> None:
    a, b = r.total.args
    third = e.before(r.total, aten.mul.Tensor, b, 0.5)
    if e.rng.random() < 0.5:
        e.become(r.total, aten.add.Tensor, e.before(r.total, aten.add.Tensor, a, b), third)
    else:
        e.become(r.total, aten.add.Tensor, a, e.before(r.total, aten.add.Tensor, b, third))


def _norm_reads_branch(e: Edit, r: Residual) -> None:
    """The norm reads one term only; the sum goes on."""
    source = through(r.norm.wide, aten._to_copy.default)
    for node in {r.norm.wide, r.norm.square, r.norm.normed}:
        if source in node.all_input_nodes:
            e.swap_input(node, source, r.total.args[1])


def _stream_reads_norm(e: Edit, r: Residual) -> None:
    """The next sum takes the normalised value (post-norm) instead of the stream."""
    inner = {r.norm.wide, r.norm.square, r.norm.normed}
    readers = [u for u in r.total.users if u not in inner]
    if not readers:
        raise NotHereError
    for reader in readers:
        if any(reader is n for n in _before_or_at(r.norm.scaled)):
            raise NotHereError
        e.swap_input(reader, r.total, r.norm.scaled)


def _before_or_at(node: fx.Node) -> list[fx.Node]:
    nodes = list(node.graph.nodes)
    return nodes[: nodes.index(node) + 1]


def _wide_sum(e: Edit, r: Residual) -> None:
    """The reference's form: the norm reads the fp32 sum, the stream is rounded."""
    if not is_call(r.norm.wide, aten._to_copy.default):
        raise NotHereError
    wide = [e.before(r.total, aten._to_copy.default, a, dtype=torch.float32) for a in r.total.args]
    total = e.before(r.total, aten.add.Tensor, *wide)
    e.bypass(r.norm.wide, total)
    e.become(r.total, aten._to_copy.default, total, dtype=dtype(wide[0].args[0]))  # type: ignore[arg-type]


OPERATORS = (
    Operator("residual_swapped", NORM, residuals, _swapped_sum, legal=True, same=True),
    Operator("residual_broadcast", NORM, residuals, _broadcast_sum, words=("broadcasts",)),
    Operator("residual_is_bias", NORM, residuals, _bias_sum, words=("broadcasts",)),
    Operator("residual_subtracted", NORM, residuals, _difference, words=("sub",)),
    Operator("residual_alpha", NORM, residuals, _alpha, words=("alpha",)),
    Operator("residual_scaled", NORM, residuals, _scaled_branch, legal=True),
    Operator("residual_constant", NORM, residuals, _constant_branch, words=("constant",)),
    Operator("residual_doubled", NORM, residuals, _doubled, words=("add",)),
    Operator("residual_three_terms", NORM, residuals, _three_terms, legal=True),
    Operator("residual_norm_of_one_term", NORM, residuals, _norm_reads_branch, words=("add",)),
    Operator("residual_stream_is_normed", NORM, residuals, _stream_reads_norm, legal=True),
    Operator("residual_sum_fp32", NORM, residuals, _wide_sum, words=("fp32", "float32", "dtype"), same=True),
)
