"""Views of weights that are not in memory yet: a recipe slices and permutes them, and what it computes with is read.

A `Piece` is a meta tensor that knows its weight. View operations give another piece; any other operation asks
``fetch`` for the elements that the view reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Box = tuple[tuple[int, int], ...]
Fetch = Callable[[str, Box], torch.Tensor]
"""``fetch(name, box)``: the elements of ``box`` of the weight called ``name``, contiguous."""


class Piece(torch.Tensor):
    """A view of the weight called ``weight``: ``view_of_whole`` shares the storage of its meta tensor ``whole``."""

    weight: str
    whole: torch.Tensor
    view_of_whole: torch.Tensor
    fetch: Fetch

    @classmethod
    def of(cls, name: str, base: torch.Tensor, fetch: Fetch, view: torch.Tensor | None = None) -> Piece:
        """``view`` of the contiguous meta tensor ``base``; all of it when None."""
        seen = base if view is None else view
        piece: Piece = torch.Tensor._make_subclass(cls, seen)
        piece.weight, piece.whole, piece.view_of_whole, piece.fetch = name, base, seen, fetch
        return piece

    def value(self) -> torch.Tensor:
        """The elements of this view."""
        with torch._C.DisableTorchFunctionSubclass():
            view, shape = self.view_of_whole, tuple(self.whole.shape)
            sizes, strides, offset = tuple(view.shape), view.stride(), int(view.storage_offset())
            box, inner, start = reached(shape, sizes, strides, offset)
            found = self.fetch(self.weight, box)
            return found.as_strided(sizes, inner, found.storage_offset() + start)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            pieces = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Piece)]
            metas, named = tree_map(lambda a: a.view_of_whole if isinstance(a, Piece) else a, (args, kwargs))
            try:
                out = func(*metas, **named)
            except (RuntimeError, NotImplementedError):  # asks for values, which meta tensors do not have
                out = metas
            if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(out)):
                return out
            first = pieces[0]
            if isinstance(out, torch.Tensor) and len(pieces) == 1 and _shares(out, first.whole):
                return cls.of(first.weight, first.whole, first.fetch, out)
            real, named = tree_map(lambda a: a.value() if isinstance(a, Piece) else a, (args, kwargs))
            return func(*real, **named)


def _shares(view: torch.Tensor, base: torch.Tensor) -> bool:
    return view.dtype is base.dtype and view.untyped_storage()._cdata == base.untyped_storage()._cdata


def reached(
    shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int], offset: int
) -> tuple[Box, tuple[int, ...], int]:
    """The box of a contiguous tensor of ``shape`` that a view of it (sizes, strides, offset in elements) reaches.

    Returns the box, and strides and offset of the same view of a contiguous tensor that has only the box. The box is
    the least one where every dimension of the view walks along one dimension of the tensor, else whole rows.
    """
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = [offset // step % size if size else 0 for step, size in zip(steps, shape, strict=True)]
    extent = [0] * len(shape)
    along: list[int] = []
    for size, stride in zip(sizes, strides, strict=True):
        d = next((d for d, step in enumerate(steps) if step and stride % step == 0 and shape[d] > 1), len(steps) - 1)
        along.append(d)
        if size > 1 and steps:
            extent[d] += (size - 1) * (stride // steps[d])
    if all(a + e < max(n, 1) for a, e, n in zip(start, extent, shape, strict=True)):
        box = tuple((a, a + e + 1) for a, e in zip(start, extent, strict=True))
        kept = [e + 1 for e in extent]
        within = [math.prod(kept[d + 1 :]) for d in range(len(kept))]
        inner = tuple(t // steps[d] * within[d] if steps else t for t, d in zip(strides, along, strict=True))
        return box, inner, 0
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    rows = offset // steps[0], last // steps[0] + 1
    return (rows, *((0, n) for n in shape[1:])), tuple(strides), offset - rows[0] * steps[0]
