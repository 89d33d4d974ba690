"""torchair prints and warns while it compiles; this keeps the terminal clean and the text for the artifact."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TextIO

logger = logging.getLogger("cannopy.backend")


class _ThisThread:
    """A text stream that keeps what the thread that made it writes and passes the rest on."""

    def __init__(self, lines: list[str], beside: TextIO) -> None:
        self._lines = lines
        self._beside = beside
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return self._beside.write(text)
        if text.strip():
            self._lines.append(text.rstrip("\n"))
        return len(text)

    def flush(self) -> None:
        self._beside.flush()

    def isatty(self) -> bool:
        return False


class _Keep(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[list[str]]:
    """Collect prints of this thread, warnings and the records of `loggers`; warning filters are restored.

    The lines are also logged at DEBUG on ``cannopy.backend`` when the block ends.
    """
    lines: list[str] = []
    keep = _Keep(lines)
    saved = [(log, log.handlers[:], log.propagate, log.level) for log in map(logging.getLogger, loggers)]
    for log, _, _, level in saved:
        log.handlers, log.propagate = [keep], False
        log.setLevel(min(level, logging.WARNING))
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(_ThisThread(lines, sys.stdout)),
        ):
            warnings.simplefilter("default")
            try:
                yield lines
            finally:
                lines += [f"{w.category.__name__}: {w.message}" for w in caught]
    finally:
        for log, handlers, propagate, level in saved:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
        for line in lines:
            logger.debug("%s", line)
