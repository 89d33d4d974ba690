"""The chip that lowering sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cannopy.backend.host import engine, target


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize(
    ("name", "soc", "device", "arch35"),
    [
        ("atlas-a2", 220, "Ascend910B1", False),
        ("atlas-a3", 250, "Ascend910_9391", False),
        ("atlas-950", 260, "Ascend950", True),
    ],
)
def test_every_question_has_the_targets_answer(name: str, soc: int, device: str, arch35: bool) -> None:
    import torch_npu
    from torch_npu.op_plugin.meta import _meta_registrations as meta
    from torchair._utils.check_platform import is_arch35

    with target.using(name) as chosen:
        assert torch_npu.npu.utils.get_soc_version() == soc
        assert torch_npu.npu._backends.get_soc_version() == soc
        assert meta.get_soc_version() == soc
        assert torch.npu.get_device_name() == device
        assert torch_npu.npu.utils.get_cann_version() == meta.get_cann_version() == "9.0.0"
        assert torch_npu.npu.utils._is_gte_cann_version("8.5.0.alpha003", "CANN")
        assert not torch_npu.npu.utils._is_gte_cann_version("9.2.0", module="CANN")
        assert is_arch35() is arch35
        assert torch.npu.is_available() is False
        assert target.current() is chosen


@pytest.mark.usefixtures("activated")
def test_blocks_nest_and_end() -> None:
    import torch_npu

    with target.using("atlas-a2", cann="8.3.RC1"):
        with target.using("atlas-950"):
            assert torch_npu.npu.utils.get_soc_version() == 260
        assert torch_npu.npu.utils.get_soc_version() == 220
        assert not torch_npu.npu.utils._is_gte_cann_version("8.5.0")
    assert target.current() is None
    assert torch_npu.npu.utils._is_gte_cann_version("8.5.0") is False  # the host's own answer


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match="unknown target 'a5'; known targets: atlas-950, atlas-a2, atlas-a3"):
        target.resolve("a5")


def test_versions_in_order() -> None:
    ordered = ["8.0.0", "8.1.RC1", "8.2.RC1", "8.2.RC2", "8.2.0", "8.5.0.alpha003", "8.5.0", "8.6.0", "9.0.0", "10.0.0"]
    assert sorted(random.Random(0).sample(ordered, len(ordered)), key=target.version_key) == ordered
    assert target.version_key("8.5") == target.version_key("8.5.0")
    with pytest.raises(ValueError, match=r"not a CANN version: '9\.x'"):
        target.version_key("9.x")


@pytest.mark.parametrize(("chip", "type_"), [("atlas-a3", "RotaryMul"), ("atlas-950", "RotaryPositionEmbedding")])
def test_one_host_lowers_for_each_chip(chip: str, type_: str, compiled: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    x, angle = torch.randn(1, 3, 4, 64), torch.randn(1, 3, 1, 64)
    args = (x, angle.cos(), angle.sin())
    got = compiled(lambda x, c, s: torch.ops.npu.npu_rotary_mul(x, c, s), chip)(*args)
    assert torch.equal(got, torch.ops.npu.npu_rotary_mul(*args))
    assert engine.recorded()[-1].summary().kernels == {type_: 1}
