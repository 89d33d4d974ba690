"""A folder of safetensors files, read in parts: of each tensor the elements that are asked for, straight into place.

A parameter of a model may be one stored tensor or made of many (a stack of experts): `Stored` says of which. Files are
mapped into memory by safetensors; a part is copied out of the map, so only its pages are read. Narrow column parts
are read row by row, each in whole pages.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Box = tuple[tuple[int, int], ...]
"""First index and the one behind the last, for each dimension."""

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model: names the tensor and its file."""


@dataclass(frozen=True)
class Stored:
    """How a parameter is stored: ``tensor``, or ``parts`` joined along ``dim``, each with a dimension of its own there
    (``stack``) or one behind the other."""

    tensor: str = ""
    parts: tuple[Stored, ...] = ()
    dim: int = 0
    stack: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all stored tensors, in order."""
        return (self.tensor,) if self.tensor else tuple(name for part in self.parts for name in part.tensors)


class Checkpoint:
    """The tensors of ``folder``'s safetensors files. ``bytes_read`` counts what was copied out of them.

    One file is open at a time. Raises `CheckpointError` for a folder without readable files.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        self._open: tuple[str, Any] | None = None
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._files = self._listed()

    def _listed(self) -> dict[str, str]:
        """The file of each tensor, from the index or from the files themselves."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as e:
                raise CheckpointError(f"{index} cannot be used: {e!r}") from e
        names = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{self.folder} has no safetensors files")
        return {key: name for name in names for key in self._file(name).keys()}  # noqa: SIM118 no mapping

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return tuple(self._files)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two folders only if they hold the same files, unchanged."""
        stats = [(name, (self.folder / name).stat()) for name in sorted(set(self._files.values()))]
        return str(self.folder.resolve()), *((n, s.st_size, s.st_mtime_ns, s.st_ino) for n, s in stats)

    def where(self, name: str) -> str:
        """``name`` with its file, for messages."""
        return f"{name} in {self.folder / self._files[name]}"

    def shape(self, stored: Stored) -> tuple[int, ...]:
        """The shape of the parameter; `CheckpointError` when the parts do not fit together."""
        if stored.tensor:
            return self._shape(stored.tensor)
        shapes = [self.shape(part) for part in stored.parts]
        first, at = shapes[0], stored.dim
        for part, found in zip(stored.parts, shapes, strict=True):
            wanted = first if stored.stack else (*first[:at], found[at] if at < len(found) else 0, *first[at + 1 :])
            if found != wanted:
                raise CheckpointError(f"{self.where(part.tensors[0])}: expected shape {list(wanted)} as "
                                      f"{stored.parts[0].tensors[0]} has it, found {list(found)}")
        size = len(shapes) if stored.stack else sum(s[at] for s in shapes)
        return (*first[:at], size, *first[at + (not stored.stack) :])

    def read(self, stored: Stored, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The elements of ``box``, contiguous, in memory of their own, on the CPU."""
        out = torch.empty([stop - start for start, stop in box], dtype=dtype)
        self._fill(stored, box, out)
        return out

    def _fill(self, stored: Stored, box: Box, out: torch.Tensor) -> None:
        if stored.tensor:
            self._copy(stored.tensor, box, out)
            return
        at = stored.dim
        first, behind = box[at]
        if stored.stack:
            for i in range(first, behind):
                self._fill(stored.parts[i], (*box[:at], *box[at + 1 :]), out.select(at, i - first))
            return
        begin = 0
        for part in stored.parts:
            end = begin + self.shape(part)[at]
            low, high = max(first, begin), min(behind, end)
            if low < high:
                inner = (*box[:at], (low - begin, high - begin), *box[at + 1 :])
                self._fill(part, inner, out.narrow(at, low - first, high - low))
            begin = end

    def _copy(self, name: str, box: Box, out: torch.Tensor) -> None:
        file = self._file(self._files[name])
        try:
            found = file.get_slice(name)
            kind = _DTYPES.get(found.get_dtype())
            if kind is None:
                raise CheckpointError(f"{self.where(name)}: expected weights in bf16, fp16 or fp32, found "
                                      f"{found.get_dtype()}")
            part = found[tuple(slice(a, b) for a, b in box)] if box else file.get_tensor(name)
        except CheckpointError:
            raise
        except Exception as e:  # safetensors has an exception of its own, a subclass of Exception
            raise CheckpointError(f"{self.where(name)} cannot be read: {e}") from e
        out.copy_(part)
        self.bytes_read += math.prod(part.shape) * kind.itemsize

    def _shape(self, name: str) -> tuple[int, ...]:
        file = self._files[name]
        known = self._shapes.setdefault(file, {})
        if name not in known:
            opened = self._file(file)
            for key in opened.keys():  # noqa: SIM118 no mapping
                known[key] = tuple(opened.get_slice(key).get_shape())
            if name not in known:
                raise CheckpointError(f"{self.where(name)}: the index names it, the file does not have it")
        return known[name]

    def _file(self, name: str) -> Any:
        if self._open is None or self._open[0] != name:
            self._open = None
            from safetensors import safe_open

            try:
                self._open = name, safe_open(self.folder / name, framework="pt")
            except Exception as e:  # OSError, or safetensors' own for a broken file
                raise CheckpointError(f"{self.folder / name} cannot be read: {e}") from e
        return self._open[1]

