"""The error of operations that have no legal form."""

from __future__ import annotations

from torch import fx

from cannopy.fx_passes.graph import where


class LegaliseError(ValueError):
    """torchair cannot lower ``node`` and there is no equal form that it can."""

    def __init__(self, node: fx.Node, expected: str, found: str, cure: str) -> None:
        super().__init__(
            f"{node.target} at {where(node)} has no form that torchair lowers: expected {expected}, found {found}; "
            f"{cure}"
        )
        self.node = node
