"""Hardware contracts of the fused ops: what the device accepts, clause by clause, with the source of each limit.

One YAML file per op. Rewrite rules call `check_call` on fake tensors before they emit a call; the CPU kernels call
`demand` on real ones and add the clauses of ``host_clauses`` and ``value_rules``.
"""

from __future__ import annotations

from .checker import check_call, demand, value_error
from .loader import ContractFileError, contract_names, load_contract, parse_contract
from .model import PRODUCTS, Clause, Contract, ContractError, ValueRule, Violation
from .wording import wording

__all__ = [
    "PRODUCTS",
    "Clause",
    "Contract",
    "ContractError",
    "ContractFileError",
    "ValueRule",
    "Violation",
    "check_call",
    "contract_names",
    "demand",
    "load_contract",
    "parse_contract",
    "value_error",
    "wording",
]
