"""From a final `Program`, or from the compile cache, to a `CompiledModel`.

`lookup` first: on a hit it gives the compiled model without capturing anything, in a process that never runs Dynamo.
Otherwise capture, run the passes, and call `build` with the same `Lookup`; it compiles and publishes the entry.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from cannopy.backend import torchair
from cannopy.backend.artifact import Artifact, Fingerprint
from cannopy.backend.cache import store
from cannopy.backend.cache.key import call_form, fingerprint
from cannopy.backend.cache.manifest import SOURCE, TORCHAIR, CorruptError, NotCacheableError
from cannopy.backend.cache.manifest import artifact as read_artifact
from cannopy.backend.emit import constant, emit
from cannopy.backend.options import BuildOptions
from cannopy.backend.runtime import CompiledModel, ExecutorFactory, GeneratedModule, MakeOutput, eager_executor
from cannopy.backend.weights import FormatCast, WeightValueError
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program

logger = logging.getLogger("cannopy.backend")
_NZ = 29
"""FRACTAL_NZ in CANN's format enumeration."""


class CacheWarning(UserWarning):
    """The compile cache could not be used; the compilation itself is good."""


@dataclass(frozen=True)
class Lookup:
    """What the cache had for a call. ``compiled`` is set on a hit; ``path`` is None when there is no cache to use."""

    fingerprint: Fingerprint
    status: Literal["hit", "miss", "rebuilt"]
    reason: str
    path: Path | None = None
    compiled: CompiledModel | None = None

    def report(self) -> dict[str, str]:
        """The ``cache`` part of a compile report."""
        return {"status": self.status, "key": self.fingerprint.key, "reason": self.reason}


def lookup(
    model: torch.nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: BuildOptions,
    make_output: MakeOutput,
) -> Lookup:
    """The compiled ``model.method`` for calls like this one, if the cache has it.

    ``make_output(spec)`` gives ``(tensors, module, args, kwargs) -> result`` (`cannopy.frontend.outputs.builder`).
    An entry that is corrupt, that torchair refuses, or that relies on a property that the weights do not have, is
    renamed away and reported as ``rebuilt``.
    Raises `store.CacheFolderError` for a folder that others can write.
    """
    identity = fingerprint(model, method, args, kwargs, options)
    if not options.use_cache:
        return Lookup(identity, "miss", "the cache is switched off")
    try:
        root = store.resolve_dir(options.cache_dir)
    except store.CacheFolderError:
        raise
    except OSError as e:
        return Lookup(identity, "miss", _uncached(e, options.cache_dir))
    name = type(model).__name__
    found = store.find(root, name, identity)
    if found.status == "miss":
        return Lookup(identity, "miss", found.reason, found.path)
    reason = found.reason
    if found.content is not None:
        try:
            compiled = _load(found.path, found.content, model, options, make_output)
        except (torchair.LoadError, CorruptError, WeightValueError) as e:
            reason = str(e)
        else:
            hit = Lookup(identity, "hit", "", found.path, compiled)
            compiled.report["cache"] = hit.report()
            return hit
    store.set_aside(found.path, reason, found.inode)
    return Lookup(identity, "rebuilt", reason, found.path)


def build(
    program: Program,
    model: torch.nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: BuildOptions,
    found: Lookup,
    report: Mapping[str, Any],
    make_output: MakeOutput,
) -> CompiledModel:
    """Compile `program`, the final graph of ``model.method(*args, **kwargs)``, and publish it.

    The graph runs once on the example call with copies of what it writes: nothing of the user's changes. ``report``
    (JSON-ready) is stored with the entry, with ``ge_ops``, ``kernels``, ``cache_copies`` and ``cache`` added. Where
    weights or inputs are on the meta device nothing is run. Raises `emit.EmitError`, `torchair.CompileError`,
    `guards.GuardError`; the cache is then as it was.
    """
    artifact = make_artifact(program, model, method, args, kwargs, found.fingerprint, report)
    generated = GeneratedModule(artifact, _filename(found.path, artifact))
    work = torchair.WorkFolder()
    factory = _factory(options, work)
    compiled = CompiledModel(artifact, model, generated, factory, make_output, _nz_cast())
    bound_args, bound_kwargs = tuple(args), dict(kwargs)
    log: list[str] = []
    if isinstance(factory, torchair.TorchairFactory):
        with torch.no_grad():
            factory.compile(generated, compiled.trial(bound_args, bound_kwargs))
        log = factory.log
    executor = compiled.executor()
    if isinstance(executor, torchair.Loaded):
        artifact = replace(artifact, report=dict(artifact.report) | executor.counts())
    compiled.artifact = artifact
    reason = found.reason
    if options.use_cache and found.path is not None:
        files = work.files() if isinstance(factory, torchair.TorchairFactory) else {}
        reason = _publish(artifact, files, log, found.path.parent) or reason
    compiled.report = dict(artifact.report) | {"cache": replace(found, reason=reason).report()}
    return compiled


def make_artifact(
    program: Program,
    model: torch.nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    fingerprint: Fingerprint,
    report: Mapping[str, Any],
) -> Artifact:
    """Everything about `program` that later runs need, without the user's objects."""
    name = type(model).__name__
    if any(p.is_meta for p in model.parameters()):
        _make_on_meta(program.gm.graph)
    emitted = emit(program, name, method, fingerprint.key)
    placeholders = {n.name for n in program.gm.graph.nodes if n.op == "placeholder"}
    used = placeholders | {n for w in program.weights for n in w.sources}
    inputs = tuple(s for s in program.inputs if s.name in used)
    devices = {s.name: compile_path(s.source)(model, args, kwargs).device.type for s in inputs}
    constants = dict(program.facts.get("constants", {}))
    constants.setdefault("self.training", model.training)
    return Artifact(
        fingerprint=fingerprint,
        model_class=name,
        method=method,
        form=call_form(args, kwargs),
        module=emitted,
        inputs=inputs,
        devices=devices,
        output=program.output,
        weights=tuple(program.weights),
        constants=constants,
        tensors={
            a.placeholder: constant(program.gm, a.placeholder) for a in emitted.attributes if a.kind == "constant"
        },
        report=dict(report),
    )


def _make_on_meta(graph: fx.Graph) -> None:
    """Tensors that the graph makes are on the meta device as well: it was captured as if the model were on the CPU."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not node.all_input_nodes:
            if any(a.name == "device" for a in node.target._schema.arguments):
                node.kwargs = {**node.kwargs, "device": torch.device("meta")}
        elif "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("meta")}


def _load(
    path: Path, content: store.Content, model: torch.nn.Module, options: BuildOptions, make_output: MakeOutput
) -> CompiledModel:
    files = content.files
    artifact = read_artifact(content.body, lambda name: files[name])
    work = torchair.WorkFolder()
    for name, data in files.items():
        if name.startswith(f"{TORCHAIR}/"):
            store.write_private(work.path / name.removeprefix(f"{TORCHAIR}/"), data)
    generated = GeneratedModule(artifact, str(path / SOURCE))
    compiled = CompiledModel(artifact, model, generated, _factory(options, work), make_output, _nz_cast())
    compiled.executor()
    return compiled


def _factory(options: BuildOptions, work: torchair.WorkFolder) -> ExecutorFactory:
    return eager_executor if options.engine == "eager" else torchair.TorchairFactory(options, work)


def _filename(path: Path | None, artifact: Artifact) -> str:
    folder = str(path) if path is not None else f"<cannopy {artifact.module.digest[:16]}>"
    return f"{folder}/{SOURCE}"


def _publish(artifact: Artifact, files: Mapping[str, Path], log: list[str], root: Path) -> str:
    """Why the entry was not written; "" when it was."""
    try:
        store.publish(artifact, files, log, root)
    except NotCacheableError as e:
        warnings.warn(str(e), CacheWarning, stacklevel=3)
        return str(e)
    except OSError as e:
        return _uncached(e, root)
    return ""


def _uncached(error: OSError, folder: object) -> str:
    text = f"compile cache {folder or store.default_cache_dir()} not written ({error}); running uncached"
    warnings.warn(text, CacheWarning, stacklevel=4)
    return text


def _nz_cast() -> FormatCast | None:
    """The cast to FRACTAL_NZ on a device; a host has no such format."""
    if not torchair.have_npu():
        return None
    import torch_npu

    def cast(t: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch_npu.npu_format_cast(t, _NZ)
        return result

    return cast
