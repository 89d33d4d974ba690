"""The base of the errors that the public interface raises at a user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CannopyError(Exception):
    """Something the user can act on: ``problem`` says what and where, ``cure`` what to do (may be empty)."""

    def __init__(self, problem: str, cure: str = "") -> None:
        super().__init__(f"{problem}\n  cure: {cure}" if cure else problem)
        self.problem = problem
        self.cure = cure


class OptionError(CannopyError):
    """An unknown option, or a value that the option does not take."""


def unknown(kind: str, found: object, known: Iterable[str]) -> str:
    """``unknown target 'atlas-a4'; did you mean 'atlas-a3'? Known: …``: one sentence for a name that is not known."""
    names = list(known)
    close = difflib.get_close_matches(str(found), names, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {kind} {found!r}{hint} Known: {', '.join(names)}"
