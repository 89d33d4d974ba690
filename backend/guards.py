"""Checks before every run: the call must be the one that the graph was compiled for.

Neither a graph that torchair loads from its cache nor GE itself tests dtypes, and shapes are tested at the first run
only, so these checks stand in front of both.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch

from cannopy.backend.artifact import CallForm
from cannopy.fx_passes import calls
from cannopy.fx_passes.paths import PathLookupError, compile_path, parse_path
from cannopy.fx_passes.program import InputSpec

_MISSING = object()


class GuardError(ValueError):
    """The call differs from the compiled one; the message names what, the expected and the found value."""


def describe(value: object) -> str:
    """``torch.bfloat16[1, 96] stride (96, 1) on cpu`` for a tensor, otherwise type and value, shortened."""
    if isinstance(value, torch.Tensor):
        if not is_strided(value):
            return f"a {'nested' if value.is_nested else str(value.layout).removeprefix('torch.')} tensor"
        return tensor_text(value.dtype, value.shape, value.stride(), value.device)
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


def is_strided(value: torch.Tensor) -> bool:
    """Whether a tensor has one shape and strides: no sparse and no nested one."""
    return value.layout is torch.strided and not value.is_nested


def tensor_text(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], device: object) -> str:
    """One line about a tensor."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} stride {tuple(stride)} on {device}"


def same_layout(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether strides `a` and `b` address `shape` alike: dimensions of size 1 and empty tensors do not count."""
    return 0 in shape or all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True))


class CallBinder:
    """Brings a call into the spelling of the example call, through the signature of the eager method."""

    def __init__(self, method: Any, form: CallForm) -> None:
        self.signature = inspect.signature(method)
        self.form = form
        self._keywords = set(form.keywords)
        parameters = list(self.signature.parameters.values())
        self._positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._extra = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)

    def name(self, path: str) -> str:
        """How the user calls the argument at `path`: "`input_ids` (args[0])", or the path itself."""
        parsed = parse_path(path)
        if parsed.root == "args" and parsed.steps and isinstance(parsed.steps[0].key, int):
            i = parsed.steps[0].key
            if i < len(self._positional):
                tail = "".join(map(str, parsed.steps[1:]))
                return f"`{self._positional[i].name}{tail}` ({path})"
        return f"`{path}`"

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call spelt as the example was. TypeError as from Python, `GuardError` for an unknown argument."""
        if len(args) == self.form.positional and kwargs.keys() == self._keywords:
            return args, kwargs
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        rest = list(given.pop(self._rest)) if self._rest else []
        given.update(given.pop(self._extra) if self._extra else {})
        out_args: list[Any] = []
        for p in self._positional[: self.form.positional]:
            out_args.append(given.pop(p.name))
        out_args += rest[: self.form.positional - len(out_args)]
        out_kwargs = {}
        for k in self.form.keywords:
            if k not in given:
                raise GuardError(f"argument `{k}` was given when the method was compiled and is missing in this call")
            out_kwargs[k] = given.pop(k)
        if len(out_args) != self.form.positional or len(rest) > max(0, self.form.positional - len(self._positional)):
            raise GuardError(f"compiled for {self.form.positional} positional arguments, got {len(args)}")
        for k, v in given.items():
            self._must_be_default(k, v)
        return tuple(out_args), out_kwargs

    def _must_be_default(self, name: str, value: Any) -> None:
        p = self.signature.parameters.get(name)
        default = _MISSING if p is None else p.default
        if value is default or (
            not isinstance(value, torch.Tensor) and type(value) is type(default) and value == default
        ):
            return
        was = "it was not given" if p is None else f"its default {describe(default)} was used"
        raise GuardError(
            f"argument `{name}`: {was} when the method was compiled, found {describe(value)};"
            " compile again with this argument"
        )


class ConstantGuard:
    """The values that the graph is specialised on, by path."""

    def __init__(self, constants: Mapping[str, Any], binder: CallBinder) -> None:
        self._checks = [(path, compile_path(path), value) for path, value in constants.items()]
        self._binder = binder

    def check(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`GuardError` if a value differs (in type or by ==)."""
        for path, resolve, expected in self._checks:
            try:
                found = resolve(module, args, kwargs)
            except PathLookupError as e:
                raise GuardError(f"{self._binder.name(path)}: compiled for {describe(expected)}; {e}") from e
            if found is expected:
                continue
            if type(found) is not type(expected) or found != expected:
                raise GuardError(
                    f"{self._binder.name(path)}: the graph is compiled for {describe(expected)},"
                    f" found {describe(found)}; compile again for this value"
                )


class LeafGuard:
    """What was at each place of the arguments: the graph has no branch for a tensor that is missing or there twice."""

    def __init__(self, form: CallForm, binder: CallBinder) -> None:
        self._expected = dict(form.leaves)
        self._binder = binder

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`GuardError` names the first place with another kind of value."""
        found = calls.kinds(args, kwargs)
        if found == self._expected:
            return
        path = next(p for p in [*self._expected, *found] if self._expected.get(p) != found.get(p))
        raise GuardError(
            f"{self._binder.name(path)}: the graph is compiled for {self._expected.get(path, 'nothing')} there,"
            f" found {found.get(path, 'nothing')}; compile again for such calls"
        )


def check_tensor(value: object, spec: InputSpec, device: str, name: str) -> torch.Tensor:
    """`value` if it is the tensor that `spec` describes, on a device of type `device`; else `GuardError`."""
    if (
        isinstance(value, torch.Tensor)
        and is_strided(value)
        and value.dtype is spec.dtype
        and value.shape == spec.shape
        and value.device.type == device
        and (value.stride() == spec.stride or same_layout(spec.shape, value.stride(), spec.stride))
    ):
        return value
    expected = tensor_text(spec.dtype, spec.shape, spec.stride, device) + _of_rank(spec)
    raise GuardError(
        f"{name}: expected {expected}, found {describe(value)}; a compiled method runs for exactly one shape and type"
        " of each tensor: pass that, or compile again with this one as example input"
    )


def _of_rank(spec: InputSpec) -> str:
    """What is said of a cache of which this rank of a layout has a part."""
    if spec.held is None:
        return ""
    held = spec.held
    return (f", entries {held.start} to {held.stop - 1} of dimension {held.dim} of {list(held.whole(spec.shape))}, "
            "which this rank of the layout has of a cache for one die (`Compiled.of_rank` cuts the caches of a call)")


@overload
def laid_out(value: torch.Tensor, spec: InputSpec) -> torch.Tensor: ...
@overload
def laid_out(value: object, spec: InputSpec) -> object: ...


def laid_out(value: object, spec: InputSpec) -> object:
    """A tensor of the right shape and type in the strides that were compiled, copied if need be; else `value` itself.

    Only for tensors that the graph reads: token ids are often a slice of a longer tensor in one call and not in the
    next.
    """
    if not isinstance(value, torch.Tensor) or not is_strided(value):
        return value
    if value.shape != spec.shape or value.dtype is not spec.dtype:
        return value
    if value.stride() == spec.stride or same_layout(spec.shape, value.stride(), spec.stride):
        return value
    copy = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device)
    return copy.copy_(value.detach())


def of_one_die(value: object, spec: InputSpec, device: str, name: str) -> torch.Tensor:
    """A copy of what a rank has of ``value``, a tensor for one die, as `spec` describes it. `GuardError`."""
    assert spec.held is not None
    shape = spec.held.whole(spec.shape)
    if not isinstance(value, torch.Tensor) or not is_strided(value) or value.shape != shape:
        raise GuardError(f"{name}: expected a tensor {list(shape)} for one die, found {describe(value)}")
    part = spec.held.of(value)
    return check_tensor(laid_out(part, spec), spec, device, name)


def apply_view(value: torch.Tensor, spec: InputSpec, name: str) -> torch.Tensor:
    """The tensor that the graph sees: a view of the same storage, never a copy."""
    if spec.view is None:
        return value
    try:
        return value.view(spec.view)
    except RuntimeError as e:
        raise GuardError(
            f"{name}: {describe(value)} cannot be viewed as {list(spec.view)} without a copy, so the graph could not"
            " write into it; make it contiguous"
        ) from e
