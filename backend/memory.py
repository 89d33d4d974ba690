"""Whether what a graph writes lies apart from everything else it is given."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Sequence

from cannopy.fx_passes.program import InputSpec


def extent(spec: InputSpec) -> int:
    """Bytes from the first to behind the last element; 0 where elements of others may lie in between."""
    if 0 in spec.shape:
        return 0
    expected = 1
    for stride, n in sorted(zip(spec.stride, spec.shape, strict=True)):
        if n == 1:
            continue
        if stride != expected:
            return 0
        expected *= n
    return expected * spec.dtype.itemsize


class Separation:
    """Compares addresses at each call, in full only when an address of something written is new.

    A captured graph treats its arguments as separate memory. Tensors with gaps between their rows (keys and values
    interleaved in one buffer) are compared by their first element only.
    """

    def __init__(self, extents: Sequence[int], written: Sequence[int]) -> None:
        self._extents = list(extents)
        self._written = frozenset(written)
        self._known: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []

    def clash(self, pointers: list[int]) -> tuple[int, int] | None:
        """Positions (something written, another argument) of two that share memory; None when there are none."""
        if not self._written or pointers == self._known:
            return None
        known = self._known
        changed = list(itertools.compress(range(len(known)), map(operator.ne, pointers, known)))
        if known and not self._written.intersection(changed):
            found = next((c for i in changed if (c := self._against_written(i, pointers))), None)
        else:
            found = self._all(pointers)
        self._known = list(pointers) if found is None else []
        return found

    def _against_written(self, i: int, pointers: list[int]) -> tuple[int, int] | None:
        start = pointers[i]
        if start == 0:
            return None
        at = bisect.bisect_right(self._starts, start)
        if (at and self._ends[at - 1] > start) or (
            at < len(self._starts) and self._starts[at] < start + self._extents[i]
        ):
            return self._all(pointers)
        return None

    def _all(self, pointers: list[int]) -> tuple[int, int] | None:
        order = sorted((p, i) for i, p in enumerate(pointers) if p)
        last = last_written = (0, -1)
        spans = []
        for start, i in order:
            written = i in self._written
            end, other = last if written else last_written
            if end > start:
                return (i, other) if written else (other, i)
            span = (start + max(1, self._extents[i]), i)
            last = max(last, span)
            if written:
                last_written = max(last_written, span)
                spans.append((start, span[0]))
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        return None
