"""SuperKernel regions: which kernels can be fused into one launch, and where a region has to end.

    eligibility.yaml   kernels, with where it is published that they fuse
    regions.py         cuts a layer into runs
"""

from cannopy.superkernel.eligibility import Eligibility, table, why_not
from cannopy.superkernel.regions import SuperKernels

__all__ = ["Eligibility", "SuperKernels", "table", "why_not"]
