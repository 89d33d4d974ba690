"""Stand-in for CANN's shared libraries, so that torch_npu imports on a machine without an NPU.

The torch_npu wheel links against CANN (libhccl, libascendcl, libge_runner, ...), and its RPATH
names a folder `torch_npu.libs` beside the package which the wheel does not contain. `install`
reads from the wheel which libraries and symbols it wants, builds one small library that has them
all, and links the names to it in that folder. No environment variable is needed afterwards.

Only importing, op schemas, meta kernels and torchair's lowering work this way. Nothing can run on
a device: the device count is 0 and torch.npu.is_available() is False. Where real CANN is present
nothing is touched.

Entry points call `ensure_importable()` before they import torch.
"""

from .cann import real_cann_present
from .check import ensure_importable
from .install import install, uninstall
from .problem import EnvironmentProblem
from .status import StandinStatus, status

__all__ = [
    "EnvironmentProblem",
    "StandinStatus",
    "ensure_importable",
    "install",
    "real_cann_present",
    "status",
    "uninstall",
]
