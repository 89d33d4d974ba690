"""Plain values and compiled code as text that is equal in every process, on every machine and in every folder."""

from __future__ import annotations

import dis
import enum
import hashlib
import itertools
import os
import pathlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cannopy.backend.cache.packages import is_stable

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_DEPTH = 6
_STORE_NAME = bytes([dis.opmap["STORE_NAME"]])
_EXTENDED = re.escape(bytes([dis.opmap["EXTENDED_ARG"]]))
_CONSTANTS = b"".join(re.escape(bytes([op])) for op in dis.hasconst if op < 256)
_WITH_CONSTANT = re.compile(b"%s*[%s]" % (_EXTENDED, _CONSTANTS), re.DOTALL)
VOLATILE = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "_original_object_hash", "_is_hf_initialized"})
"""Where a Hugging Face object came from, a hash that differs in every process, whether weights have been filled."""
LOADING = frozenset({"_weight_conversions", "_use_kernels", "hf_device_map", "generation_config"})
"""What `from_pretrained` leaves on a model and building it from a config does not: how files were read, defaults of
``generate``. Counts only where code other than transformers' own loading and generation names it."""
_HAS_DOCSTRING = 0x4000000
"""``inspect.CO_HAS_DOCSTRING``, which Python has from 3.13."""


def digest(text: str) -> str:
    """16 hex digits of SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def module_name(name: str) -> str:
    """A module's name without the folder that a checkpoint's own code was loaded from."""
    return f"transformers_modules.{name.rpartition('.')[2]}" if name.startswith("transformers_modules.") else name


def path_text(text: str) -> str | None:
    """``…/name`` for an absolute path, None for any other string: where things are stored decides nothing."""
    if len(text) > 1 and "\n" not in text and os.path.isabs(text) and text.count(os.sep) > 1:
        return f"…/{os.path.basename(text.rstrip(os.sep))}"
    return None


DEVICE = "device"


def place(device_type: str) -> str:
    """`DEVICE` for where the graph runs: the NPU, or the CPU of a host without one; otherwise the type itself.

    The meta device stands for it, so that a compilation without weights is found by a process that has them.
    """
    if device_type in ("meta", "npu"):
        return DEVICE
    npu = getattr(torch, "npu", None)
    runs_here = device_type == "cpu" and (npu is None or not npu.is_available())
    return DEVICE if runs_here else device_type


def constant_text(value: Any, *, source: bool = False, inside: tuple[int, ...] = ()) -> str | None:
    """A plain value, or a container of plain values, as text; None for the rest.

    ``source``: the value stands in source code, where a string is what it is even if it looks like a path.
    ``inside`` are the containers around it, by id: one that holds itself is not plain.
    """
    if isinstance(value, enum.Enum):
        held = constant_text(value._value_, source=True, inside=(*inside, id(value)))
        if held is None:
            return None
        text = f"{type(value).__qualname__}.{value.name} = {held}"
    elif isinstance(value, pathlib.PurePath):
        text = path_text(str(value)) or repr(str(value))
    elif isinstance(value, (*_PLAIN, tuple, list, set, frozenset)) and _has_more(type(value)):
        return None
    elif isinstance(value, str) and not source:
        text = path_text(value) or repr(value)
    elif isinstance(value, _PLAIN):
        text = repr(value)
    elif isinstance(value, torch.device):
        text = place(value.type)
    elif isinstance(value, _TORCH):
        text = str(value)
    elif isinstance(value, (range, slice)):
        text = repr(value)
    elif type(value) is dict or isinstance(value, (tuple, list, set, frozenset)):
        known: list[str] = []
        for v in itertools.chain(*_pairs(value)) if type(value) is dict else value:
            part = None if id(value) in inside else constant_text(v, source=source, inside=(*inside, id(value)))
            if part is None:
                return None
            known.append(part)
        fields = getattr(type(value), "_fields", "") if isinstance(value, tuple) else ""
        known = sorted(known) if isinstance(value, (set, frozenset)) else known
        text = f"{type(value).__name__}{fields or ''}({','.join(known)})"
    else:
        return None
    return text if len(text) <= 80 else f"{text[:40]}… {digest(text)}"


def _has_more(cls: type) -> bool:
    """Whether a class derived from a plain one, or from a container, may have attributes and methods of its own."""
    return not is_stable(cls) and not hasattr(cls, "_fields")


def types_in(value: Any, depth: int = 0) -> Iterator[type]:
    """The class of a value, and of those in plain containers, where versions do not tell what it does."""
    kind = type(value)
    if not is_stable(kind):
        yield kind
    if depth < _DEPTH and isinstance(value, (list, tuple, set, frozenset, dict)):
        for v in list(value):
            yield from types_in(v, depth + 1)
        if isinstance(value, dict):
            for v in list(value.values()):
                yield from types_in(v, depth + 1)


def _pairs(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return [(k, v) for k, v in value.items() if k not in VOLATILE]


def code_text(code: types.CodeType) -> str:
    """What a code object does: instructions with their constants, and names; no file, no lines, no docstrings."""
    names = (
        code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_flags & ~_HAS_DOCSTRING, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
    )  # fmt: skip
    operations, arguments = code.co_code[::2], bytearray(code.co_code[1::2])
    constants = []
    for found in _WITH_CONSTANT.finditer(operations):  # by value: a docstring shifts their numbers
        end = found.end()
        index = int.from_bytes(arguments[found.start() : end], "big")
        arguments[found.start() : end] = bytes(end - found.start())
        constants.append(_constant(code.co_consts[index]))
        stored = code.co_names[arguments[end]] if operations[end : end + 1] == _STORE_NAME else ""
        if stored == "__doc__":  # of a class in a function
            constants[-1] = "a docstring"
    handlers = getattr(code, "co_exceptiontable", b"").hex()  # from Python 3.11
    return f"{names}{handlers}{operations.hex()}{arguments.hex()}[{' '.join(constants)}]"


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_text(value)
    return constant_text(value, source=True) or type(value).__name__
