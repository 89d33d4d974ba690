"""Mutations of cache writes and reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import ATTENTION, Edit, NotHereError, Operator, calls, retype, user


@dataclass
class Write:
    """index_copy(cache, dim, index, value), its write-back and who reads the new cache."""

    node: fx.Node
    cache: fx.Node
    dim: int
    index: fx.Node
    value: fx.Node
    back: fx.Node

    @property
    def readers(self) -> list[fx.Node]:
        """What reads the written cache within the step."""
        return [u for u in self.node.users if u is not self.back]


def writes(p: Program) -> list[Write]:
    """Every cache write."""
    found = []
    for node in calls(p, aten.index_copy.default):
        cache, dim, index, value = node.args
        back = user(node, aten.copy_.default)
        if back is not None and is_call(back, aten.copy_.default) and back.args[0] is cache:
            found.append(Write(node, cache, dim, index, value, back))  # type: ignore[arg-type]
    return found


def _twice(e: Edit, w: Write) -> None:
    """Written twice at the same rows; the second value stays."""
    scaled = e.behind(w.node, aten.mul.Tensor, w.value, e.factor())
    second = e.behind(scaled, aten.index_copy.default, w.node, w.dim, w.index, scaled)
    for reader in [*w.readers, w.back]:
        if reader is not second:
            e.swap_input(reader, w.node, second)


def _twice_read_between(e: Edit, w: Write) -> None:
    """Readers see the first value, the second is kept."""
    second = e.before(w.back, aten.mul.Tensor, w.value, e.factor())
    e.swap_input(w.back, w.node, e.before(w.back, aten.index_copy.default, w.node, w.dim, w.index, second))


def _read_before_write(e: Edit, w: Write) -> None:
    for reader in w.readers:
        e.swap_input(reader, w.node, w.cache)


def _one_reader_before_write(e: Edit, w: Write) -> None:
    reads = w.readers
    if len(reads) < 1:
        raise NotHereError
    e.swap_input(e.rng.choice(reads), w.node, w.cache)


def _old_cache_returned(e: Edit, w: Write) -> None:
    """The cache as it was before the step is a result (a copy of it)."""
    first = next(n for n in w.node.graph.nodes if n.op == "call_function")
    e.returned(e.before(first, aten.mul.Tensor, w.cache, 2.0))


def _new_cache_returned(e: Edit, w: Write) -> None:
    e.returned(e.after(w.node, aten.mul.Tensor, 2.0, users=[]))


def _next_slot(e: Edit, w: Write) -> None:
    e.swap_input(w.node, w.index, e.before(w.node, aten.add.Tensor, w.index, 1))


def _previous_slot(e: Edit, w: Write) -> None:
    e.swap_input(w.node, w.index, e.before(w.node, aten.sub.Tensor, w.index, e.rng.choice([1, 4])))


def _reversed_slots(e: Edit, w: Write) -> None:
    if shape(w.index)[0] == 1:
        raise NotHereError
    e.swap_input(w.node, w.index, e.before(w.node, aten.flip.default, w.index, [0]))


def _fixed_slots(e: Edit, w: Write) -> None:
    e.swap_input(w.node, w.index, e.before(w.node, aten.arange.default, shape(w.index)[0]))


def _slots_argument(e: Edit, w: Write) -> None:
    """The rows are an argument of the call."""
    e.swap_input(w.node, w.index, e.argument(e.nodes[w.index.name].clone()))


def _value_scaled(e: Edit, w: Write) -> None:
    e.swap_input(w.node, w.value, e.before(w.node, aten.mul.Tensor, w.value, e.factor()))


def _value_added(e: Edit, w: Write) -> None:
    e.swap_input(w.node, w.value, e.before(w.node, aten.add.Tensor, w.value, 0.5))


def _value_first_row(e: Edit, w: Write) -> None:
    if shape(w.value)[w.dim] == 1:
        raise NotHereError
    one = e.before(w.node, aten.slice.Tensor, w.value, w.dim, 0, 1)
    e.swap_input(w.node, w.value, e.before(w.node, aten.expand.default, one, list(shape(w.value))))


def _old_scaled(e: Edit, w: Write) -> None:
    """Old rows decay."""
    e.swap_input(w.node, w.cache, e.before(w.node, aten.mul.Tensor, w.cache, e.factor()))


def _not_kept(e: Edit, w: Write) -> None:
    """The write is seen within the step and not kept."""
    e.swap_input(w.back, w.node, w.cache)
    w.back.args = (w.cache, e.before(w.back, aten.clone.default, w.cache))


def _kept_scaled(e: Edit, w: Write) -> None:
    """What is kept differs from what is read."""
    e.swap_input(w.back, w.node, e.before(w.back, aten.mul.Tensor, w.node, e.factor()))


def _read_scaled(e: Edit, w: Write) -> None:
    readers = w.readers
    scaled = e.after(w.node, aten.mul.Tensor, e.factor(), users=[])
    for reader in readers:
        e.swap_input(reader, w.node, scaled)


def _accumulated(e: Edit, w: Write) -> None:
    """index_add instead of index_copy."""
    e.become(w.node, aten.index_add.default, w.cache, w.dim, w.index, w.value)


def _caches_swapped(e: Edit, w: Write) -> None:
    """Two caches of one shape exchange their write-backs."""
    for other in writes(e.program):
        if other.cache is not w.cache and shape(other.cache) == shape(w.cache) and dtype(other.cache) == dtype(w.cache):
            nodes = list(w.node.graph.nodes)
            for back, node in ((w.back, other.node), (other.back, w.node)):
                if nodes.index(node) > nodes.index(back):
                    raise NotHereError
            e.swap_input(w.back, w.node, other.node)
            e.swap_input(other.back, other.node, w.node)
            return
    raise NotHereError


def _stored_as(kind: torch.dtype) -> Any:
    """The cache holds another dtype: casts at the write and at each read."""
    def apply(e: Edit, w: Write) -> None:
        narrow = dtype(w.cache)
        if narrow == kind:
            raise NotHereError
        readers = w.readers
        retype(e, w.cache, kind)
        e.swap_input(w.node, w.value, e.before(w.node, aten._to_copy.default, w.value, dtype=kind))
        e.editor.refresh(w.node)
        e.after(w.node, aten._to_copy.default, users=readers, dtype=narrow)

    return apply


def counters(p: Program) -> list[fx.Node]:
    """The write-backs of lengths."""
    return [n for n in calls(p, aten.copy_.default) if not n.args[0].meta["val"].is_floating_point()]  # type: ignore[union-attr]


def _counter_step(e: Edit, back: fx.Node) -> None:
    new: Any = back.args[1]
    e.swap_input(back, new, e.before(back, aten.add.Tensor, new, e.rng.choice([1, 5])))


def _counter_kept(e: Edit, back: fx.Node) -> None:
    old: Any = back.args[0]
    back.args = (old, e.before(back, aten.clone.default, old))
    e.mark(back)


def _counter_shared(e: Edit, back: fx.Node) -> None:
    """Positions come from another layer's length."""
    others = [n.args[0] for n in counters(e.program) if n is not back]
    if not others:
        raise NotHereError
    mine: Any = back.args[0]
    for reader in list(mine.users):
        if reader is not back:
            e.swap_input(reader, mine, others[0])  # type: ignore[arg-type]


CACHE = ("cache", "index_copy", "latent", "rope", "index_key", "slot")
OPERATORS = (
    Operator("cache_written_twice", ATTENTION, writes, _twice, words=CACHE),
    Operator("cache_written_again_after_read", ATTENTION, writes, _twice_read_between, words=CACHE),
    Operator("cache_read_before_write", ATTENTION, writes, _read_before_write, words=CACHE),
    Operator("cache_one_reader_before_write", ATTENTION, writes, _one_reader_before_write, words=CACHE),
    Operator("cache_old_value_returned", ATTENTION, writes, _old_cache_returned, words=CACHE),
    Operator("cache_new_value_returned", ATTENTION, writes, _new_cache_returned, legal=True),
    Operator("cache_next_slot", ATTENTION, writes, _next_slot, words=CACHE),
    Operator("cache_previous_slot", ATTENTION, writes, _previous_slot, words=CACHE),
    Operator("cache_slots_reversed", ATTENTION, writes, _reversed_slots, words=CACHE),
    Operator("cache_fixed_slots", ATTENTION, writes, _fixed_slots, words=CACHE),
    Operator("cache_slots_from_outside", ATTENTION, writes, _slots_argument, words=CACHE, same=True),
    Operator("cache_value_scaled", ATTENTION, writes, _value_scaled, words=("mul", "rms_norm", "rotary")),
    Operator("cache_value_added_to", ATTENTION, writes, _value_added, words=("add", "rms_norm", "rotary")),
    Operator("cache_value_of_first_token", ATTENTION, writes, _value_first_row, words=("expand", "rms_norm", "rotary")),
    Operator("cache_decays", ATTENTION, writes, _old_scaled, words=CACHE),
    Operator("cache_write_not_kept", ATTENTION, writes, _not_kept, words=CACHE),
    Operator("cache_kept_differs", ATTENTION, writes, _kept_scaled, words=CACHE),
    Operator("cache_read_differs", ATTENTION, writes, _read_scaled, words=("mul", *CACHE)),
    Operator("cache_accumulates", ATTENTION, writes, _accumulated, words=("index_add", *CACHE)),
    Operator("cache_stored_in_fp32", ATTENTION, writes, _stored_as(torch.float32), words=("dtype", *CACHE), same=True),
    Operator("cache_stored_in_fp16", ATTENTION, writes, _stored_as(torch.float16), words=("dtype", *CACHE), same=True),
    Operator("caches_exchanged", ATTENTION, writes, _caches_swapped, words=CACHE),
    Operator("length_counts_too_far", (), counters, _counter_step),
    Operator("length_does_not_count", (), counters, _counter_kept),
    Operator("length_of_other_cache", ATTENTION, counters, _counter_shared, words=("mask", *CACHE)),
)
