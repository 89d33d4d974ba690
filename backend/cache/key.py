"""The key of the compile cache, made without capturing the model.

torchair's own key is the repr of a module and a few options; two models that differ in ``top_k`` share it. This one
covers what decides a compilation: the code that runs, config and plain attributes, layouts of weights and inputs,
options, this package, versions, target and topology. Values of tensors are inputs and do not count.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import platform
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cannopy.backend.artifact import CallForm, Fingerprint
from cannopy.backend.cache.code import CodeWalk
from cannopy.backend.cache.describe import Describer, tensor_item
from cannopy.backend.cache.packages import is_stable, of_distributed, own_classes, top_package
from cannopy.backend.cache.text import constant_text, digest
from cannopy.backend.options import BuildOptions
from cannopy.fx_passes import calls
from cannopy.fx_passes.parallel import Layout

Items = Mapping[str, str]
_FILES = "package files"
"""Names in details, not in fields: which file of this package changed. The digest in ``package`` is what counts."""
_END = re.compile(r"[.\[=]")
"""Where the name of an attribute ends in ``.plan['a'].b=1``."""
_VARIABLES = ("ASCEND_CUSTOM_OPP_PATH", "AUTOFUSE_FLAGS", "BREAK_GRAPH_OP_LIST")
_PACKAGES = ("frontend", "fx_passes", "fusion_rules", "stream_scheduler", "superkernel", "models", "backend")


def fingerprint(
    model: torch.nn.Module,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: BuildOptions,
) -> Fingerprint:
    """The identity of compiling ``model.method(*args, **kwargs)`` with `options`."""
    modules = dict(model.named_modules())
    read: set[str] = set()
    while True:
        describer = Describer(modules.values(), read)
        attributes, config = _attributes(describer, modules)
        inputs = dict(describer.items(list(args), "args")) | dict(describer.items(dict(kwargs), "kwargs"))
        walk = _walk(model, method, describer)
        if walk.loading <= read:
            break
        read |= walk.loading
    chip = _chip(options)
    own_rank = _own_rank(model, walk, describer)
    details: dict[str, Items] = {
        "method": {"name": method, "form": repr(call_form(args, kwargs))},
        "config": config,
        "attributes": attributes,
        "parameters": _weights(model, walk.reads("requires_grad")),
        "inputs": inputs,
        "options": options.key_items(),
        "package": {"package": package_digest()},
        "versions": {**versions(_packages(describer.classes)), **({} if chip is None else {"cann": chip.cann})},
        "environment": _environment(),
        "target": _target(options, chip, not any(p.is_meta for p in model.parameters())),
        "topology": _topology(own_rank) if options.layout is None else _place(options.layout),
        "torch state": _torch_state(),
        "code": walk.items,
    }
    fields = {name: _digest(items) for name, items in details.items()}
    return Fingerprint(_digest(fields), fields, {**details, _FILES: file_digests()})


def call_form(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallForm:
    """The spelling of a call and what its arguments are; keyword order does not matter."""
    return CallForm(len(args), tuple(sorted(kwargs)), tuple(calls.kinds(args, kwargs).items()))


def differences(old: Fingerprint, new: Fingerprint, limit: int = 3) -> list[str]:
    """The fields that differ, each with up to `limit` items: ``attributes: self.layers.0: 12ab -> 34cd``."""
    lines = []
    for name in sorted(old.fields.keys() | new.fields.keys()):
        if old.fields.get(name) == new.fields.get(name):
            continue
        a, b = old.details.get(name, {}), new.details.get(name, {})
        if name == "package" and a and old.details.get(_FILES, {}) != new.details.get(_FILES, {}):
            a, b = old.details.get(_FILES, {}), new.details.get(_FILES, {})
        items = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
        if len(items) > 1:  # the other items say the same line by line
            items = [k for k in items if k != "text"]
        shown = [_changed(k, a.get(k), b.get(k), limit) for k in items[:limit]]
        more = f" and {len(items) - limit} more" if len(items) > limit else ""
        lines.append(f"{name} ({'; '.join(shown)}{more})" if shown else name)
    return lines


def package_digest() -> str:
    """Digest of every .py and .yaml file of this package: rules, contracts, passes, the engine."""
    return _digest(file_digests())[:16]


def file_digests() -> dict[str, str]:
    """A short digest of each .py and .yaml file of this package, by ``package/path``."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in sorted(_package_files())}


def versions(packages: Collection[str] | None = None) -> dict[str, str]:
    """Versions of what a stored compilation depends on; of `packages` (all, if None) those that graphs are made of."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    for name in ("torch_npu", "transformers"):
        if name in sys.modules and (packages is None or name != "transformers" or name in packages):
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torchair"] = importlib.metadata.version("torchair")  # apart from the one inside torch_npu
    if "torch_npu" in sys.modules:
        utils = importlib.import_module("torch_npu.npu.utils")
        found["cann"] = str(utils.get_cann_version())
    return found


def _packages(classes: Iterable[type]) -> set[str]:
    return {top_package(c) for c in own_classes(classes)}


def _environment() -> dict[str, str]:
    """Variables that torchair and GE read while they lower a graph; folders count by name only."""
    return {name: constant_text(os.environ[name]) or "" for name in _VARIABLES if os.environ.get(name)}


def _changed(item: str, old: str | None, new: str | None, limit: int) -> str:
    """``item: old -> new``; of the attributes of a module, those that differ."""
    if old is not None and new is not None and "; " in old and "; " in new:
        a, b = (dict(part.partition("=")[::2] for part in text.split("; ")) for text in (old, new))
        names = [n for n in sorted(a.keys() | b.keys()) if a.get(n) != b.get(n)]
        more = f" and {len(names) - limit} more of it" if len(names) > limit else ""
        return "; ".join(f"{item}{n}: {_both(a.get(n), b.get(n))}" for n in names[:limit]) + more
    return f"{item}: {_both(old, new)}"


def _both(old: str | None, new: str | None) -> str:
    """``old -> new``, each cut where it is long; what differs behind the cut is told by digests."""
    texts = ["absent" if t is None else t if len(t) <= 60 else f"{t[:57]}…" for t in (old, new)]
    if texts[0] == texts[1]:
        texts = [f"{t[:40]}… {digest(full or '')[:8]}" for t, full in zip(texts, (old, new), strict=True)]
    return " -> ".join(texts)


def _digest(items: Items) -> str:
    return hashlib.sha256("\n".join(f"{k}={v}" for k, v in sorted(items.items())).encode()).hexdigest()


def _attributes(describer: Describer, modules: Mapping[str, torch.nn.Module]) -> tuple[dict[str, str], dict[str, str]]:
    """Plain attributes, one text per module below the first, and the entries of configs (met once each) in full."""
    attributes: dict[str, str] = {}
    config: dict[str, str] = {}
    root = modules[""]
    for name, module in modules.items():
        path = f"self.{name}" if name else "self"
        lines = []
        for item, text in describer.module_items(module, path):
            if item.startswith(f"{path}.config"):
                config[item] = text
            elif module is root:
                attributes[item] = text
            else:
                lines.append(f"{item[len(path) :]}={text}")
        short = "; ".join(lines)
        if lines:
            attributes[path] = short if len(short) <= 160 else _by_name(lines)
    attributes |= describer.items(_hooks_of_all(), "hooks of all modules")
    return attributes, config


def _hooks_of_all() -> list[Any]:
    """Hooks that torch runs for every module."""
    torch_module = torch.nn.modules.module
    return [*torch_module._global_forward_pre_hooks.values(), *torch_module._global_forward_hooks.values()]


def _by_name(lines: Sequence[str]) -> str:
    """``.scale=0.1; ._plan=1a2b3c4d5e6f7a8b; …``: attributes with more to them as digests."""
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(line[:1] + _END.split(line[1:], maxsplit=1)[0], []).append(line)
    return "; ".join(
        of[0] if len(of) == 1 and len(of[0]) <= 60 else f"{name}={digest(chr(10).join(of))}"
        for name, of in found.items()
    )


def _weights(model: torch.nn.Module, read_grad: bool) -> dict[str, str]:
    """Layouts and ties; ``read_grad``: the code looks at ``requires_grad``."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, t in named:
            tie = first.setdefault(id(t), name)
            trained = " requires grad" if t.requires_grad and read_grad else ""
            found[name] = f"{kind} {tensor_item(t)}{trained}" + (f" tied to {tie}" if tie != name else "")
    return found


def _walk(model: torch.nn.Module, method: str, describer: Describer) -> CodeWalk:
    """The code that can run."""
    walk = CodeWalk(describer.classes, described)
    walk.environment.note(list(describer.strings))
    walk.add(getattr(model, method))
    walk.add_name(method)
    walk.add_name("forward")
    for f in describer.functions:
        walk.add(f)
    for name, f, replaces in _patched({type(m) for m in model.modules()}):
        if replaces or walk.reads(f.__name__) or walk.reads(name.rpartition(".")[2]):
            walk.add_patched(name, f)
    walk.add_modules(own_classes(type(m) for m in model.modules()))
    return walk


def _patched(kinds: Iterable[type]) -> Iterator[tuple[str, types.FunctionType, bool]]:
    """(name, function, whether torch has something of that name) of functions put into torch.

    What is put into a class of torch's under a name that its file does not have is run by nobody who does not name it.
    (transformers adds a method to ``nn.Module`` with the first model that it initialises.)
    """
    of_torch = {base for kind in kinds for base in kind.__mro__ if is_stable(base)}
    holders: tuple[Any, ...] = (torch, torch.nn.functional, torch.Tensor, *sorted(of_torch, key=str))
    for holder in holders:
        for name, f in list(vars(holder).items()):
            if isinstance(f, types.FunctionType) and not is_stable(f):
                known = _names(holder.__module__) if holder in of_torch else None
                yield f"{holder.__name__}.{name}", f, known is None or name in known


@functools.cache
def _names(module: str) -> frozenset[str] | None:
    """The names that the source of a module defines or assigns; None where there is no source."""
    try:
        source = inspect.getsource(sys.modules[module])
        return frozenset(re.findall(r"(?:\bdef |^ *)(\w+)(?= *[(:=])", source, re.MULTILINE))
    except (KeyError, OSError, TypeError):
        return None


def _renamed() -> str:
    """Which of torch's functions stand under the name of another one."""
    holders: tuple[Any, ...] = (torch, torch.nn.functional, torch.Tensor)
    found = [
        f"{holder.__name__}.{name}={f.__name__}"
        for holder in holders
        for name, f in sorted(vars(holder).items())
        if isinstance(f, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType))
        and f.__name__ != name
    ]
    return digest("\n".join(found))


def described(value: Any) -> tuple[str, list[Any]]:
    """An object that code holds, as a digest of all that is reachable from it, and the code in it."""
    describer = Describer()
    text = digest("\n".join(f"{path}={text}" for path, text in describer.items(value, "")))
    return text, [*describer.classes, *describer.functions]


def object_text(value: Any) -> str:
    """An object as a digest of all that is reachable from it."""
    return described(value)[0]


def _package_files() -> Iterator[tuple[str, Path]]:
    for package in ("cannopy", *(f"cannopy.{p}" for p in _PACKAGES)):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec is not None else []:
            for path in Path(root).rglob("*"):
                if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts:
                    yield f"{package}/{path.relative_to(root).as_posix()}", path


def _target(options: BuildOptions, chip: Any, weights: bool) -> dict[str, str]:
    """The chip; a host lowers for the one that is chosen. Of what has no weights yet, only torchair's can be run."""
    npu: Any = getattr(torch, "npu", None)
    found = {"device": str(npu.get_device_name()) if chip is None else chip.device_name}
    return found if options.engine == "torchair" else {**found, "weights": "there" if weights else "not there"}


def _chip(options: BuildOptions) -> Any:
    """The target of a host, as torch_npu and torchair see it while they lower; None where there is a device."""
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return None
    return importlib.import_module("cannopy.backend.host.target").resolve(options.target)


def _own_rank(model: torch.nn.Module, walk: CodeWalk, describer: Describer) -> bool:
    """Whether the graph may depend on the rank or hold collectives; False only where nothing leads there."""
    if walk.distributed or any(map(of_distributed, describer.classes)):
        return True
    tensors = itertools.chain(model.parameters(), model.buffers())
    return walk.distributed_if_sharded and (bool(describer.functions) or any(of_distributed(type(t)) for t in tensors))


def _topology(own_rank: bool) -> dict[str, str]:
    """The world; the rank only where the graph may depend on it, so that ranks with equal graphs share an entry."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return {"world": "1"}
    rank = {"rank": str(dist.get_rank())} if own_rank else {}
    return {"world": str(dist.get_world_size()), "backend": str(dist.get_backend()), **rank}


def _place(layout: Layout) -> dict[str, str]:
    """The layout and the rank, wherever the graph is built: in the world itself, or offline for it."""
    return {"layout": str(layout.parallel), "rank": str(layout.rank)}


def _torch_state() -> dict[str, str]:
    """Process-wide switches of torch that change what is captured or lowered."""
    sdp = torch.backends.cuda  # these switches are for every device
    devices = ("cpu", "npu") if hasattr(torch, "npu") else ("cpu",)
    state = {
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "functions": _renamed(),
        "default device": str(torch.get_default_device()),
        "autocast": str([(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)]),
        "attention kernels": str([n for n in ("flash", "mem_efficient", "math") if getattr(sdp, f"{n}_sdp_enabled")()]),
    }
    npu = getattr(torch, "npu", None)
    if npu is not None:
        state["hf32"] = str(npu.matmul.allow_hf32)
        state["npu deterministic level"] = str(npu._get_deterministic_level())
    return state
