"""The host engine for the tests of layouts."""

from tests.engine.conftest import activated, compiled

__all__ = ["activated", "compiled"]
