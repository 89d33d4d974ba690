"""What a lowered GE graph (torchair's protobuf) says about itself, on a device as on a host; nothing here runs it."""

from cannopy.backend.ge_graph.counts import Summary, summary

__all__ = ["Summary", "summary"]
