"""ATen kernels that touch each element once: arithmetic, casts, copies, concatenation, transposition."""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

_POINT, (_N, _INPUTS, _B, _OPS) = sizes(
    "elements: elements of the output",
    "inputs=1: tensors of that size read",
    "bytes=2: bytes an element",
    "ops=1: lane operations an element",
)
_MOVE, (_M, _MB) = sizes("elements: elements moved", "bytes=2: bytes an element")


def _move(name: str, law: str, summary: str) -> Kernel:
    return Kernel(
        name,
        law,
        summary,
        _MOVE,
        "elements read and written once",
        read={Role.ACTIVATIONS: _M * _MB},
        write={Role.ACTIVATIONS: _M * _MB},
    )


KERNELS = (
    Kernel(
        "elementwise",
        "elementwise",
        "one output element from one element of each input",
        _POINT,
        "inputs and output once",
        read={Role.ACTIVATIONS: _N * _INPUTS * _B},
        write={Role.ACTIVATIONS: _N * _B},
        vector_ops=_N * _OPS,
    ),
    _move("copy", "elementwise", "contiguous copy, also of a cache that is not written in place"),
    _move("cat", "elementwise", "concatenation"),
    _move("transpose", "transpose", "transposition or permutation that moves data"),
)
