"""Compiled ranks with heads of their own in caches: what they are called with, and what is said of other caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cannopy
from cannopy import api
from cannopy.backend.guards import GuardError
from cannopy.backend.options import BuildOptions
from cannopy.frontend import state
from cannopy.frontend.errors import CaptureError
from cannopy.fx_passes.parallel import Parallel, ParallelError
from cannopy.parity.reference import all_in_float64, cast_inputs, in_float64
from tests.parallel import ranks, world
from tests.parallel.test_grouped_heads import Stock

ATTN = Parallel(attn_tp=2)


def options(rank: int | None = None, **more: Any) -> cannopy.Options:
    more.setdefault("use_cache", False)
    return cannopy.Options(phase="decode", parallel=ATTN, rank=rank, group_timeout=60.0, cache_timeout=60.0, **more)


def tensors(cache: Any) -> list[torch.Tensor]:
    return [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor) and t.dim() == 4]


def assert_close(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """As near to float64 as eager bfloat16 is, up to a quarter."""
    assert float((ours.double() - exact).norm()) <= 1.25 * float((plain.double() - exact).norm()) > 0


@pytest.mark.usefixtures("activated")
def test_real_ranks(tmp_path: Path) -> None:
    """Both forms through torchair on two processes: a paged cache that is cut, and a static one without tensors, which
    gets the heads of the rank in its first call. Layer 2 is a copy of layer 1."""
    from transformers import StaticCache

    case, stock = ranks.serving("qwen2.5", num_hidden_layers=5), Stock("Qwen3")
    call, ids = case.call(0), torch.arange(10).view(2, 5)

    def both(model: Any, method: str, args: tuple[Any, ...]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(result, arguments with their caches) of eager mode, and of float64."""
        wide, wide_model = cast_inputs((args, {}), torch.float64)[0], in_float64(model)
        with torch.no_grad():
            plain = getattr(model, method)(*args)
            with all_in_float64():
                return (plain, args), (getattr(wide_model, method)(*wide), wide)

    (plain, whole), (exact, wide) = both(case.model, "decode", case.call(0))
    static = StaticCache(config=stock.model.config, max_cache_len=64)
    state.prepare_state(stock, (ids, static), method="step")
    (plain_stock, _), (exact_stock, wide_stock) = both(stock, "step", (ids, static))

    def work(rank: int) -> list[int]:
        method = cannopy.compile(case.model, "decode", call, options=options(cache_dir=tmp_path, use_cache=True))
        (*rest, cache), _ = method.of_rank(*call)
        assert all(a is b for a, b in zip(rest, call, strict=False))
        assert_close(method(*rest, cache)[0], plain[0], exact[0])
        for own in zip(tensors(cache), *(tensors(args[-1]) for args in (whole, wide)), strict=True):
            assert_close(own[0], *(t[:, :, rank : rank + 1] for t in own[1:]))
        assert method.of_rank(*rest, cache)[0][-1].layers[4].key is cache.layers[4].key
        again = cannopy.compile(case.model, "decode", call, options=options(cache_dir=tmp_path, use_cache=True))
        assert again.report.cache["status"] == "hit"
        assert_close(again(*again.of_rank(*call)[0])[0], plain[0], exact[0])
        mine = StaticCache(config=stock.model.config, max_cache_len=64)
        compiled = cannopy.compile(stock, "step", (ids, mine), options=options())
        assert not mine.layers[0].is_initialized
        assert_close(compiled(ids, mine), plain_stock, exact_stock)
        for layers in zip(mine.layers, static.layers, wide_stock[-1].layers, strict=True):
            assert_close(layers[0].keys, *(layer.keys[:, rank : rank + 1] for layer in layers[1:]))
        return [method.report.memory["caches"], compiled.report.memory["caches"]]

    paged, counted = sum(t.nbytes for t in tensors(call[-1])), sum(t.nbytes for t in tensors(static))
    found = world.run(2, work, tmp_path / "ranks", seconds=400.0)
    assert [sizes[0] for sizes in found] == [paged // 2] * 2
    assert all(counted // 2 <= sizes[1] <= counted // 2 + 16 for sizes in found)


def eager(case: ranks.Case, monkeypatch: pytest.MonkeyPatch) -> cannopy.Compiled:
    """Rank 1 without torchair."""
    made = api.build_options

    def plain(plan: Any) -> BuildOptions:
        return replace(made(plan), engine="eager")

    monkeypatch.setattr(api, "build_options", plain)
    return cannopy.compile(case.model, "decode", case.call(0), options=options(1))


@pytest.mark.usefixtures("activated")
def test_other_caches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ranks.serving("qwen2.5", num_hidden_layers=2)
    compiled, call = eager(case, monkeypatch), case.call(1)
    with pytest.raises(GuardError, match=r"expected bfloat16\[5, 128, 1, 128\].*, entries 1 to 1 of dimension 2 of "
                                         r"\[5, 128, 2, 128\].*`Compiled.of_rank` cuts.*found bfloat16\[5, 128, 2"):
        compiled(*call)
    (*rest, own), _ = compiled.of_rank(*call)
    assert compiled.cuts_caches
    for part, whole in zip(tensors(own), tensors(call[-1]), strict=True):
        assert torch.equal(part, whole[:, :, 1:2])
        assert part.is_contiguous()
    for layer in (empty := case.call(0)[-1]).layers:
        for name in ("key", "value"):
            object.__setattr__(layer, name, getattr(layer, name).to("meta"))
    zeros = tensors(compiled.of_rank(*rest, empty)[0][-1])
    assert {(tuple(t.shape), t.device.type, bool(t.any())) for t in zeros} == {((5, 128, 1, 128), "cpu", False)}
    blocks = ranks.serving("qwen2.5", num_hidden_layers=2).model.new_cache(3, 128)  # type: ignore[operator]
    with pytest.raises(GuardError, match=r"expected a tensor \[5, 128, 2, 128\] for one die, found bfloat16\[3"):
        compiled.of_rank(*rest, blocks)
    with pytest.raises(CaptureError, match="with attn_tp=2, caches of the example have all heads, as for one die"):
        cannopy.compile(case.model, "decode", (*rest, own), options=options(1))


def test_caches_of_the_model_itself() -> None:
    """Those stay whole in the user's model, which the rank is called with."""
    case = ranks.serving("qwen2.5", num_hidden_layers=1)

    class Owner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.cache = case.model, case.call(0)[-1]

        def decode(self, *args: torch.Tensor) -> Any:
            return self.inner.decode(*args, self.cache)  # type: ignore[operator]

    owner = Owner()
    with pytest.raises(ParallelError, match="belongs to the model, which all ranks call"):
        cannopy.compile(owner, "decode", case.call(0)[:-1], options=options(1))
