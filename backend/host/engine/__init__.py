"""Runs lowered GE graphs on the CPU in place of GE's session, and tells what is in them."""

from cannopy.backend.host.engine.counts import Summary, summary
from cannopy.backend.host.engine.session import HostGraph, profiling, recorded

__all__ = ["HostGraph", "Summary", "profiling", "recorded", "summary"]
