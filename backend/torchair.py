"""Compiling the generated method with ``torchair.inference.cache_compile`` and loading what it stored.

torchair only ever works in a private folder. It deletes that folder on any error while loading, writes the cache
file in place and pastes the folder's path into generated code, so it is never shown a published entry; the compile
cache copies verified bytes in and out (`cannopy.backend.cache`).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import linecache
import re
import shutil
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from cannopy.backend import hccl_groups, process_groups
from cannopy.backend.cache.agree import RankError
from cannopy.backend.ge_graph import provenance, summary
from cannopy.backend.options import BuildOptions
from cannopy.backend.quiet import quiet
from cannopy.backend.runtime import GeneratedModule, Tensors

STORED = "compiled_module"
_LOCK = threading.RLock()
_SAFE_PATH = re.compile(r"[\w./+@=,:-]+", re.ASCII)


class CompileError(RuntimeError):
    """torchair did not compile or did not store the generated method; the cache is as it was."""


class PlanLostError(CompileError):
    """The lowered graph does not carry the plan that was written into the program."""


class LoadError(RuntimeError):
    """torchair rejected a stored compilation."""


class WorkFolderError(OSError):
    """The folder for temporary files cannot be written, so nothing can be compiled or loaded."""


def have_npu() -> bool:
    """Whether a real device is there; then nothing of the host engine is used."""
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


class _NotRunError(Exception):
    """Stands in for the run of a graph that was only to be compiled."""


class WorkFolder:
    """A private folder for torchair, removed with the object. Its path has no character that needs quoting."""

    def __init__(self) -> None:
        try:
            base = tempfile.gettempdir()
            if not _SAFE_PATH.fullmatch(base):
                base = "/tmp"
            self.path = Path(tempfile.mkdtemp(prefix="cannopy-", dir=base))
        except OSError as e:
            raise WorkFolderError(f"no folder for temporary files ({e}); make room in it or set TMPDIR") from e
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, True)

    def files(self) -> dict[str, Path]:
        """Every file below, by its path relative to the folder."""
        return {str(p.relative_to(self.path)): p for p in sorted(self.path.rglob("*")) if p.is_file()}


def compiler_config(settings: Mapping[str, Any]) -> Any:
    """torchair's CompilerConfig with `settings` by dotted name; ValueError names an unknown one and the nearest."""
    config = _torchair().CompilerConfig()
    # It makes one AsStrided of a chain of views by the strides of fake values. Those of an npu op's result are copied
    # from its operand, while the op itself writes contiguous memory: permuted operand, permuted result, wrong elements.
    config.experimental_config.enable_view_optimize = False
    for name, value in settings.items():
        *parents, last = name.split(".")
        owner = config
        for part in [*parents, last]:
            known = owner._fixed_attrs
            if part not in known:
                near = difflib.get_close_matches(part, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"torchair has no compiler option {name} (no {part}){hint}")
            if part is not last:
                owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


class Loaded:
    """A stored compilation, ready to run. ``ge_graph`` is the lowered graph (protobuf GraphDef).

    The generated code finishes and loads the GE graph at its first run, so that run is made inside ``first``.
    """

    def __init__(
        self,
        generated: GeneratedModule,
        method: Callable[..., Tensors],
        ge_module: types.ModuleType,
        first: Callable[[], contextlib.AbstractContextManager[None]] | None,
    ) -> None:
        self._generated = generated
        self._method = method
        self._first = first
        self.ge_graph: Any = ge_module.ge_graph

    def __call__(self, tensors: Tensors) -> Tensors:
        if self._first is None:
            return self._generated.call(self._method, tensors)
        with self._first():
            result = self._generated.call(self._method, tensors)
        self._first = None
        return result

    def counts(self) -> dict[str, Any]:
        """What the lowered graph is made of: ``ge_ops``, ``kernels`` and ``cache_copies`` of a compile report."""
        found = summary(self.ge_graph, {} if have_npu() else self._aliases())
        return {"ge_ops": found.ge_ops, "kernels": found.kernels, "cache_copies": found.cache_copies}

    def _aliases(self) -> Mapping[int, int]:
        """Graph output to the graph input that it overwrites, as the host engine saw it; {} before the first run."""
        engine = importlib.import_module("cannopy.backend.host.engine")
        graph = getattr(self.ge_graph, "_proto", self.ge_graph)
        found: Mapping[int, int] = next((g.aliases for g in engine.recorded() if g.ge_graph is graph), {})
        return found


class TorchairFactory:
    """Makes executors of a generated method by loading what torchair stored in `work`.

    `compile` fills `work`.
    """

    def __init__(self, options: BuildOptions, work: WorkFolder) -> None:
        self.options = options
        self.work = work
        self.log: list[str] = []
        self.lines: dict[str, int] = {}
        """{GE op: line of the generated file} of what was compiled last."""
        self._reuse: types.ModuleType | None = None

    def __call__(self, generated: GeneratedModule) -> Loaded:
        """Load from the work folder. Right after `compile` the graph that it made is used, not a second one."""
        reuse, self._reuse = self._reuse, None
        with self._torchair(), _generated_code(reuse) as modules:
            method = self._cache_compile(generated).compile(generated.module.__dict__)
        if not isinstance(method, types.FunctionType):
            raise LoadError(f"torchair did not load {generated.module.__file__}: {self._reason()}")
        return Loaded(generated, method, modules[-1], self._torchair if reuse is None else None)

    def compile(self, generated: GeneratedModule, tensors: Tensors) -> None:
        """Trace, lower and store the method, and run it once on `tensors`, which it changes. `CompileError`.

        The run is what makes GE compile and write its own cache. On meta tensors, and without the other ranks of a
        layout, nothing is run.
        """
        given = [*tensors, *generated.instance.parameters(), *generated.instance.buffers()]
        run = not (any(t.is_meta for t in given) or process_groups.is_fake())
        file = str(generated.module.__file__)
        with self._torchair(), _generated_code(None, run) as modules, provenance.recording(file) as self.lines:
            compiled = self._cache_compile(generated)
            try:
                generated.call(compiled, tensors)
            except _NotRunError:
                pass
            except RankError:
                raise
            except Exception as e:  # Dynamo, torchair's converters and GE each raise their own
                raise CompileError(self._failure(generated, e)) from e
        stored = [p for p in self.work.files() if Path(p).name == STORED]
        if len(stored) != 1 or not modules:
            raise CompileError(f"torchair stored {len(stored)} compilations instead of one: {self._reason()}")
        self._reuse = modules[-1] if run else None

    def _cache_compile(self, generated: GeneratedModule) -> Any:
        function = importlib.import_module("torchair.inference").cache_compile
        settings = {
            "config": compiler_config(self.options.compiler),
            "dynamic": False,
            "cache_dir": str(self.work.path),
            "ge_cache": True,
            "global_rank": 0,  # part of torchair's path: ranks that share an entry must look in one place
        }
        inner = importlib.import_module("torchair.inference._cache_compiler").cache_compile
        unknown = settings.keys() - inspect.signature(inner).parameters.keys()
        if unknown:  # both functions swallow unknown names
            raise CompileError(f"this torchair's cache_compile has no option {', '.join(sorted(unknown))}")
        return function(generated.method, **settings)

    @contextlib.contextmanager
    def _torchair(self) -> Iterator[None]:
        """torchair for the device, or for the target on the host engine; one compilation at a time in a process."""
        with _LOCK, contextlib.ExitStack() as stack:
            _torchair()
            if not have_npu():
                host = importlib.import_module("cannopy.backend.host.activate")
                host.activate()
                target = importlib.import_module("cannopy.backend.host.target")
                stack.enter_context(target.using(self.options.target))
                stack.enter_context(importlib.import_module("cannopy.backend.host.communicators").named())
            self.log = stack.enter_context(quiet("torchair"))
            _reset_scopes()
            try:
                yield
            finally:
                _reset_scopes()

    def _reason(self) -> str:
        return "; ".join(self.log[-5:]) or "it gave no reason"

    def _failure(self, generated: GeneratedModule, error: Exception) -> str:
        filename, text = str(generated.module.__file__), str(error)
        missing = re.search(r"torch\.ops\.([\w.]+) ge_converter is not implemented", text)
        if missing is not None:
            return (
                f"torchair has no converter for {missing[1]}, used by {_origin(filename, text)}; "
                "write that line with other operations"
            )
        said = f"\ntorchair said: {self._reason()}" if self.log else ""
        return f"compiling {filename} failed: {type(error).__name__}: {error}{said}"


def _origin(filename: str, text: str) -> str:
    """Module and source line of the call in the generated file that the traceback ``text`` names."""
    found = re.search(rf'File "{re.escape(filename)}", line (\d+)', text)
    lines = linecache.getlines(filename)[: int(found[1])] if found else []
    comments = [line.strip() for line in lines if line.lstrip().startswith("#")]
    return comments[-1].removeprefix("# ") if comments else filename


def _torchair() -> Any:
    lazy = importlib.import_module("torch_npu.dynamo.torchair")
    lazy.CompilerConfig  # noqa: B018 the import is lazy; this runs it
    return importlib.import_module("torchair")


def _reset_scopes() -> None:
    """torchair never clears its stack of scopes: after a failure in one the next graph would inherit it."""
    scope = importlib.import_module("torchair.scope._scope_attr")
    scope.local.scope_attr = scope.ScopeAttrs()


@contextlib.contextmanager
def _generated_code(reuse: types.ModuleType | None, run: bool = True) -> Iterator[list[types.ModuleType]]:
    """Collects the modules that torchair makes of its generated code; with `reuse` it gets that one again.

    A module holds one GE graph. Loading right after compiling would make a second one on the device. Without `run`
    the graph's function raises `_NotRunError`; torchair stores a compilation all the same when its run fails.
    """
    compiler: Any = importlib.import_module("torchair.npu_fx_compiler")
    original = compiler._compile_py_code
    modules: list[types.ModuleType] = []

    def not_run(*_: Any) -> None:
        raise _NotRunError

    def compile_code(text: str) -> types.ModuleType:
        module: types.ModuleType = original(text) if reuse is None else reuse
        if have_npu() and process_groups.started():
            hccl_groups.rebind(module.__dict__["ge_graph"])
        if not run:
            module.__dict__["kernel"] = not_run
        modules.append(module)
        return module

    compiler._compile_py_code = compile_code
    try:
        yield modules
    finally:
        compiler._compile_py_code = original
