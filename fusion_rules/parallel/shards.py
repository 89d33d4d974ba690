"""Parts of weights: slices of parameters in the weight plan, pushed below the recipes that rules have put on them.

A slice stands directly on the parameter wherever that is possible, so that a loader can read these bytes only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, shape, where
from cannopy.fx_passes.parallel import ParallelError
from cannopy.fx_passes.program import Program, WeightEntry
from cannopy.fx_passes.weight_plan import derived

Piece = tuple[int, int]
"""First index and the one behind the last."""

PART = "part"
"""Key of the metadata of a placeholder of which each rank of a group has another part."""


@dataclass(frozen=True)
class Part:
    """Part ``position`` of ``parts`` equal ones."""

    position: int
    parts: int

    def of(self, size: int, what: str, node: fx.Node | None = None) -> Piece:
        """Its indices among ``size``; `ParallelError` that names ``what`` when they cannot be divided."""
        if size % self.parts:
            place = f" ({where(node)})" if node is not None else ""
            raise ParallelError(f"{what} cannot be divided: {size} / {self.parts} is no whole number{place}")
        each = size // self.parts
        return self.position * each, (self.position + 1) * each


def take(program: Program, editor: Editor, weight: fx.Node, dim: int, pieces: Sequence[Piece]) -> fx.Node:
    """The weight that has only ``pieces`` of dimension ``dim`` of ``weight``, in that order; ``weight`` if that is all.

    ``weight`` is a placeholder of a parameter, a buffer or a derived weight. Raises `WeightSourceError` for others.
    """
    dim %= len(shape(weight))
    pieces = _joined(pieces)
    if pieces == [(0, shape(weight)[dim])]:
        return weight
    entry = next((e for e in program.weights if e.name == weight.name), None)
    found = None if entry is None else _below(program, editor, weight, entry, dim, pieces)
    if found is None:
        parts = [_slice(program, editor, weight, entry, dim, piece) for piece in pieces]
        found = parts[0] if len(parts) == 1 else _cat(program, editor, f"{weight.name}_parts", parts, dim)
    found.meta[PART] = True
    return found


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """``pieces`` with neighbours that touch made one."""
    found: list[Piece] = []
    for start, stop in pieces:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _slice(program: Program, editor: Editor, weight: fx.Node, entry: WeightEntry | None, dim: int,
           piece: Piece) -> fx.Node:
    index = ":, " * dim + f"{piece[0]}:{piece[1]}"
    if entry is None:
        return derived(program, editor, f"{weight.name}_part", [weight], f"w[0][{index}]")
    sources = [editor.input(name) for name in entry.sources]
    return derived(program, editor, f"{weight.name}_part", sources, f"({entry.recipe})[{index}]", entry.nz)


def _cat(program: Program, editor: Editor, name: str, parts: Sequence[fx.Node], dim: int, nz: bool = False) -> fx.Node:
    texts = ", ".join(f"w[{i}]" for i in range(len(parts)))
    return derived(program, editor, name, parts, f"torch.cat(({texts}), {dim})" if dim else f"torch.cat(({texts}))", nz)


def _below(program: Program, editor: Editor, weight: fx.Node, entry: WeightEntry, dim: int,
           pieces: Sequence[Piece]) -> fx.Node | None:
    """``weight`` built by its recipe from parts of its sources; None where the recipe does not allow that."""
    sources = [editor.input(name) for name in entry.sources]
    join = _join(entry.recipe, len(sources))
    if join is not None:
        return _below_join(program, editor, weight, entry, sources, join, dim, pieces)
    if len(sources) == 1:
        inner = _walked(sources[0], entry.recipe, dim)
        if inner is not None:
            return _rebuilt(program, editor, weight, entry, sources[0], (dim, *inner), pieces)
    return None


def _join(recipe: str, count: int) -> tuple[str, int] | None:
    """(``cat`` or ``stack``, dimension) of a recipe that joins all its sources in order and does nothing else."""
    tree = ast.parse(recipe, mode="eval").body
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and not tree.keywords and tree.args):
        return None
    parts, name = tree.args[0], tree.func.attr
    plain = [f"w[{i}]" for i in range(count)]
    listed = isinstance(parts, ast.Tuple | ast.List) and [ast.unparse(p) for p in parts.elts] == plain
    counted = ast.unparse(parts) == f"[w[i + 0] for i in range(0, {count}, 1)]"
    if ast.unparse(tree.func.value) != "torch" or name not in ("cat", "stack") or not (listed or counted):
        return None
    dims = [ast.literal_eval(d) for d in tree.args[1:]]
    return name, int(dims[0]) if dims else 0


def _below_join(program: Program, editor: Editor, weight: fx.Node, entry: WeightEntry, sources: Sequence[fx.Node],
                join: tuple[str, int], dim: int, pieces: Sequence[Piece]) -> fx.Node | None:
    kind, at = join
    if at < 0:
        return None
    name = f"{weight.name}_part"
    if kind == "stack" and dim == at:
        chosen = [sources[i] for start, stop in pieces for i in range(start, stop)]
        texts = ", ".join(f"w[{i}]" for i in range(len(chosen)))
        return derived(program, editor, name, chosen, f"torch.stack(({texts},), {at})", entry.nz)
    if dim != at:
        inner = dim - (kind == "stack" and dim > at)
        parts = [take(program, editor, source, inner, pieces) for source in sources]
        return derived(program, editor, name, parts, entry.recipe, entry.nz)
    parts, begin = [], 0
    for source in sources:
        end = begin + shape(source)[at]
        inside = [(max(a, begin) - begin, min(b, end) - begin) for a, b in pieces if a < end and b > begin]
        if inside:
            parts.append(take(program, editor, source, at, inside))
        begin = end
    ordered = list(pieces) == sorted(pieces)
    if not ordered:
        return None
    return parts[0] if len(parts) == 1 and not entry.nz else _cat(program, editor, name, parts, at, entry.nz)


def _view(source: fx.Node, size: Sequence[int], recipe: str) -> torch.Tensor | None:
    """What ``recipe`` makes of a source of that size, on the meta device; None where it does not fit."""
    base = torch.empty(list(size), dtype=source.meta["val"].dtype, device="meta")
    try:
        result = cast(torch.Tensor, eval(recipe, {"torch": torch, "w": (base,)}))  # noqa: S307 our own text
    except RuntimeError:  # a size in the text is another one
        return None
    return result if result is base or result._base is base else None


def _walked(source: fx.Node, recipe: str, dim: int) -> tuple[int, int] | None:
    """(dimension of ``source``, n): dimension ``dim`` of the recipe's result runs over it in full, in steps of n.

    Only recipes that make a view: its strides tell which elements of the source each index reaches. Steps of more than
    one (heads, say, of a matrix with rows of each) only in the first dimension of the source.
    """
    base, result = torch.empty(shape(source), device="meta"), _view(source, shape(source), recipe)
    if result is None:
        return None
    for inner, (size, stride) in enumerate(zip(base.shape, base.stride(), strict=True)):
        step = size // result.shape[dim]
        whole = (result.shape[dim] * step, step * stride) == (size, result.stride(dim))
        if whole and size > 1 and (step == 1 or inner == 0) and result.storage_offset() // stride % size < step:
            return inner, step
    return None


def _rebuilt(program: Program, editor: Editor, weight: fx.Node, entry: WeightEntry, source: fx.Node,
             dims: tuple[int, int, int], pieces: Sequence[Piece]) -> fx.Node | None:
    """The recipe on a part of its source, where it means the same there; a size in its text may have to change."""
    dim, inner, step = dims
    size = sum(stop - start for start, stop in pieces)
    smaller, wanted = list(shape(source)), list(shape(weight))
    smaller[inner], wanted[dim] = size * step, size
    whole, strides = _view(source, shape(source), entry.recipe), torch.empty(smaller, device="meta").stride()
    for recipe in [entry.recipe, *(_with_size(entry.recipe, shape(weight)[dim], size) if inner == 0 else ())]:
        result = _view(source, smaller, recipe)
        if result is None or whole is None or list(result.shape) != wanted:
            continue
        same = (result.stride(), result.storage_offset()) == (whole.stride(), whole.storage_offset())
        if result.stride(dim) == step * strides[inner] and (same or (inner > 0 and recipe == entry.recipe)):
            part = take(program, editor, source, inner, [(a * step, b * step) for a, b in pieces])
            return derived(program, editor, f"{weight.name}_part", [part], recipe, entry.nz)
    return None


def _with_size(recipe: str, old: int, new: int) -> list[str]:
    """``recipe`` with one of its numbers ``old`` replaced by ``new``, for each of them."""
    places = [m.span() for m in re.finditer(r"\b\d+\b", recipe) if m.group() == str(old)]
    return [f"{recipe[:a]}{new}{recipe[b:]}" for a, b in places]
