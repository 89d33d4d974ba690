"""Proves from two recorded calls that layers which were left out do what the layers that were kept do.

One record is of the whole model, one of the model without those layers. The proof compares operations, constants and
the origin of every tensor; it gives, for each layer, which of the caller's tensors stands where the template's stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .call_trace import CallTrace, IrregularError, Ref, Segment
from .layer_runs import LEADING, Run, name


@dataclass
class Proof:
    """``units[u]``: tensor (by id) of unit 2 -> its counterpart in unit u, for u ≥ 1. One mapping per run.

    ``renamed``: tensor that the small model reads -> the one that the whole model reads in its place.
    """

    units: list[dict[int, dict[int, int]]] = field(default_factory=list)
    renamed: dict[int, int] = field(default_factory=dict)


def prove(whole: CallTrace, small: CallTrace, runs: Sequence[Run], names: Mapping[str, str]) -> Proof:
    """The correspondence of tensors. ``names``: layer of the small model -> that layer in the whole model.

    Raises:
        IrregularError: names the layer and what differs.
    """
    at = _positions(whole)
    proof = Proof()
    for run in runs:
        proof.units.append(_alike(whole, run, at))
    _owned(whole, runs, proof)
    _same_rest(whole, small, runs, names, at, proof)
    return proof


def _positions(trace: CallTrace) -> dict[str, int]:
    at: dict[str, int] = {}
    for index, segment in enumerate(trace.segments):
        if segment.layer is not None:
            if segment.layer in at:
                raise IrregularError(f"{segment.layer} is called more than once")
            at[segment.layer] = index
    return at


def _indices(run: Run, at: Mapping[str, int]) -> list[int]:
    """Places of the run's layers in the record of the whole call, which must be one after the other."""
    layers = [name(run.path, i) for i in range(run.start, run.start + run.period * run.units)]
    for layer in layers:
        if layer not in at:
            raise IrregularError(f"{layer} is not called, or only a part of it")
    found = [at[layer] for layer in layers]
    for before, here, layer in zip(found, found[1:], layers[1:], strict=False):
        if here != before + 2:
            raise IrregularError(f"{layer} is not called right after the layer before it")
    return found


def _alike(trace: CallTrace, run: Run, at: Mapping[str, int]) -> dict[int, dict[int, int]]:
    """Checks units 1 … against each other; the tensors of each in terms of those of unit 2."""
    places = _indices(run, at)
    for before in places[:-1]:
        if trace.segments[before + 1].ops:
            raise IrregularError(f"operations between the layers, behind {trace.segments[before].layer}")
    step = 2 * run.period
    inside = range(places[run.period], places[-1] + 1)
    previous: dict[int, int] = {}
    found: dict[int, dict[int, int]] = {}
    for unit in range(2, run.units):
        pairs: dict[int, int] = {}
        for q in range(run.period):
            index = places[unit * run.period + q]
            _pair(trace.segments[index - step], trace.segments[index], step, inside, pairs)
        pairs = {here: there for here, there in pairs.items() if here != there}
        if unit == 2:
            found[1] = {there: here for here, there in pairs.items()}
            previous = {there: there for there in pairs.values()}
        elif pairs.keys() != set(previous.values()):
            layer = name(run.path, run.unit(unit).start)
            raise IrregularError(f"{layer} and the layer before it do not read corresponding tensors")
        else:
            previous = {key: pairs[value] for key, value in previous.items()}
        found[unit] = previous
    return found


def _pair(a: Segment, b: Segment, step: int, inside: range, pairs: dict[int, int]) -> None:
    """Checks that ``b`` does what ``a`` does, one unit later; adds tensors that correspond to ``pairs``."""
    if a.ops != b.ops:
        raise IrregularError(_difference(a, b))
    if a.kinds != b.kinds:
        here, there = next((x, y) for x, y in zip(b.kinds, a.kinds, strict=True) if x != y)
        raise IrregularError(f"{b.layer} reads {_kind(here)} where {a.layer} reads {_kind(there)}")
    for here, there in zip(a.reads, b.reads, strict=True):
        later = here[0] == there[0] == "value" and (here[1] + step, *here[2:]) == there[1:]
        shared = here[0] != "input" and here == there and not (here[0] == "value" and here[1] in inside)
        own = here[0] == there[0] == "input" and pairs.setdefault(here[1], there[1]) == there[1]
        if not (later or shared or own):
            raise IrregularError(f"{b.layer} does not read the tensors that correspond to those of {a.layer}")
    if len(set(pairs.values())) != len(pairs):
        raise IrregularError(f"{b.layer} reads one tensor where {a.layer} reads two")


def _difference(a: Segment, b: Segment) -> str:
    for x, y in zip(a.ops, b.ops, strict=False):
        if x != y:
            if x[0] is y[0]:
                return f"{b.layer} calls {y[0]} with other constants or operands than {a.layer}"
            return f"{b.layer} calls {y[0]} where {a.layer} calls {x[0]}"
    return f"{b.layer} does {len(b.ops)} operations, {a.layer} {len(a.ops)}"


def _kind(kind: tuple[object, ...]) -> str:
    shape, stride, dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {stride} on {device}"  # type: ignore[call-overload]


def _owned(trace: CallTrace, runs: Sequence[Run], proof: Proof) -> None:
    """A tensor of one unit must not be read anywhere else."""
    owner: dict[int, tuple[str, int]] = {}
    for run, units in zip(runs, proof.units, strict=True):
        for unit, tensors in units.items():
            for tensor in tensors.values():
                if owner.setdefault(tensor, (run.path, unit)) != (run.path, unit):
                    raise IrregularError(f"layers of {run.path} share a tensor that others have each of their own")
    unit_of = {
        name(run.path, layer): (run.path, unit)
        for run in runs for unit in range(run.units) for layer in run.unit(unit)
    }  # fmt: skip
    for segment in trace.segments:
        here = unit_of.get(segment.layer) if segment.layer is not None else None
        for ref in segment.reads:
            if ref[0] == "input" and ref[1] in owner and owner[ref[1]] != here:
                where = segment.layer or "the model outside of its layers"
                raise IrregularError(f"{where} reads a tensor that belongs to unit {owner[ref[1]][1]} of "
                                     f"{owner[ref[1]][0]}")


def _same_rest(
    whole: CallTrace, small: CallTrace, runs: Sequence[Run], names: Mapping[str, str], at: Mapping[str, int],
    proof: Proof,
) -> None:
    """Checks that what both calls do is the same, values and tensors of the template counting as the last copy's."""
    index_of: dict[int, int] = {}
    last = 0
    for index, segment in enumerate(small.segments):
        if segment.layer is not None:
            last = at[names[segment.layer]]
            index_of[index] = last
        else:
            index_of[index] = last + (index > 0)
    if len(whole.segments) - 1 != index_of[len(small.segments) - 1]:
        raise IrregularError("the model calls other layers when some are left out")
    shifts = [(at[name(r.path, r.unit(1).start)], at[name(r.path, r.unit(LEADING - 1).stop - 1)],
               2 * r.period * (r.units - LEADING - 1)) for r in runs]  # fmt: skip

    def translated(ref: Ref, consumer: int) -> Ref:
        if ref[0] != "value":
            return ref
        found = index_of[ref[1]]
        for first, stop, distance in shifts:
            if first <= found <= stop < consumer:
                return ("value", found + distance, *ref[2:])
        return ("value", found, *ref[2:])

    for index, segment in enumerate(small.segments):
        there = whole.segments[index_of[index]]
        where = there.layer or "the model outside of its layers"
        if segment.ops != there.ops or segment.kinds != there.kinds:
            raise IrregularError(f"{where} does other operations when layers are left out")
        for ref, real in zip(segment.reads, there.reads, strict=True):
            if ref[0] == real[0] == "input":
                if proof.renamed.setdefault(ref[1], real[1]) == real[1]:
                    continue
            elif translated(ref, index_of[index]) == real:
                continue
            raise IrregularError(f"{where} reads other values when layers are left out")
    if len(set(proof.renamed.values())) != len(proof.renamed):
        raise IrregularError("two tensors of the small model are one in the whole model")
    end = len(whole.segments)
    leaves = [translated(ref, end) for ref in small.result[1]]
    if small.result[0] != whole.result[0] or leaves != whole.result[1]:
        raise IrregularError("the result holds values of layers in the middle")
