"""Remembered results of fake calls: those that the operators give, and none where one thing differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cannopy.frontend.fake_calls import FakeCalls

aten = torch.ops.aten


class _Count(TorchDispatchMode):
    """Calls that get past `FakeCalls`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype)


def _tail() -> torch.Tensor:
    """As `_x(2, 8)` but from the middle of a storage."""
    return torch.empty(4, 8)[2:]


SAME: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: _x(2, 8) * 2.0,
    "view": lambda: _x(2, 8).view(16),
    "view of a view": lambda: _tail()[1:, 2:].transpose(0, 1),
    "several views": lambda: _x(2, 8).split([3, 5], -1),
    "several tensors": lambda: _x(2, 8).topk(3),
    "cast": lambda: _x(2, 8).to(torch.bfloat16),
    "reshape that copies": lambda: _x(2, 8).t().reshape(-1),
    "matmul": lambda: torch.nn.functional.linear(_x(1, 2, 8), _x(4, 8)),
}
OTHER: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "kind of a number": (lambda: _x(2, dtype=torch.int32) * 2, lambda: _x(2, dtype=torch.int32) * 2.0),
    "dtype": (lambda: _x(2, 8) + 1, lambda: _x(2, 8, dtype=torch.bfloat16) + 1),
    "strides": (lambda: _x(8, 8) * 1, lambda: _x(8, 8).t() * 1),
    "offset": (lambda: _x(2, 8)[1:], lambda: _tail()[1:]),
    "size": (lambda: _x(2, 8).sum(0), lambda: _x(2, 9).sum(0)),
    "option": (lambda: _x(2, 8).sum(-1), lambda: _x(2, 8).sum(-1, keepdim=True)),
    "default dtype": (lambda: _x(2, dtype=torch.int64) / 2, lambda: _in_float64(_x(2, dtype=torch.int64))),
}


def _in_float64(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return x / 2
    finally:
        torch.set_default_dtype(torch.float32)


def _facts(value: Any) -> list[Any]:
    return [
        (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.fake_device, t.untyped_storage().nbytes())
        for t in (value if isinstance(value, tuple | list) else [value])
    ]


def _plain(make: Callable[[], Any]) -> Any:
    with FakeTensorMode():
        return make()


@pytest.mark.parametrize("name", SAME)
def test_second_result_is_the_same_and_new(name: str) -> None:
    mode, count = FakeTensorMode(), _Count()
    with mode, count, FakeCalls(mode), torch.no_grad():
        first = SAME[name]()
        before = len(count.seen)
        second = SAME[name]()
        again = set(count.seen[before:]) - {aten.empty.memory_format, torch.ops.prim.device.default}
    assert not again
    expected = _plain(SAME[name])
    assert type(second) is type(first)
    assert [f[:5] for f in _facts(first)] == [f[:5] for f in _facts(second)] == [f[:5] for f in _facts(expected)]
    pairs = zip(*(v if isinstance(v, tuple | list) else [v] for v in (first, second)), strict=True)
    assert all(a is not b and a.untyped_storage()._cdata != b.untyped_storage()._cdata for a, b in pairs)


@pytest.mark.parametrize("name", OTHER)
def test_what_differs_is_not_taken_for_the_same(name: str) -> None:
    one, other = OTHER[name]
    mode = FakeTensorMode()
    with mode, FakeCalls(mode), torch.no_grad():
        one(), one()
        found = other()
    assert _facts(found) == _facts(_plain(other)) != _facts(_plain(one))


def test_views_share_memory_and_writes_are_never_remembered() -> None:
    mode, count = FakeTensorMode(), _Count()
    with mode, count, FakeCalls(mode), torch.no_grad():
        for _ in range(2):
            x = _x(2, 8)
            part = x[1:]
            written = part.add_(1)
            assert isinstance(part, FakeTensor)
            assert part.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert written is part
    assert count.seen.count(aten.add_.Tensor) == 2
    assert count.seen.count(aten.slice.Tensor) == 1
