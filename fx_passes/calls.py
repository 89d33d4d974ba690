"""The arguments of a call, taken apart to their leaves: what a graph is specialised on besides shapes and dtypes.

Lists, tuples and dicts with integer or string keys are entered; any other object is one leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cannopy.fx_passes.paths import Path, item

Constant = bool | int | float | str | None | torch.dtype | torch.device
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """(path, value) of each leaf; keyword arguments in the order of their names."""

    def visit(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, list | tuple):
            for i, v in enumerate(value):
                yield from visit(v, path.then(item(i)))
        elif isinstance(value, dict):
            for k, v in value.items():
                if isinstance(k, int | str):
                    yield from visit(v, path.then(item(k)))
        else:
            yield path, value

    yield from visit(tuple(args), Path("args"))
    yield from visit({k: kwargs[k] for k in sorted(kwargs)}, Path("kwargs"))


def constants(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Constant]:
    """Path -> value of the leaves that are plain values: a capture is specialised to them."""
    return {str(path): value for path, value in leaves(args, kwargs) if isinstance(value, CONSTANTS)}


def kinds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Path -> "a tensor", "the tensor at <first path>" for one that is passed again, "a constant" or "an object".

    One tensor in two places is one input of the graph, so a call with two tensors there is another call.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, value in leaves(args, kwargs):
        text = str(path)
        if isinstance(value, torch.Tensor):
            known = first.setdefault(id(value), text)
            found[text] = "a tensor" if known == text else f"the tensor at {known}"
        else:
            found[text] = "a constant" if isinstance(value, CONSTANTS) else "an object"
    return found
