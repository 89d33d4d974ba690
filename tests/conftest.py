"""What all tests share: torch that can be imported, and a compile cache of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cannopy.environment import NotReadyError, import_torch
from tests.rules.reasons import Reached


def pytest_configure(config: pytest.Config) -> None:
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make test`; sums over several threads round otherwise
    try:
        import_torch()
    except NotReadyError as error:
        pytest.exit(f"the tests need torch and torch_npu: {error}", returncode=2)
    import torch

    torch.set_num_threads(int(threads))  # where a plugin had it imported before
    config.pluginmanager.register(Reached(), "refusals-reached")


@pytest.fixture(autouse=True, scope="session")
def own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's ~/.cache/cannopy is neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
