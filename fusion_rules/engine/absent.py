"""Why a rule has nothing to say about a graph at all: which of its operations are not there."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Sequence

from cannopy.fusion_rules.engine.pattern import Alt, Items, Op, Pattern, Through
from cannopy.fusion_rules.engine.rule import Rule
from cannopy.fusion_rules.engine.stop import short


def absence(variants: Sequence[Rule], seen: frozenset[str], makers: Callable[[str], str]) -> str:
    """One sentence on why no variant of a rule came near, for the operations ``seen`` when it ran.

    ``makers`` gives the rule that makes an operation of the dialect or of the device, or "".
    """
    anchors = sorted({short(t) for v in variants for t in v.anchors})
    lacking = [a for a in anchors if a not in seen]
    if len(lacking) == len(anchors):
        return f"its last operation, {' or '.join(anchors)}, is not in the graph{_hint(anchors, seen, makers)}"
    every = [_required(v.pattern) for v in variants]
    always = sorted(every[0].intersection(*every[1:]))
    missing = [p for p in always if not seen.intersection(p)]
    if missing:
        names = [name for p in missing for name in p]
        listed = ", no ".join(" or ".join(p) for p in missing)
        return f"the graph has no {listed}, which every form of it needs{_hint(names, seen, makers)}"
    return "each of its operations occurs in the graph, but nowhere two of them in a row as it has them"


def _hint(names: Sequence[str], seen: frozenset[str], makers: Callable[[str], str]) -> str:
    made = {name: makers(name) for name in names if makers(name)}
    if made:
        return "; " + ", ".join(f"rule {rule} makes {name}, see why it did not" for name, rule in made.items())
    have = {name.rpartition(".")[2].strip("_"): name for name in sorted(seen)}
    for name in names:
        close = difflib.get_close_matches(name.rpartition(".")[2].strip("_"), have, n=1, cutoff=0.65)
        if close:
            return f"; the nearest to {name} that it has is {have[close[0]]}"
    return ""


def _required(p: Pattern) -> set[tuple[str, ...]]:
    """The operations, each with its alternatives, that every form of a pattern has."""
    match p:
        case Op():
            found = set() if operator.getitem in p.targets else {tuple(sorted({short(t) for t in p.targets}))}
            return found.union(*(_required(a) for a in (*p.args, *(v for _, v in p.kwargs))))
        case Items():
            return set().union(*(_required(i) for i in p.items))
        case Through():
            return _required(p.inner)
        case Alt():
            options = [_required(o) for o in p.options]
            return options[0].intersection(*options[1:])
    return set()
