"""The chip that a lowering is for, as torch_npu's meta functions and torchair's converters see it.

Several of them ask for the SoC number, the device name or the CANN version. A host without a device
has none of these, so the three questions are answered for the chosen `Target` instead. This is also how
one host lowers for different chips. ``torch.npu.is_available()`` and the device count are left alone.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """One chip. ``soc`` is torch_npu's SoC number (torch_npu/csrc NpuVariables), ``device_name`` what
    ``torch.npu.get_device_name()`` returns on it, ``cann`` the CANN version to lower for."""

    name: str
    soc: int
    device_name: str
    cann: str = "9.0.0"


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("atlas-a2", 220, "Ascend910B1"),
        Target("atlas-a3", 250, "Ascend910_9391"),
        Target("atlas-950", 260, "Ascend950"),
    )
}

_scoped: ContextVar[Target | None] = ContextVar("cannopy_target", default=None)
_MARK = "_cannopy_original"
_STAGES = {"alpha": 0, "beta": 1, "t": 2, "rc": 3}
_RELEASE = 4
_PART = re.compile(r"(alpha|beta|rc|t)?(\d+)", re.IGNORECASE)


def resolve(name: str, cann: str | None = None) -> Target:
    """The target called ``name``, with another CANN version if given. ValueError when there is none."""
    if name not in TARGETS:
        raise ValueError(f"unknown target {name!r}; known targets: {', '.join(sorted(TARGETS))}")
    found = TARGETS[name]
    return found if cann is None else Target(found.name, found.soc, found.device_name, cann)


def current() -> Target | None:
    """The target of the innermost `using` block of this context, or None."""
    return _scoped.get()


@contextmanager
def using(target: str | Target, cann: str | None = None) -> Iterator[Target]:
    """Lower for ``target`` inside the block: trace, compile and load cached graphs in it.

    ``cann`` overrides the CANN version. Blocks nest; leaving one restores the previous answers.
    """
    chosen = resolve(target, cann) if isinstance(target, str) else target
    install()
    token = _scoped.set(chosen)
    try:
        yield chosen
    finally:
        _scoped.reset(token)


def version_key(version: str) -> tuple[tuple[int, int], ...]:
    """Sort key of a CANN version: ``8.5.0.alpha003`` < ``8.5.0``, ``8.2.RC1`` < ``8.2.0``.

    Raises ValueError when ``version`` has a part that is neither a number nor alpha/beta/T/RC with one.
    """
    key: list[tuple[int, int]] = []
    for part in version.split("."):
        m = _PART.fullmatch(part)
        if m is None:
            raise ValueError(f"not a CANN version: {version!r} (part {part!r})")
        key.append((_STAGES[m[1].lower()] if m[1] else _RELEASE, int(m[2])))
    while len(key) < 4:
        key.append((_RELEASE, 0))
    return tuple(key)


def _replacements() -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    def soc(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_soc_version() -> Any:
            t = current()
            return original() if t is None else t.soc

        return get_soc_version

    def name(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_device_name(device_name: Any = None) -> Any:
            t = current()
            return original(device_name) if t is None else t.device_name

        return get_device_name

    def version(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_cann_version(module: str = "CANN") -> Any:
            t = current()
            return original(module) if t is None else t.cann

        return get_cann_version

    def at_least(original: Callable[..., Any]) -> Callable[..., Any]:
        def _is_gte_cann_version(version: str, module: str = "CANN") -> Any:
            t = current()
            return original(version, module) if t is None else version_key(t.cann) >= version_key(version)

        return _is_gte_cann_version

    return {
        "get_soc_version": soc,
        "get_device_name": name,
        "get_cann_version": version,
        "_is_gte_cann_version": at_least,
    }


def _homes() -> dict[str, tuple[Any, ...]]:
    """Modules that define the functions.

    ``torch.npu`` is ``torch_npu.npu`` under a second name, by which Dynamo imports ``utils`` once more as a module of
    its own: it is imported here, so that no unrouted copy appears later.
    """
    import torch_npu

    utils = tuple(importlib.import_module(f"{name}.npu.utils") for name in ("torch_npu", "torch"))
    return {
        "get_soc_version": (torch_npu.npu._backends,),
        "get_device_name": (torch_npu.npu,),
        "get_cann_version": utils,
        "_is_gte_cann_version": utils,
    }


def install() -> None:
    """Route the version questions of torch_npu through `current`; without a target the answers are unchanged.

    Replaces each function where it is defined and in every loaded torch_npu or torchair module that imported it
    by name. Idempotent.
    """
    homes = _homes()
    for attr, make in _replacements().items():
        for home in homes[attr]:
            original = getattr(home, attr)
            if hasattr(original, _MARK):
                continue
            routed = make(original)
            setattr(routed, _MARK, original)
            replace_everywhere(attr, original, routed)


def replace_everywhere(attr: str, old: Any, new: Any) -> None:
    """Set ``attr`` to ``new`` in each loaded torch_npu or torchair module where it is bound to ``old``."""
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.split(".")[0] not in {"torch_npu", "torchair", "torch"}:
            continue
        if vars(module).get(attr) is old:
            setattr(module, attr, new)
