"""From a final `Program`, or from the compile cache, to a `CompiledModel`.

`lookup` first: on a hit it gives the compiled model without capturing anything, in a process that never runs Dynamo.
Otherwise capture, run the passes, and call `build` with the same `Lookup`; it compiles and publishes the entry.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from cannopy.backend import torchair
from cannopy.backend.artifact import Artifact, Fingerprint
from cannopy.backend.cache import agree, alike, folder, store
from cannopy.backend.cache.claim import Claim, find_or_claim
from cannopy.backend.cache.key import call_form, fingerprint
from cannopy.backend.cache.lock import BuildLock
from cannopy.backend.cache.manifest import MANIFEST, SOURCE, TORCHAIR, CorruptError, NotCacheableError
from cannopy.backend.cache.manifest import artifact as read_artifact
from cannopy.backend.cache.publish import publish
from cannopy.backend.cache.store import Found
from cannopy.backend.emit import constant, emit
from cannopy.backend.ge_graph import plan_check, provenance
from cannopy.backend.options import BuildOptions
from cannopy.backend.runtime import CompiledModel, ExecutorFactory, GeneratedModule, MakeOutput, eager_executor
from cannopy.backend.weights.binder import WeightValueError
from cannopy.backend.weights.devices import nz_cast, on_meta, placed
from cannopy.backend.weights.kept import KeptWeights
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler import emission

logger = logging.getLogger("cannopy.backend")


class CacheWarning(UserWarning):
    """The compile cache could not be used; the compilation itself is good."""


@dataclass(frozen=True)
class Lookup:
    """What the cache had for a call. ``compiled`` is set on a hit; ``path`` is None when there is no cache to use.

    On a miss it is the right to build the entry: compile inside ``with found:``, so that processes and ranks that wait
    for this one learn how it ended (`agree.RankError` when another rank failed).
    """

    fingerprint: Fingerprint
    status: Literal["hit", "miss", "rebuilt"]
    reason: str
    path: Path | None = None
    compiled: CompiledModel | None = None
    lock: BuildLock | None = None
    peers: agree.Peers | None = None

    def report(self) -> dict[str, str]:
        """The ``cache`` part of a compile report."""
        return {"status": self.status, "key": self.fingerprint.key, "reason": self.reason}

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        failure = "" if kind is None else f"{kind.__name__}: {error}"
        if self.lock is not None:
            self.lock.release(failure)
        if self.peers is None:
            return
        if failure:
            self.peers.fail(failure)
        else:
            self.peers.exchange(agree.ENDED, "ready")


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
    renamed away and reported as ``rebuilt``. While another process builds the entry this one waits; ranks of
    torch.distributed look together, those of a layout without the cache, too: what they build must be alike.
    Raises `folder.CacheFolderError` for a folder that others can write, `agree.RankError`.
    """
    start = time.perf_counter()
    identity = fingerprint(model, method, args, kwargs, options)
    search = _Search(identity, model, options, make_output, time.perf_counter() - start)
    phase = identity.details["options"].get("phase", "")
    what = f"{type(model).__name__}.{method}" + (f" ({phase})" if phase else "")
    alone = not options.use_cache and options.layout is None
    peers = None if alone else agree.peers(what, options.ranks, options.cache_timeout)
    if peers is None:
        return search.run(claim=True)
    try:
        return _together(search, peers)
    except BaseException as e:
        peers.fail(f"{type(e).__name__}: {e}")
        raise


def _together(search: _Search, peers: agree.Peers) -> Lookup:
    """A look-up of all ranks: they go on together, and all know why when one has to build.

    A graph that may hold collectives is built by all ranks at once, those that have it too: its first run needs them.
    """
    mine = search.run(claim=False)
    identity = search.identity
    words = peers.exchange(
        agree.LOOKED, mine.status, key=identity.key, reason=mine.reason,
        own_graph="rank" in identity.details["topology"],
        versions={**identity.details["versions"], "cannopy": identity.fields["package"][:16]},
        alike={} if search.options.layout is None else alike.digests(identity),
    )
    alike.check(peers, words, identity)
    for line in agree.different_versions(words):
        warnings.warn(f"ranks that compile {peers.what} differ: {line}", CacheWarning, stacklevel=4)
    missing = [r for r, w in words.items() if w.status != "hit"]
    if not missing:
        return mine
    if any(w.own_graph for w in words.values()):
        if mine.compiled is None:
            return replace(mine, peers=peers)
        reason = f"{agree.ranks_text(missing)} had no entry ({words[missing[0]].reason}); all ranks build together"
        return Lookup(identity, "miss", reason, mine.path, peers=peers)
    if mine.compiled is None:
        again = search.run(claim=True)
        mine = replace(again, status=mine.status, reason=mine.reason) if again.status == "miss" else again
    if mine.compiled is None:
        return replace(mine, peers=peers)
    peers.exchange(agree.ENDED, "ready")
    return mine


@dataclass(frozen=True)
class _Search:
    """A look-up in the cache folder, which finds nothing where the cache is switched off."""

    identity: Fingerprint
    model: torch.nn.Module
    options: BuildOptions
    make_output: MakeOutput
    key_seconds: float

    def run(self, claim: bool) -> Lookup:
        """The entry, or (``claim``) the right to build it, after waiting for a process that builds it."""
        if not self.options.use_cache:
            return Lookup(self.identity, "miss", "the cache is switched off")
        try:
            root = folder.resolve_dir(self.options.cache_dir)
        except folder.CacheFolderError:
            raise
        except OSError as e:
            return Lookup(self.identity, "miss", _uncached(e, self.options.cache_dir))
        reasons: list[str] = []
        got = Claim(Found("miss", root, ""))
        for _ in range(3):  # what torchair refuses is set aside, and another process may have built it again
            start = time.perf_counter()
            try:
                got = self._look(root, claim)
            except OSError as e:
                return Lookup(self.identity, "miss", _uncached(e, root))
            found = got.found
            if found.content is None:
                break
            read = time.perf_counter() - start
            try:
                compiled = _load(found.path, found.content, self.model, self.options, self.make_output)
            except (torchair.LoadError, CorruptError, WeightValueError) as e:
                reasons.append(str(e))
                if found.use is not None:
                    found.use.close()
                store.set_aside(found.path, str(e), found.inode)
                continue
            if found.use is not None:
                found.use.until_gone(compiled)
            hit = Lookup(self.identity, "hit", "", found.path, compiled)
            compiled.report["cache"] = hit.report()
            compiled.seconds = {"key": self.key_seconds, "read": read, **compiled.seconds}
            return hit
        if got.found.status == "corrupt":
            reasons.append(got.found.reason)
            store.set_aside(got.found.path, got.found.reason, got.found.inode)
        reason = "; ".join(filter(None, [reasons[0] if reasons else got.found.reason, got.note]))
        return Lookup(self.identity, "rebuilt" if reasons else "miss", reason, got.found.path, lock=got.lock)

    def _look(self, root: Path, claim: bool) -> Claim:
        name = type(self.model).__name__
        if claim:
            return find_or_claim(root, name, self.identity, self.options.cache_timeout)
        return Claim(store.find(root, name, self.identity))


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
    store = _store(options, artifact, found.path)
    compiled = CompiledModel(artifact, model, generated, factory, make_output, nz_cast(), store=store)
    bound_args, bound_kwargs = tuple(args), dict(kwargs)
    log: list[str] = []
    if isinstance(factory, torchair.TorchairFactory):
        with torch.no_grad():
            factory.compile(generated, on_meta(generated, compiled.trial(bound_args, bound_kwargs)))
        log = factory.log
    executor = compiled.executor()
    if isinstance(executor, torchair.Loaded):
        if isinstance(factory, torchair.TorchairFactory):
            _check_plan(executor.ge_graph, program, artifact.module.source, factory.lines)
        artifact = replace(artifact, report=dict(artifact.report) | executor.counts())
    compiled.artifact = artifact
    reason = found.reason
    if options.use_cache and found.path is not None:
        files = work.files() if isinstance(factory, torchair.TorchairFactory) else {}
        failure = _publish(compiled, files, log, found.path.parent)
        reason = failure or reason
        if not failure:
            _keep(compiled)
        if found.lock is not None:
            found.lock.release(failure)
    compiled.report = dict(artifact.report) | {"cache": replace(found, reason=reason).report()}
    return compiled


def _check_plan(ge_graph: Any, program: Program, source: str, lines: Mapping[str, int]) -> None:
    """`torchair.PlanLostError` when the lowered graph does not carry the plan that was written into ``program``."""
    plan = program.facts.get(emission.PLAN)
    if plan is None:
        return
    calls = provenance.statements(source, program.gm.graph)
    wrong = plan_check.check(ge_graph, program, plan, {op: calls[line] for op, line in lines.items()})
    if wrong:
        raise torchair.PlanLostError("torchair lowered the graph without its plan:\n  " + "\n  ".join(wrong[:5])
                                     + "\nschedule{streams=forbid,...} or a pipeline without the stage leaves it out")


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
    try:
        artifact = placed(read_artifact(content.body, lambda name: files[name]), model)
    except (KeyError, TypeError, AttributeError, IndexError) as e:  # its digest is right, something else wrote it
        raise CorruptError(f"{MANIFEST} does not describe a compilation ({e!r})") from e
    work = torchair.WorkFolder()
    for name, data in files.items():
        if name.startswith(f"{TORCHAIR}/"):
            _write_work(work.path / name.removeprefix(f"{TORCHAIR}/"), data)
    generated = GeneratedModule(artifact, str(path / SOURCE))
    store = _store(options, artifact, path)
    compiled = CompiledModel(artifact, model, generated, _factory(options, work), make_output, nz_cast(), store=store)
    start = time.perf_counter()
    compiled.executor()
    compiled.seconds["torchair"] = time.perf_counter() - start
    _keep(compiled)
    return compiled


def _store(options: BuildOptions, artifact: Artifact, path: Path | None) -> KeptWeights | None:
    """Where results of the weight plan are kept beside the entry at ``path``."""
    return KeptWeights(artifact, path) if options.keep_weights and options.use_cache and path is not None else None


def _keep(compiled: CompiledModel) -> None:
    try:
        compiled.keep_weights()
    except OSError as e:
        warnings.warn(f"derived weights are not kept ({e}); the next start derives them again", CacheWarning,
                      stacklevel=5)


def _write_work(path: Path, data: bytes) -> None:
    try:
        folder.write_private(path, data)
    except OSError as e:
        raise torchair.WorkFolderError(
            f"the temporary folder {tempfile.gettempdir()} cannot be written ({e}); make room there or set TMPDIR"
        ) from e


def _factory(options: BuildOptions, work: torchair.WorkFolder) -> ExecutorFactory:
    return eager_executor if options.engine == "eager" else torchair.TorchairFactory(options, work)


def _filename(path: Path | None, artifact: Artifact) -> str:
    folder = str(path) if path is not None else f"<cannopy {artifact.module.digest[:16]}>"
    return f"{folder}/{SOURCE}"


def _publish(compiled: CompiledModel, files: Mapping[str, Path], log: list[str], root: Path) -> str:
    """Why the entry was not written; "" when it was. Its use lasts as long as `compiled`."""
    try:
        use = publish(compiled.artifact, files, log, root)
    except NotCacheableError as e:
        warnings.warn(str(e), CacheWarning, stacklevel=3)
        return str(e)
    except OSError as e:
        return _uncached(e, root)
    if use is not None:
        use.until_gone(compiled)
    return ""


def _uncached(error: OSError, where: object) -> str:
    place = where or "in ~/.cache"
    text = f"compile cache {place} not usable ({error}); running uncached"
    warnings.warn(text, CacheWarning, stacklevel=4)
    return text
