"""What the frontend refuses, told in terms of the user's own source."""

from __future__ import annotations

from dataclasses import dataclass


class FrontendError(Exception):
    """Base of the frontend's refusals; the message says what, where and what to do."""


class ResultError(FrontendError):
    """A result cannot be rebuilt in this process."""


class ModelSourceError(FrontendError):
    """MODEL names nothing that can be loaded."""


@dataclass(frozen=True)
class SourceLine:
    """A line of Python: absolute file name, 1-based line number and the line's text."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return f"{text}: {self.code}" if self.code else text


class CaptureError(FrontendError):
    """The model cannot be captured as one functional graph.

    ``source_file``, ``line`` and ``code`` name the innermost source line outside of torch, or are None, None and ""
    when the fault has no line (for example an unsupported result type). ``remedy`` is what usually cures it.
    """

    def __init__(
        self, reason: str, source_file: str | None = None, line: int | None = None, code: str = "", remedy: str = ""
    ) -> None:
        self.reason = reason
        self.source_file = source_file
        self.line = line
        self.code = code
        self.remedy = remedy
        where = str(SourceLine(source_file, line or 0, code)) if source_file else ""
        parts = [reason, f"  at {where}" if where else "", f"  cure: {remedy}" if remedy else ""]
        super().__init__("\n".join(p for p in parts if p))

    @classmethod
    def at(cls, where: SourceLine | None, reason: str, remedy: str = "") -> CaptureError:
        """The error for source line ``where``, which may be unknown."""
        if where is None:
            return cls(reason, remedy=remedy)
        return cls(reason, where.file, where.line, where.code, remedy)
