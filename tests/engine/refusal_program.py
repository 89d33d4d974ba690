"""Where CANN is found, activate() must leave torchair as it was. Needs a process that has not called it."""

from __future__ import annotations

import sys


def refusal() -> str:
    """The refusal's text; ends the process with exit code 1 when something was replaced."""
    import torch
    import torch_npu
    from torch_npu.dynamo import torchair

    torchair.CompilerConfig  # noqa: B018 the import is lazy; this runs it
    from torchair._ge_concrete_graph import fx2ge_converter
    from torchair.core import _backend, _torchair

    from cannopy.backend.host import activate as activation
    from cannopy.backend.host import standin

    def state() -> list[object]:
        return [
            _backend.TorchNpuGraph,
            _backend.initialize_graph_engine,
            fx2ge_converter.initialize_graph_engine,
            _torchair.get_registered_ir_def,
            _torchair.check_cann_compat,
            torch_npu.npu.utils.get_soc_version,
            torch.npu.get_device_name,
            torch._C._dispatch_has_kernel_for_dispatch_key("npu::npu_rms_norm", "CPU"),
        ]

    before = state()
    standin.real_cann_present = lambda: True
    try:
        activation.activate()
    except activation.CannPresentError as e:
        text = str(e)
    else:
        sys.exit("activate() did not refuse")
    if any(a is not b for a, b in zip(before, state(), strict=True)) or activation.is_active():
        sys.exit("something was replaced")
    standin.real_cann_present = lambda: False
    activation.activate()
    if not activation.is_active() or before[0] is state()[0] or before[2] is state()[2] or not state()[-1]:
        sys.exit("activate() did not take effect without CANN")
    return text
