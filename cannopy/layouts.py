"""Which die of a layout this process compiles for, and the process groups that it needs for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cannopy.backend import process_groups
from cannopy.frontend import state
from cannopy.frontend.errors import CaptureError
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


@contextmanager
def whole_caches(options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Compile in the block for example arguments of one die, where ``attn_tp`` may cut the heads that caches hold.

    `transformers` caches without tensors have none behind it: they get those of the rank in their first call.
    A `CaptureError` says what the caches of the example have to be.
    """
    if options.parallel is None or options.parallel.attn_tp == 1:
        yield
        return
    cure = f"with attn_tp={options.parallel.attn_tp}, caches of the example have all heads, as for one die"
    try:
        with state.left_alone(args, kwargs):
            yield
    except CaptureError as e:
        cures = "; ".join(filter(None, (e.remedy, cure)))
        raise CaptureError(e.reason, e.source_file, e.line, e.code, cures) from e
