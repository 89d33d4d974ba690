"""The fast way through the guards: a call that passed them all is remembered, and calls like it pass by a few C calls.

The guards in `cannopy.backend.guards` decide and explain; they take a few microseconds per tensor. What is here
only ever says "exactly like a call that was let through": the same containers, the same plain values, tensors of the
same dtype, device, shape and strides. Anything else goes to the guards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch

from cannopy.fx_passes import calls
from cannopy.fx_passes.paths import ROOTS, Path, item, parse_path

TensorCheck = Callable[..., bool]
Collector = Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[list[torch.Tensor], tuple[Any, ...]] | None]
_is_nested: Callable[[torch.Tensor], bool] = torch._C.TensorBase.is_nested.__get__  # type: ignore[attr-defined]
"""Asked first: `TensorGuards` ends the process when it asks a nested tensor for strides."""
_NONE_THERE = (AttributeError, LookupError, TypeError)


class _NotFixedError(Exception):
    """The call has something that only the guards can judge."""


def _dynamo_check(tensors: Sequence[torch.Tensor]) -> TensorCheck:
    from torch._C._dynamo.guards import TensorGuards  # part of torch's C library: Dynamo itself is not imported

    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    made = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: TensorCheck = made.check
    return check


@functools.cache
def _is_exact() -> bool:
    """Whether this torch's `TensorGuards` is what is expected of it. It is not a public interface."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    like, double = empty(2, 3), empty(2, 3, dtype=torch.float64)
    others = [empty(3, 2), empty(6), empty(3, 2).t(), double, empty(2, 3, device="meta"), None]
    try:
        check = _dynamo_check([like, like])
        return check(like, empty(2, 3)) and not any(check(like, other) for other in others)
    except (ImportError, TypeError, RuntimeError):
        return False


def tensor_check(tensors: Sequence[torch.Tensor]) -> TensorCheck | None:
    """A function of as many tensors, True for the same dtypes, devices, shapes and strides; None if torch has none."""
    return _dynamo_check(tensors) if tensors and _is_exact() else None


class _Writer:
    """Writes a function that looks every path of a call up, common beginnings once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, str] = {root: root for root in ROOTS}
        self.globals: dict[str, Any] = {"Tensor": torch.Tensor}

    def value(self, path: Path) -> str:
        """The name of a variable that holds what is at `path`."""
        text = str(path)
        if text not in self.names:
            parent = self.value(Path(path.root, path.steps[:-1]))
            self.names[text] = f"v{len(self.names)}"
            self.lines.append(f"{self.names[text]} = {parent}{path.steps[-1]}")
        return self.names[text]

    def demand(self, condition: str) -> None:
        """Give up unless `condition` holds."""
        self.lines.append(f"if not ({condition}): return None")

    def constant(self, value: Any) -> str:
        """The name of a global variable of the function."""
        name = f"C{len(self.globals)}"
        self.globals[name] = value
        return name

    def function(self, result: str) -> Collector:
        """``(self, args, kwargs) -> result``, or None."""
        body = "".join(f"    {line}\n" for line in self.lines)
        exec(f"def collect({', '.join(ROOTS)}):\n{body}    return {result}\n", self.globals)
        made: Collector = self.globals["collect"]
        return made


class CallCheck:
    """Remembers one call that passed the guards.

    ``paths`` are those of the graph's tensors, ``constants`` those of the values that it is specialised on;
    ``strides`` are those that the tensors had.
    """

    def __init__(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], paths: Sequence[str],
        constants: Sequence[str],
    ) -> None:  # fmt: skip
        self._writer = _Writer()
        self._tensors = {path: self._writer.value(parse_path(path)) for path in paths}
        self._plain = {path: self._writer.value(parse_path(path)) for path in constants}
        self._first: dict[int, str] = {}
        self._structure(args, Path("args"))
        self._structure({k: kwargs[k] for k in sorted(kwargs)}, Path("kwargs"))
        self.graph_tensors = len(paths)
        tensors, plain = list(self._tensors.values()), list(self._plain.values())
        self._collect = self._writer.function(f"[{', '.join(tensors)}], ({', '.join(plain)}{',' * bool(plain)})")
        found = self._collect(module, args, kwargs)
        check = tensor_check(found[0]) if found is not None else None
        if found is None or check is None:
            raise _NotFixedError
        self._check = check
        self._values = found[1]
        self._types = tuple(map(type, found[1]))
        self._pointers = list(map(torch.Tensor.data_ptr, found[0]))
        if len(set(self._pointers)) != len(self._pointers) or 0 in self._pointers:
            raise _NotFixedError
        self.strides = [t.stride() for t in found[0][: len(paths)]]

    @classmethod
    def of(
        cls, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], paths: Sequence[str],
        constants: Sequence[str],
    ) -> CallCheck | None:  # fmt: skip
        """The check of calls like this one, which must have passed the guards; None when there can be none."""
        try:
            return cls(module, args, kwargs, paths, constants)
        except (_NotFixedError, *_NONE_THERE):
            return None

    def tensors(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], list[int]] | None:
        """The tensors at the paths and where their memory begins; None for a call that is not like this one."""
        try:
            found = self._collect(module, args, kwargs)
            if found is None:
                return None
            pointers = list(map(torch.Tensor.data_ptr, found[0]))
            moved = pointers != self._pointers
            if moved and any(map(_is_nested, compress(found[0], map(operator.ne, pointers, self._pointers)))):
                return None
            if not self._check(*found[0]):
                return None
        except (*_NONE_THERE, RuntimeError):  # a sparse tensor has no address
            return None
        tensors, plain = found
        if tuple(map(type, plain)) != self._types or plain != self._values:
            return None
        if moved:
            if len(set(pointers)) != len(pointers):  # one tensor in two places is another graph
                return None
            self._pointers = pointers
        return tensors[: self.graph_tensors], pointers[: self.graph_tensors]

    def _structure(self, value: Any, path: Path) -> None:
        """What `calls.kinds` sees, as conditions on types, lengths and keys."""
        w, name = self._writer, self._writer.value(path)
        if path.steps and isinstance(value, list | tuple | dict):
            w.demand(f"type({name}) is {w.constant(type(value))}")
        if isinstance(value, list | tuple):
            w.demand(f"len({name}) == {len(value)}")
            for i, v in enumerate(value):
                self._structure(v, path.then(item(i)))
        elif isinstance(value, dict):
            if any(type(k) not in (int, str) for k in value):
                raise _NotFixedError
            w.demand(f"{name}.keys() == {w.constant(frozenset(value))}")
            for k, v in value.items():
                self._structure(v, path.then(item(k)))
        elif isinstance(value, torch.Tensor):
            self._tensor(value, str(path), name)
        elif isinstance(value, calls.CONSTANTS):
            self._plain.setdefault(str(path), name)
        else:
            w.demand(f"type({name}) is {w.constant(type(value))}")

    def _tensor(self, value: torch.Tensor, path: str, name: str) -> None:
        first = self._first.setdefault(id(value), name)
        if first != name:
            self._writer.demand(f"{name} is {first}")
        elif path not in self._tensors:
            self._tensors[path] = name


def mode() -> tuple[torch.dtype, bool, bool, torch.dtype | None]:
    """What of torch's state decides the dtypes that an eager call computes in."""
    npu = torch.is_autocast_enabled("npu") if hasattr(torch, "npu") else False
    cpu = torch.is_autocast_enabled("cpu")
    kind = torch.get_autocast_dtype("npu" if npu else "cpu") if npu or cpu else None
    return torch.get_default_dtype(), cpu, npu, kind


def mode_text(state: tuple[torch.dtype, bool, bool, torch.dtype | None]) -> str:
    """``default dtype float32, autocast to bfloat16 on cpu``."""
    default, cpu, npu, kind = state
    where = " and ".join(name for name, on in (("cpu", cpu), ("npu", npu)) if on)
    cast = f"autocast to {str(kind).removeprefix('torch.')} on {where}" if where else "no autocast"
    return f"default dtype {str(default).removeprefix('torch.')}, {cast}"
