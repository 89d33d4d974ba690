"""The operators of torchair that carry a plan, in the forms that its converters take.

`scope_enter` takes keys and values of one kind; the event and core-limit passes of torchair's graph mode read the first
key, or exactly two values, of a scope node, so kinds are never mixed in one node and the stream's label comes first.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from cannopy.stream_scheduler.plan.model import Placement, Plan
from cannopy.stream_scheduler.simulator.schedule import MAIN

STREAM = "_user_stream_label"
PRIORITY = "_user_stream_priority"
INNER_PARALLEL = "_enable_inner_parallel"
CUBE = "_op_aicore_num"
VECTOR = "_op_vectorcore_num"
SUPER_KERNEL = "_super_kernel_scope"
SUPER_KERNEL_OPTIONS = "_super_kernel_options"

Attributes = tuple[tuple[str, str], ...]
"""Keys and values of one scope; also what a scope leaves on every op inside it."""


def enter() -> Any:
    """``air::scope_enter(str[] keys, str[] values, bool need_execute=False)``."""
    return _air().scope_enter.default


def leave() -> Any:
    """``air::scope_exit(bool need_execute=False)``."""
    return _air().scope_exit.default


def wait() -> Any:
    """``air::wait_tensor(Tensor self, Tensor dependency) -> Tensor``: self, but not before dependency is there."""
    _air()
    importlib.import_module("torchair.scope._wait_tensor")  # torchair defines it at the first wait only
    return torch.ops.air.wait_tensor.default


def prefetch() -> Any:
    """``npu::npu_prefetch(Tensor input, Tensor? dependency, int max_size, int offset=0)``."""
    return torch.ops.npu.npu_prefetch.default


def stream(label: str) -> Attributes:
    """The scope of `npu_stream_switch`. Inner parallelism would let GE split what the plan has put into one stream."""
    return ((STREAM, label), (PRIORITY, "0"), (INNER_PARALLEL, "False"))


def cores(limit: Sequence[int]) -> Attributes:
    """The scope of `limit_core_num`."""
    return ((CUBE, str(limit[0])), (VECTOR, str(limit[1])))


def super_kernel(name: str, options: str) -> Attributes:
    """The scope of `super_kernel`."""
    return ((SUPER_KERNEL, name), (SUPER_KERNEL_OPTIONS, options))


def of(placement: Placement, plan: Plan) -> dict[str, str]:
    """What the scopes around the kernel of ``placement`` leave on its ops."""
    found: dict[str, str] = {}
    if placement.stream != MAIN:
        found.update(stream(placement.stream))
    if placement.cores is not None:
        found.update(cores(placement.cores))
    if placement.super_kernel is not None:
        options = {region.name: region.options for region in plan.regions}
        found.update(super_kernel(placement.super_kernel, options.get(placement.super_kernel, "")))
    return found


def _air() -> Any:
    lazy = importlib.import_module("torch_npu.dynamo.torchair")
    lazy.CompilerConfig  # noqa: B018 the import is lazy; this runs it
    return torch.ops.air
