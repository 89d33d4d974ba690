"""Three ways to compute attention over a prompt with MLA and an indexer, per layer, in MACs and elements read.

Every query token counts ``context`` keys in the full plan and ``selected`` keys in the sparse ones; the causal half
is left out on both sides of a ratio.

    naive full       keys and values of each head expanded from the latent, read once for all queries
    naive sparse     the same keys and values, gathered anew for every query token
    absorbed sparse  the latent itself, gathered for every query token, shared by all heads
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

S, K, H, R, P, DN, DV = sympy.symbols("context selected heads rank rope nope value_dim", positive=True)


@dataclass(frozen=True)
class Plan:
    """Multiply-accumulates and cache elements read of one plan, as formulas in the symbols of this module."""

    macs: sympy.Expr
    elements: sympy.Expr

    def at(self, sizes: Mapping[str, float]) -> tuple[float, float]:
        """(MACs, elements read) for sizes by symbol name."""
        values = {symbol: sizes[symbol.name] for symbol in (S, K, H, R, P, DN, DV)}
        return float(self.macs.subs(values)), float(self.elements.subs(values))


NAIVE_ROW = DN + P + DV
"""Elements of a head's key and value for one token."""

NAIVE_FULL = Plan(S * S * H * NAIVE_ROW, S * H * NAIVE_ROW)
NAIVE_SPARSE = Plan(S * K * H * NAIVE_ROW, S * K * H * NAIVE_ROW)
ABSORBED_SPARSE = Plan(S * K * H * (2 * R + P), S * K * (R + P))

RATIOS: Mapping[str, sympy.Expr] = {
    "MACs, full over sparse": NAIVE_FULL.macs / NAIVE_SPARSE.macs,
    "reads, naive sparse over naive full": NAIVE_SPARSE.elements / NAIVE_FULL.elements,
    "MACs, absorbed over naive": sympy.simplify(ABSORBED_SPARSE.macs / NAIVE_SPARSE.macs),
    "reads, naive over absorbed": sympy.simplify(NAIVE_SPARSE.elements / ABSORBED_SPARSE.elements),
}


def ratio(name: str, sizes: Mapping[str, float]) -> float:
    """One of `RATIOS` for sizes by symbol name."""
    values = {symbol: sizes[symbol.name] for symbol in (S, K, H, R, P, DN, DV)}
    return float(RATIOS[name].subs(values))
