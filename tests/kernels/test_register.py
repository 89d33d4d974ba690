"""Registration: explicit, once, and never beside a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cannopy.backend.host import target
from cannopy.backend.host.kernels import HostKernelsError, register, registry
from cannopy.backend.host.standin.cann import Cann
from cannopy.fusion_rules.contracts import PRODUCTS, ContractError, contract_names
from tests.kernels.numerics import normal


def test_every_contract_has_a_kernel_and_the_reverse() -> None:
    assert sorted(kernel.__name__ for kernel in registry.KERNELS) == list(contract_names())


def test_registering_twice_is_harmless() -> None:
    library = registry._Registration.libraries
    register()
    assert registry._Registration.libraries is library


def test_the_target_decides_what_is_refused() -> None:
    x, weight = normal(5, 3, 32), normal(3, 32, 16)
    with target.using("atlas-950"), pytest.raises(ContractError, match="clause products"):
        torch.ops.npu.npu_transpose_batchmatmul(x, weight, perm_x1=[1, 0, 2])
    assert torch.ops.npu.npu_transpose_batchmatmul(x, weight, perm_x1=[1, 0, 2]).shape == (5, 3, 16)


def test_targets_are_the_products_of_the_contracts() -> None:
    assert sorted(target.TARGETS) == sorted(PRODUCTS)


def test_importing_registers_nothing() -> None:
    program = (
        "import torch, cannopy.backend.host.kernels\n"
        "print(torch._C._dispatch_has_kernel_for_dispatch_key('npu::npu_rms_norm', 'CPU'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_refused_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._Registration, "libraries", ())
    monkeypatch.setattr(registry, "find_cann", lambda: Cann(Path("/usr/local/Ascend/lib/libascendcl.so"), True))
    with pytest.raises(HostKernelsError, match="CANN is installed"):
        register()
    monkeypatch.setattr(registry.torch_npu.npu, "is_available", lambda: True)
    with pytest.raises(HostKernelsError, match="has an NPU"):
        register()
