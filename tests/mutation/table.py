"""Every mutation operator, by name."""

from __future__ import annotations

from tests.mutation import (
    attention,
    caches,
    experts,
    generic,
    indexer,
    mlps,
    norms,
    numbers,
    residuals,
    rope,
    router,
    router_weights,
    weights,
)
from tests.mutation.operators import Operator

MODULES = (
    norms, residuals, rope, router, router_weights, mlps, experts, attention, indexer, caches, weights, generic,
    numbers,
)
OPERATORS: dict[str, Operator] = {
    o.name: o
    for module in MODULES
    for o in module.OPERATORS
}
