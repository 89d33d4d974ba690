"""Runs lowered GE graphs on the CPU in place of GE's session."""

from cannopy.backend.host.engine.session import HostGraph, profiling, recorded

__all__ = ["HostGraph", "profiling", "recorded"]
