"""Collectives: latency and bytes, with another pair of constants past the protocol switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cannopy.stream_scheduler.cost.chip import Chip, Parts
from cannopy.stream_scheduler.cost.kernel import Work


def _phase(chip: Chip, link_bytes: float, peer_bytes: float, reduced: float) -> Parts:
    """One exchange of ``link_bytes`` per die in pieces of ``peer_bytes``; ``reduced`` bytes are added up on arrival."""
    c = chip.constants
    size = "small" if peer_bytes <= c["collective.switch"] else "large"
    bandwidth = chip.hardware.links["fabric"].bandwidth
    return Parts(
        launch=c[f"collective.{size}_fixed"],
        link=1e6 * link_bytes / (bandwidth * c[f"collective.{size}_link"]),
        vector=1e6 * reduced / (bandwidth * c["collective.reduce"]) if size == "large" else 0.0,
    )


def gather(work: Work, chip: Chip) -> Parts:
    """latency + bytes on the link, both of the protocol that the size of a piece selects."""
    return _phase(chip, work.link_bytes, work.counts["peer_bytes"], 0.0)


def reduce_scatter(work: Work, chip: Chip) -> Parts:
    """As all-gather, and what arrives is added up; hidden behind the link in small pieces."""
    return _phase(chip, work.link_bytes, work.counts["peer_bytes"], work.link_bytes)


def all_reduce(work: Work, chip: Chip) -> Parts:
    """A reduce-scatter and an all-gather of the tensor's parts, one after the other."""
    half, piece = work.link_bytes / 2, work.counts["peer_bytes"]
    first, second = _phase(chip, half, piece, half), _phase(chip, half, piece, 0.0)
    return Parts(
        launch=first.launch + second.launch, link=first.link + second.link, vector=first.vector + second.vector
    )


LAWS: Mapping[str, Callable[[Work, Chip], Parts]] = {
    "collective_all_gather": gather,
    "collective_all_to_all": gather,
    "collective_reduce_scatter": reduce_scatter,
    "collective_all_reduce": all_reduce,
}
