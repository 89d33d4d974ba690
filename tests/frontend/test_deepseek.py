"""The stock DeepSeek-V3.2 of transformers: both phases captured in one graph, equal to eager bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cannopy.frontend import state
from cannopy.frontend.capture import capture
from cannopy.frontend.errors import CaptureError
from cannopy.frontend.generation import GenerationCase
from cannopy.fx_passes.program import Program

from .models import mini_v32, run

STATE = ("keys", "values", "indexer_keys", "cumulative_length", "indexer_cumulative_length")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return mini_v32()


def assert_same_cache(found: Any, expected: Any) -> None:
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert (a.is_initialized, a.is_indexer_initialized) == (b.is_initialized, b.is_indexer_initialized)
        for name in STATE:
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype
            assert torch.equal(x, y), name


@pytest.mark.slow
def test_prefill_then_decode_equals_eager(model: nn.Module) -> None:
    case = GenerationCase(model, batch=2, prefill_tokens=20, max_cache_len=32, seed=5)
    cache, eager_cache = case.new_cache(), case.new_cache()
    args, kwargs = case.prefill(case.ids("prefill"), cache)
    assert state.prepare_state(model, args, kwargs) == 2
    program = capture(model, "forward", args, kwargs)
    assert int(cache.layers[0].cumulative_length) == 0, "capture must not run the model"
    assert not cache.layers[0].keys.any()
    step(program, model, args, kwargs, eager_cache)
    decode = capture(model, "forward", *case.decode(case.ids("decode"), cache))
    for i in range(3):
        args, kwargs = case.decode(case.ids("decode", i), cache)
        step(decode, model, args, kwargs, eager_cache)
    assert int(cache.layers[1].cumulative_length) == 23
    check_program(decode)


def step(program: Program, model: nn.Module, args: Any, kwargs: Any, eager_cache: Any) -> None:
    found = run(program, model, args, kwargs)
    with torch.no_grad():
        expected = model(*args, **(kwargs | {"cache": eager_cache}))
    assert type(found) is type(expected)
    assert list(found.keys()) == list(expected.keys()) == ["logits", "cache"]
    assert torch.equal(found.logits, expected.logits)
    assert found.cache is kwargs["cache"]
    assert_same_cache(kwargs["cache"], eager_cache)


def check_program(program: Program) -> None:
    mutated = sorted(s.source for s in program.inputs if s.mutated)
    assert mutated == sorted(f"kwargs['cache'].layers[{i}].{n}" for i in (0, 1) for n in STATE)
    assert {s.kind for s in program.inputs if s.mutated} == {"state"}
    constants = dict(program.facts["constants"])
    assert constants.pop("kwargs['use_cache']") is True
    assert all(path.startswith("kwargs['cache'].") for path in constants), "values that the method reads from the cache"
    sources = {s.source: s.kind for s in program.inputs}
    assert sources["self.model.layers[1].mlp.experts.gate_up_proj"] == "parameter"
    assert sources["self.model.layers[1].mlp.gate.e_score_correction_bias"] == "buffer"
    assert sources["self.model.rotary_emb.inv_freq"] == "buffer"
    assert sources["args[0]"] == "argument"
    attention = [n for n in program.gm.graph.nodes if n.target is torch.ops.cannopy.attention.default]
    assert [n.meta["module_path"] for n in attention] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [n.meta["layer"] for n in attention] == [0, 1]
    assert all(n.meta["source"].startswith("transformers/") for n in attention)
    assert all(n.args[4] == 32**-0.5 for n in attention)


def test_keyword_inputs() -> None:
    model = mini_v32(num_hidden_layers=1)
    case = GenerationCase(model, batch=1, prefill_tokens=5, max_cache_len=16)
    cache = case.new_cache()
    kwargs = {"input_ids": case.ids("prefill"), "cache": cache, "use_cache": True, "return_dict": False}
    state.prepare_state(model, (), kwargs)
    program = capture(model, "forward", (), kwargs)
    assert "kwargs['input_ids']" in {s.source for s in program.inputs}
    with torch.no_grad():
        expected = model(**(kwargs | {"cache": copy.deepcopy(cache)}))
    found = run(program, model, (), kwargs)
    assert type(found) is type(expected) is tuple
    assert torch.equal(found[0], expected[0])
    assert found[1] is cache


def test_prepared_cache_equals_the_lazily_made_one(model: nn.Module) -> None:
    case = GenerationCase(model, batch=3, prefill_tokens=4, max_cache_len=16)
    prepared, lazy = case.new_cache(), case.new_cache()
    args, kwargs = case.prefill(case.ids("prefill"), prepared)
    assert state.prepare_state(model, args, kwargs) == 2
    assert state.prepare_state(model, args, kwargs) == 0, "a second call finds nothing to do"
    with torch.no_grad():
        model(*args, **(kwargs | {"cache": lazy}))
    for a, b in zip(prepared.layers, lazy.layers, strict=True):
        assert set(vars(a)) == set(vars(b))
        for name in STATE:
            x, y = getattr(a, name), getattr(b, name)
            assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
            assert not x.any()
    assert_same_result_after_prefill(model, args, kwargs, prepared, lazy)


def assert_same_result_after_prefill(model: nn.Module, args: Any, kwargs: Any, prepared: Any, lazy: Any) -> None:
    with torch.no_grad():
        model(*args, **(kwargs | {"cache": prepared}))
    assert_same_cache(prepared, lazy)


def test_an_initialised_cache_is_left_alone(model: nn.Module) -> None:
    case = GenerationCase(model, batch=1, prefill_tokens=4, max_cache_len=16)
    cache = case.new_cache()
    args, kwargs = case.prefill(case.ids("prefill"), cache)
    with torch.no_grad():
        model(*args, **kwargs)
    before = {(i, n): getattr(layer, n) for i, layer in enumerate(cache.layers) for n in STATE}
    copies = {k: v.clone() for k, v in before.items()}
    assert state.prepare_state(model, args, kwargs) == 0
    for (i, n), tensor in before.items():
        assert getattr(cache.layers[i], n) is tensor
        assert torch.equal(tensor, copies[i, n])


def test_a_lazy_cache_is_refused_with_the_cure(model: nn.Module) -> None:
    case = GenerationCase(model, batch=1, prefill_tokens=4, max_cache_len=16)
    args, kwargs = case.inputs("prefill")
    with pytest.raises(CaptureError) as caught:
        capture(model, "forward", args, kwargs)
    assert "kwargs['cache'].layers[0].indexer_keys" in caught.value.reason
    assert "StaticCache" in caught.value.remedy
    assert caught.value.source_file is not None
    assert caught.value.source_file.endswith("cache_utils.py")


def test_a_growing_cache_is_refused(model: nn.Module) -> None:
    from transformers import DynamicCache

    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(CaptureError, match="StaticCache"):
        capture(model, "forward", (ids,), {"cache": DynamicCache(config=model.config), "use_cache": True})


def test_the_loop_over_experts_is_replaced() -> None:
    model = mini_v32(num_hidden_layers=3)
    model.set_experts_implementation("eager")
    before = [type(m) for m in model.modules()]
    args, kwargs = GenerationCase(model, batch=1, prefill_tokens=4, max_cache_len=16).inputs("prefill")
    assert state.prepare_state(model, args, kwargs) == 3
    program = capture(model, "forward", args, kwargs)
    assert [type(m) for m in model.modules()] == before
    targets = {str(n.target) for n in program.gm.graph.nodes}
    assert not any("nonzero" in t for t in targets)


@pytest.mark.slow
def test_full_size_layers_on_the_meta_device() -> None:
    import dataclasses

    from cannopy.models import zoo

    preset = zoo.preset("deepseek-v3.2", "full")
    preset = dataclasses.replace(preset, config={**preset.config, "num_hidden_layers": 1, "first_k_dense_replace": 0})
    model = zoo.build(preset)
    case = GenerationCase(model, 1, preset.prefill_tokens, preset.max_cache_len)
    args, kwargs = case.inputs("decode")
    assert state.prepare_state(model, args, kwargs) == 1
    assert kwargs["cache"].layers[0].keys.is_meta
    program = capture(model, "forward", args, kwargs)
    shapes = {s.source: s.shape for s in program.inputs}
    assert shapes["self.model.layers[0].mlp.experts.gate_up_proj"] == (256, 4096, 7168)
    assert shapes["self.model.layers[0].self_attn.q_b_proj.weight"] == (128 * 192, 1536)
    assert shapes["kwargs['cache'].layers[0].keys"] == (1, 1, 8192, 512)
    assert {n.meta["val"].device.type for n in program.gm.graph.nodes if n.op == "placeholder"} == {"cpu"}
    assert next(model.parameters()).is_meta
