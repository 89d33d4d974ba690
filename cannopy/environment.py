"""The check that every entry point makes before it imports torch."""

from __future__ import annotations

from cannopy.errors import CannopyError


class NotReadyError(CannopyError):
    """torch or torch_npu cannot be imported here; ``cure`` is the command that changes that."""


def require_torch() -> None:
    """Raise `NotReadyError` when importing torch or torch_npu would fail; costs milliseconds and imports neither."""
    from cannopy.backend.host.standin import EnvironmentProblem, ensure_importable

    try:
        ensure_importable()
    except EnvironmentProblem as error:
        raise NotReadyError(error.problem, error.cure) from None
