"""Published measurements that the cost model is fitted on and compared with."""

from .points import FITTED, HELD_OUT, Point, load_points, sources, table

__all__ = ["FITTED", "HELD_OUT", "Point", "load_points", "sources", "table"]
