"""Every mutation operator, by name."""

from __future__ import annotations

from tests.mutation import attention, caches, experts, generic, norms, rope, router
from tests.mutation.operators import Operator

OPERATORS: dict[str, Operator] = {
    o.name: o
    for module in (norms, rope, router, experts, attention, caches, generic)
    for o in module.OPERATORS
}
