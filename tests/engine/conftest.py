"""Compilation through the real torchair, on the host engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

Compile = Callable[..., Any]


@pytest.fixture(scope="session")
def activated() -> None:
    """The host engine in torchair's place, for the whole run."""
    from cannopy.backend.host.activate import activate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        activate()
        import torchair

    torchair.logger.setLevel("CRITICAL")


@pytest.fixture
def compiled(activated: None) -> Iterator[Compile]:
    """compiled(fn) -> fn through torch.compile with torchair's backend, lowered for atlas-a3 unless told otherwise."""
    import torchair

    from cannopy.backend.host import target

    def compile_(fn: Callable[..., Any], chip: str = "atlas-a3") -> Callable[..., Any]:
        torch._dynamo.reset()
        backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
        lowered = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)

        def call(*args: Any) -> Any:
            with target.using(chip), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return lowered(*args)

        return call

    yield compile_
    torch._dynamo.reset()
