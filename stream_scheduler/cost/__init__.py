"""Cost of kernels: bytes and MACs in symbols (kernels/), time from them (laws/)."""

from .chip import Share
from .estimate import BOUNDS, Estimate, UnknownKernelError, estimate, kernel, kernel_names
from .kernel import Kernel, Role, Size, SizeError, Work
from .kernels.grouped_matmul import active_experts
from .sensitivity import Sensitivity, sensitivity

__all__ = [
    "BOUNDS",
    "Estimate",
    "Kernel",
    "Role",
    "Sensitivity",
    "Share",
    "Size",
    "SizeError",
    "UnknownKernelError",
    "Work",
    "active_experts",
    "estimate",
    "kernel",
    "kernel_names",
    "sensitivity",
]
