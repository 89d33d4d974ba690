"""Checks a plan, and the graph that it was written into, without anything that made them."""

from cannopy.stream_scheduler.verifier.facts import GraphFacts, facts_of
from cannopy.stream_scheduler.verifier.graph import verify_graph
from cannopy.stream_scheduler.verifier.plan import verify_plan
from cannopy.stream_scheduler.verifier.violation import Subject, Violation

__all__ = ["GraphFacts", "Subject", "Violation", "facts_of", "verify_graph", "verify_plan"]
