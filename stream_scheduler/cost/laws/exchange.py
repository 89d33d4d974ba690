"""Dispatch and combine. Times of 116 and 118 us for payloads of 7.9 and 14.7 MB say that the rows sent, each handled
by a vector core, decide, not their bytes; each peer adds a flag to write and to wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cannopy.stream_scheduler.cost.chip import Chip, Parts
from cannopy.stream_scheduler.cost.kernel import Work


def exchange(work: Work, chip: Chip) -> Parts:
    """fixed + peers + max(rows over the vector cores, bytes on the link)."""
    c = chip.constants
    rows = work.counts["messages"] * c["exchange.message"] / chip.vector_cores
    link = 1e6 * work.link_bytes / (chip.hardware.links["fabric"].bandwidth * c["exchange.link"])
    return Parts(
        launch=c["exchange.fixed"] + c["exchange.peer"] * work.counts["peers"],
        vector=rows if rows >= link else 0.0,
        link=link if rows < link else 0.0,
    )


LAWS: Mapping[str, Callable[[Work, Chip], Parts]] = {"exchange": exchange}
