"""Where the elements of a value come from: reshape, permute, expand, slice and select as one strided view.

    value[i] = source.flatten()[offset + Σ stride[d] · i[d]]

Two spellings of one rearrangement have the same view. A value that no single view describes is its own source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, is_call, shape

MOVES = (aten.reshape.default, aten.view.default, aten.permute.default, aten.expand.default, aten.slice.Tensor,
         aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default)


@dataclass(frozen=True)
class View:
    """``size``, ``stride`` and ``offset`` count elements of ``source``, which is taken as contiguous.

    The stride of a dim of size 1 is 0.
    """

    source: fx.Node
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def whole(source: fx.Node) -> View:
        """The value itself."""
        return View._of(source, _meta(shape(source)))

    @staticmethod
    def _of(source: fx.Node, seen: torch.Tensor) -> View:
        stride = tuple(0 if n == 1 else s for n, s in zip(seen.shape, seen.stride(), strict=True))
        return View(source, tuple(seen.shape), stride, int(seen.storage_offset()))

    def _tensor(self) -> torch.Tensor:
        last = self.offset + sum(s * (n - 1) for n, s in zip(self.size, self.stride, strict=True))
        return _meta((last + 1,)).as_strided(self.size, self.stride, self.offset)

    def reshape(self, size: Sequence[int]) -> View | None:
        """The view in another shape, None when that is no view of the source."""
        try:
            return View._of(self.source, self._tensor().view(tuple(size)))
        except RuntimeError:
            return None

    def permute(self, dims: Sequence[int]) -> View:
        """The view with its dims in another order."""
        return View._of(self.source, self._tensor().permute(tuple(dims)))

    def expand(self, size: Sequence[int]) -> View:
        """The view broadcast to ``size``."""
        return View._of(self.source, self._tensor().expand(tuple(size)))

    def matches(self, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> bool:
        """Whether it has this size, these strides (where a dim has more than one entry) and this offset."""
        wanted = tuple(0 if n == 1 else s for n, s in zip(size, stride, strict=True))
        return (self.size, self.stride, self.offset) == (tuple(size), wanted, offset)


def _meta(size: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(size), dtype=torch.uint8, device="meta")


def view(node: fx.Node) -> View:
    """The view that ``node`` is of the furthest value that one view describes."""
    chain: list[fx.Node] = []
    while is_call(node, *MOVES):
        chain.append(node)
        node = cast(fx.Node, node.args[0])
    source, seen = node, _meta(shape(node))
    for move in reversed(chain):
        try:
            seen = _moved(move, seen)
        except RuntimeError:  # a reshape that has to copy
            source, seen = move, _meta(shape(move))
    return View._of(source, seen)


def _moved(node: fx.Node, x: torch.Tensor) -> torch.Tensor:
    if is_call(node, aten.reshape.default, aten.view.default):
        return x.view(shape(node))
    if is_call(node, aten.clone.default):
        return x
    return cast(torch.Tensor, node.target(x, *node.args[1:], **node.kwargs))  # type: ignore[operator]
