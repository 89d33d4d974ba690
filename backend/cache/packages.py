"""Whose code a class, a function or a module is: torch's and Python's, an installed package's, or the user's."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from typing import Any

STABLE = frozenset({"torch", "torch_npu", "torchair", "numpy", "builtins", "cannopy"}) | sys.stdlib_module_names
"""Top-level packages that the ``versions`` and ``cannopy`` fields of the key cover."""
_LIBRARY = os.path.dirname(os.__file__)
_INSTALLED = ("site-packages", "dist-packages")


def module_of(obj: Any) -> str:
    """Name of the module that defines a class or a function; of a module its own."""
    found = obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)
    return found if isinstance(found, str) and found else "builtins"


def top_package(obj: Any) -> str:
    """First part of the name of the module that defines a class or a function."""
    return module_of(obj).split(".")[0]


def is_stable(obj: Any) -> bool:
    """Whether versions tell all about a class, a function or a module.

    A user's package may have a name of the standard library (``test``).
    """
    name = module_of(obj)
    top = name.split(".")[0]
    if top not in STABLE:
        return False
    if top not in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or file.startswith(_LIBRARY)


def is_installed(module: str, file: str = "") -> bool:
    """Whether a module is of an installed distribution, not a file of the user's."""
    file = getattr(sys.modules.get(module), "__file__", None) or file
    return any(part in file for part in _INSTALLED)


def is_own(obj: Any) -> bool:
    """Whether a class, a function or a module is in a file of the user's."""
    return not is_stable(obj) and not is_installed(module_of(obj))


def of_distributed(value: Any) -> bool:
    """Whether a module, class, function or object is of torch.distributed."""
    name = module_of(value)
    return name.startswith("torch.distributed") or name == "torch._C._distributed_c10d"


def own_classes(classes: Iterable[type]) -> list[type]:
    """The classes and their bases that are not of a `STABLE` package, each once."""
    seen: dict[type, None] = {}
    for cls in classes:
        for base in cls.__mro__:
            if not is_stable(base):
                seen.setdefault(base)
    return list(seen)
