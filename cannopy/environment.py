"""What every entry point does before it uses torch."""

from __future__ import annotations

import contextlib
import io
import sys

from cannopy.errors import CannopyError


class NotReadyError(CannopyError):
    """torch or torch_npu cannot be imported here; ``cure`` is the command that changes that."""


def import_torch() -> None:
    """Import torch and torch_npu, or raise `NotReadyError` with the cure when that would fail for a known reason.

    torch_npu prints on standard output while it is imported. On a host that is its complaint that CANN is missing,
    which is known; elsewhere it goes to standard error, where it cannot end up in somebody's JSON.
    """
    from cannopy.backend.host.standin import EnvironmentProblem, ensure_importable, real_cann_present

    try:
        ensure_importable()
    except EnvironmentProblem as error:
        raise NotReadyError(error.problem, error.cure) from None
    if "torch_npu" in sys.modules:
        return
    with contextlib.redirect_stdout(io.StringIO()) as said:
        import torch  # noqa: F401
        import torch_npu  # noqa: F401
    if real_cann_present():
        sys.stderr.write(said.getvalue())
