"""Communicators of HCCL under stable names. Nothing here has run on a device: it follows torch_npu's interface.

A graph holds the communicator's name of dispatch and combine as a constant (``group_ep``), so it has to be the same
after a restart. ``hccl_config={"group_name": …}`` of the group's options is a label for logs, not that name
(torch_npu's page on pg_options); ``ProcessGroupHCCL._set_hccl_comm_name`` sets it, where CANN can do that. Where it
cannot, `rebind` writes the name of this process into a graph after loading.
"""

from __future__ import annotations

from typing import Any

import torch

from cannopy.fx_passes.parallel import Group

ATTRIBUTES = ("group_ep", "group_tp")
"""Attributes with a communicator's name that torchair does not rename when it loads a graph (it does ``group``)."""


def options(group: Group) -> Any:
    """Options of ProcessGroupHCCL for ``group``."""
    import torch_npu

    made = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    made.hccl_config = {"group_name": group.name}
    return made


def name(process_group: Any, group: Group) -> None:
    """Give the communicator of ``process_group`` the stable name of ``group``, where this CANN can."""
    import torch_npu

    if torch_npu.distributed._is_support_hccl_comm_name():
        process_group._get_backend(torch.device("npu"))._set_hccl_comm_name(group.name)


def rebind(ge_graph: Any) -> None:
    """Write the names that communicators have in this process into the ops of a lowered graph that hold stable ones."""
    from torch.distributed import distributed_c10d as c10d

    rank = torch.distributed.get_rank()
    names: dict[str, str] = {}
    for op in getattr(ge_graph, "_proto", ge_graph).op:
        for key in ATTRIBUTES:
            stable = op.attr[key].s.decode() if key in op.attr else ""
            if not stable.startswith("cannopy."):
                continue
            if stable not in names:
                backend = c10d._resolve_process_group(stable)._get_backend(torch.device("npu"))
                names[stable] = str(backend.get_hccl_comm_name(rank, init_comm=True))
            op.attr[key].s = names[stable].encode()
