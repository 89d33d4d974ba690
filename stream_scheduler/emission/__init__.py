"""A plan written into its graph: order, scopes, waits and prefetches as torchair reads them."""

from cannopy.stream_scheduler.emission.carriers import cannot_wait
from cannopy.stream_scheduler.emission.scopes import ScopeRun, scope_runs
from cannopy.stream_scheduler.emission.write import PLAN, write

__all__ = ["PLAN", "ScopeRun", "cannot_wait", "scope_runs", "write"]
