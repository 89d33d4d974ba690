"""CPU kernels of the npu ops: what each op computes by its documentation, in plain PyTorch, one op per file.

They are registered by an explicit call of `register`, never by an import. Each is guarded by the op's hardware
contract, so that a call that the device would refuse is refused here with the same clause.
"""

from __future__ import annotations

from .registry import HostKernelsError, register

__all__ = ["HostKernelsError", "register"]
