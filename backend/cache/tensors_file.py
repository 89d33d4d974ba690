"""A safetensors file of derived weights: written one tensor after the other, mapped when it is read.

The header has the SHA-256 of every tensor and of itself, so damage is known before a value is used. The map is private:
a write into a tensor stays in this process. Nothing here unpickles.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cannopy.backend.cache.manifest import CorruptError

_OWN = "cannopy"
_PAD = ".pad"
_ALIGN = 64
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Map(mmap.mmap):
    """The bytes of a file, for as long as a tensor in it lives; ``use`` keeps the file from being removed."""

    use: object = None


def storable(t: torch.Tensor) -> bool:
    """Whether a file can hold the tensor."""
    return t.dtype in _NAMES and t.numel() > 0 and not t.is_meta


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of the values of each tensor, with its dtype and shape; what is the same memory is read once."""
    places = {n: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for n, t in tensors.items()}
    once = {place: tensors[n] for n, place in places.items()}
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        found = dict(zip(once, pool.map(_digest, once.values()), strict=True))
    return {n: found[place] for n, place in places.items()}


def _digest(t: torch.Tensor) -> str:
    return hashlib.sha256(f"{t.dtype}{list(t.shape)}".encode() + hashlib.sha256(_bytes(t)).digest()).hexdigest()


def _bytes(t: torch.Tensor) -> memoryview:
    flat = t.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write(fd: int, tensors: Iterable[tuple[str, torch.Tensor]], names: Iterable[str]) -> int:
    """Write ``tensors`` into the empty file; ``names`` are all that they can have. How many there were. OSError."""
    room = 4096 * math.ceil((1024 + sum(512 + 12 * len(n) for n in names)) / 4096)
    header: dict[str, Any] = {}
    sums: dict[str, str] = {}
    with os.fdopen(os.dup(fd), "wb") as f:
        f.seek(room)
        at = 0
        for name, t in tensors:
            data = _bytes(t)
            header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + len(data)]}
            sums[name] = hashlib.sha256(data).hexdigest()
            f.write(data)
            at += len(data)
            gap = -at % _ALIGN
            if gap:  # a file has no holes
                header[f"{_PAD}{at}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
                f.write(bytes(gap))
                at += gap
        own = json.dumps({"sums": sums, "bytes": room + at, "header": _header_digest(header, sums, room + at)})
        text = json.dumps({"__metadata__": {_OWN: own}, **header}).encode()
        if len(text) > room - 8:
            raise OSError(f"the header of the kept weights has {len(text)} bytes, there is room for {room - 8}")
        f.seek(0)
        f.write((room - 8).to_bytes(8, "little") + text.ljust(room - 8))
        f.flush()
        os.fsync(f.fileno())
    return len(sums)


def _header_digest(header: Mapping[str, Any], sums: Mapping[str, str], size: int) -> str:
    return hashlib.sha256(json.dumps([header, sums, size], sort_keys=True).encode()).hexdigest()


def read(fd: int) -> tuple[dict[str, torch.Tensor], Map]:
    """Every tensor of the open file, mapped and verified. `CorruptError`; OSError where files cannot be mapped."""
    try:
        mapped = Map(fd, 0, access=mmap.ACCESS_COPY)
    except ValueError as e:  # an empty file
        raise CorruptError(f"cannot be mapped: {e}") from e
    start, header, sums = _header(mapped)
    found = {}
    for name in sums:
        entry = header[name]
        kind, (begin, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        count = math.prod(entry["shape"])
        found[name] = torch.frombuffer(mapped, dtype=kind, count=count, offset=start + begin).view(entry["shape"])
        if end - begin != found[name].nbytes:
            raise CorruptError(f"{name} has another size than its shape")
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for name, ok in zip(found, pool.map(lambda n: _sum(found[n]) == sums[n], found), strict=True):
            if not ok:
                raise CorruptError(f"{name} was changed after it was written")
    return found, mapped


def _sum(t: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(t)).hexdigest()


def _header(mapped: Map) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Where the data begins, the entries of all tensors, and the digests."""
    try:
        length = int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8 : 8 + length]) if length <= len(mapped) - 8 else {}
        own = json.loads(header.pop("__metadata__")[_OWN])
        sums, size = dict(own["sums"]), own["bytes"]
        good = own["header"] == _header_digest(header, sums, size) and set(sums) <= set(header)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CorruptError("has no readable header") from e
    if not good:
        raise CorruptError("its header was changed after it was written")
    if size != len(mapped):
        raise CorruptError(f"has {len(mapped)} bytes, its header says {size}")
    return 8 + length, header, sums
