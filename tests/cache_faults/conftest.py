"""One digest of this package for all tests of the folder, as files may be saved while they run."""

from __future__ import annotations

import pytest

from cannopy.backend.cache import key


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "package_digest", lambda: "pinned")
