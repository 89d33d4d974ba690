"""What torchair asks HCCL for when it loads a graph with collectives, answered on a host.

The code that torchair stores looks up each process group by tag and ranks, asks the group's NPU backend for the name of
its communicator and writes it into the graph. On a host that name is the text of tag and ranks, by which the host
engine finds the group (`exchange.group_of`). What is stored is the same as on a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Communicator:
    """Stands for ProcessGroupHCCL of one group."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """The name as torchair writes it for groups of CPU processes."""
        encode = importlib.import_module("torchair._ge_concrete_graph.hcom_utils").encode_pg_tag_ranklist
        c10d: Any = torch.distributed.distributed_c10d
        tag, ranks = c10d._get_group_tag(self._group), c10d.get_process_group_ranks(self._group)
        return str(encode(tag, ranks))


@contextmanager
def named() -> Iterator[None]:
    """Inside the block every process group of this host has an NPU backend that can only be asked for its name."""
    npu: Any = importlib.import_module("torch_npu.distributed")
    kind: Any = torch.distributed.ProcessGroup
    supported, original = npu._is_support_hccl_comm_name, kind._get_backend

    def get_backend(self: Any, device: torch.device) -> Any:
        return _Communicator(self) if device.type == "npu" else original(self, device)

    npu._is_support_hccl_comm_name, kind._get_backend = (lambda: True), get_backend
    try:
        yield
    finally:
        npu._is_support_hccl_comm_name, kind._get_backend = supported, original
