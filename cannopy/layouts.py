"""Which die of a layout this process compiles for, and the process groups that it needs for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cannopy.backend import process_groups
from cannopy.fx_passes.parallel import Layout
from cannopy.options import Options


def layout_of(options: Options) -> Layout | None:
    """The place among the dies of ``options.parallel``; None for one die. `ParallelError` as `world_of`."""
    return process_groups.layout_of(options.parallel, options.rank)


def in_world() -> bool:
    """Whether the other ranks are there as well."""
    return process_groups.started() and not process_groups.is_fake()


@contextmanager
def world_of(options: Options) -> Iterator[Layout | None]:
    """The groups of ``options.parallel``: real ones, kept, in a world of torch.distributed; else stand-ins inside the
    block, with which a graph can be built but not run.

    Raises:
        ParallelError: the world has another size than the layout, or nobody says which rank this is.
        agree.RankError: a rank did not come; names it.
    """
    layout = layout_of(options)
    if layout is None:
        yield None
    elif process_groups.started():
        process_groups.ensure(layout, options.group_timeout, options.cache_timeout)
        yield layout
    else:
        with process_groups.offline(layout):
            yield layout
