"""Runs a loop over experts and what is to replace it side by side: small random weights, float64, every kind of choice.

The module that both see has the class and the plain attributes of the user's, but its own weights: expert MLPs of
`HIDDEN` features where their sizes can be changed, copies of the user's experts otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from . import expert_source
from .expert_math import Product, Routed, plain_product
from .expert_source import Loop, NotUnderstoodError

TOKENS, HIDDEN, INNER = 7, 8, 6
MOST_BYTES = 1 << 28
"""Copies of experts whose sizes are not understood are made up to this size, in float64."""
TOLERANCE = 1e-9
"""Largest difference relative to the largest result: summation order in float64 gives 1e-15."""


def check(module: nn.Module, loop: Loop, make: Callable[[str, Product | None], Routed]) -> str:
    """Which dtype the loop's result has, "hidden" or "weights".

    Raises:
        NotUnderstoodError: the two differ, or the loop does not run on its own.
    """
    original = expert_source.alone(loop)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.inference_mode(False):
        stub, hidden_size, experts = _stub(module, loop, generator)
        sizes = [{"one": 1, "tokens": TOKENS, "hidden": hidden_size}[kind] for _, kind in loop.sizes]
        hidden = torch.randn(TOKENS, hidden_size, generator=generator, dtype=torch.float64)
        for ids, weights in _choices(experts, generator):
            try:
                wanted = _run(original, stub, hidden, ids, weights, *sizes)
            except NotUnderstoodError:
                if ids.shape[1] == 1 < experts:  # some loops do not run with one expert per token (LongCat)
                    continue
                raise
            for product in (None, plain_product):
                found = _run(make("hidden", product), stub, hidden, ids, weights)
                _compare(found, wanted)
        ids, weights = next(_choices(experts, generator))
        try:
            mixed = original(_single(stub), hidden.float(), ids, weights, *sizes)
        except RuntimeError:  # the loop adds without a cast: hidden states and weights have one dtype in its model
            return "hidden"
        return "hidden" if mixed.dtype == torch.float32 else "weights"


def _run(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    try:
        return function(*args)
    except Exception as e:  # the user's code, on inputs that it was not written for
        raise NotUnderstoodError(f"it does not run on inputs of small size: {type(e).__name__}: {e}") from e


def _compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if found.shape != wanted.shape:
        raise NotUnderstoodError(f"it gives {list(wanted.shape)}, the equal form {list(found.shape)}")
    error = float((found - wanted).abs().max())
    if not error <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise NotUnderstoodError(f"it is not Σ weight · expert(token): results differ by {error:.1e}")


def _choices(experts: int, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, weights) [T, K]: random, one expert for all, the last for all, one twice, each token its own."""
    top_k = min(3, experts)
    shape = TOKENS, top_k

    def weights() -> torch.Tensor:
        found = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[0] = 0
        return found

    yield torch.rand(TOKENS, experts, generator=generator).topk(top_k)[1], weights()
    yield torch.zeros(shape, dtype=torch.int64), weights()
    yield torch.full(shape, experts - 1), weights()
    yield torch.randint(0, experts, (TOKENS, 1), generator=generator).expand(shape), weights()
    yield torch.randint(0, experts, shape, generator=generator), weights()
    yield torch.randint(0, experts, (TOKENS, 1), generator=generator), weights()[:, :1]


def _stub(module: nn.Module, loop: Loop, generator: torch.Generator) -> tuple[nn.Module, int, int]:
    """(the module for the check, its hidden size, how many experts can be chosen)."""
    stub: nn.Module = object.__new__(type(module))
    stub.__dict__.update(module.__dict__)
    stub.__dict__["_modules"] = dict(module._modules)
    stub.__dict__["_parameters"] = dict(module._parameters)
    gate_up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if gate_up is not None and down is not None:
        _resize(stub, {gate_up.shape[2]: HIDDEN, down.shape[2]: INNER, gate_up.shape[1]: 2 * INNER}, gate_up.shape[0])
        stub._parameters["gate_up_proj"] = _weight(generator, gate_up.shape[0], 2 * INNER, HIDDEN)
        stub._parameters["down_proj"] = _weight(generator, down.shape[0], HIDDEN, INNER)
        return stub, HIDDEN, gate_up.shape[0]
    name = next(n for n, m in module._modules.items()
                if isinstance(m, nn.ModuleList) and n in loop.function.__code__.co_names)
    experts = list(module._modules[name])  # type: ignore[call-overload]
    small = [_small(e, generator) for e in experts]
    if all(e is not None for e in small):
        stub._modules[name] = nn.ModuleList([e for e in small if e is not None])
        return stub, HIDDEN, len(experts)
    stub._modules[name] = nn.ModuleList(_copies(experts))
    return stub, _features(experts), len(experts)


def _resize(stub: nn.Module, sizes: dict[int, int], experts: int) -> None:
    """Plain attributes that hold one of ``sizes`` hold the new one, unless it may be the number of experts."""
    for name, value in stub.__dict__.items():
        if type(value) is int and value in sizes and value != experts and "expert" not in name:
            stub.__dict__[name] = sizes[value]


def _weight(generator: torch.Generator, *shape: int) -> nn.Parameter:
    value = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
    return nn.Parameter(value, requires_grad=False)


def _small(expert: nn.Module, generator: torch.Generator) -> nn.Module | None:
    """A copy of an MLP of three linears with other sizes; None for other modules."""
    if isinstance(expert, nn.Identity):
        return expert
    linears = {name: m for name, m in expert._modules.items() if type(m) is nn.Linear}
    widths = {(m.in_features, m.out_features) for m in linears.values()}
    if len(linears) != 3 or len(widths) > 2 or any(True for _ in expert.named_parameters(recurse=False)):
        return None
    first = next(iter(linears.values()))
    hidden = first.in_features
    new: nn.Module = object.__new__(type(expert))
    new.__dict__.update(expert.__dict__)
    new.__dict__["_modules"] = dict(expert._modules)
    for name, m in linears.items():
        shape = (HIDDEN, INNER) if name in ("down_proj", "w2") else (INNER, HIDDEN)
        if (m.in_features == hidden) == (name in ("down_proj", "w2")) and m.in_features != m.out_features:
            return None
        made = nn.Linear(1, 1, bias=False)
        made.weight = _weight(generator, *shape)
        if m.bias is not None:
            made.bias = _weight(generator, shape[0])
        new._modules[name] = made
    return new


def _copies(experts: list[nn.Module]) -> list[nn.Module]:
    size = sum(p.numel() * 8 for e in experts for p in e.parameters())
    if size > MOST_BYTES or any(p.is_meta for e in experts for p in e.parameters()):
        raise NotUnderstoodError("its experts are too large to be run for a check, and not gated MLPs that a small "
                                 "copy could stand for")
    return [copy.deepcopy(e).double() for e in experts]


def _features(experts: list[nn.Module]) -> int:
    for m in experts[0].modules():
        if isinstance(m, nn.Linear):
            return m.in_features
    raise NotUnderstoodError("the number of features of its experts is not known")


def _single(stub: nn.Module) -> nn.Module:
    """The stub in float32, so that hidden states and weights of the sum can differ in dtype."""
    for name, p in stub._parameters.items():
        if p is not None and p.is_floating_point():
            stub._parameters[name] = nn.Parameter(p.float(), requires_grad=False)
    for name, child in stub._modules.items():
        if isinstance(child, nn.ModuleList):
            stub._modules[name] = nn.ModuleList([copy.deepcopy(e).float() for e in child])
    return stub
