"""Rows written to places given by indices, and rows read from them."""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

_SIZES, (_R, _W, _B) = sizes("rows: rows written", "width: elements of a row", "bytes=2: bytes an element")
_EMBED, (_T, _H, _E) = sizes("tokens: tokens", "hidden: hidden size", "bytes=2: bytes an element of the table")

KERNELS = (
    Kernel(
        "cache_update",
        "cache_update",
        "rows to their slots of a cache (scatter_nd_update, scatter_update, reshape_and_cache)",
        _SIZES,
        "rows read and written once, one index a row",
        read={Role.ACTIVATIONS: _R * (_W * _B + 4)},
        write={Role.CACHE: _R * _W * _B},
        counts={"rows": _R},
        contract="npu_scatter_nd_update",
    ),
    Kernel(
        "embedding",
        "row_copy",
        "rows of a table by index; also gather and index_select",
        _EMBED,
        "rows read and written once, one index a row",
        read={Role.WEIGHTS: _T * _H * _E, Role.ACTIVATIONS: _T * 8},
        write={Role.ACTIVATIONS: _T * _H * _E},
        counts={"rows": _T},
    ),
)
