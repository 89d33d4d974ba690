"""The compiled callable: results, state, guards, spelling of calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cannopy.backend.build import build
from cannopy.backend.guards import GuardError
from tests.backend.programs import (
    Cache,
    check_same_as_eager,
    compile_tiny,
    eager,
    example,
    look,
    make_output,
    tiny,
    tiny_program,
)


@pytest.fixture
def setup():
    model = tiny()
    compiled, x, cache = compile_tiny(model, eager())
    return model, compiled, x, cache


def test_building_changes_nothing() -> None:
    model = tiny()
    _, cache_before = example()
    _, _, cache = compile_tiny(model, eager())
    assert torch.equal(cache.keys, cache_before.keys)
    assert int(model.count) == 0


def test_same_as_eager_over_steps(setup) -> None:
    model, compiled, x, cache = setup
    for step in range(3):
        check_same_as_eager(compiled, model, x + step, cache)


def test_returned_tensors_are_fresh(setup) -> None:
    _, compiled, x, cache = setup
    first = compiled(x, cache)["y"]
    kept = first.clone()
    second = compiled(x * 2, cache)["y"]
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
    assert not second.requires_grad


@pytest.mark.parametrize(
    "call",
    [
        lambda c, x, k: c(x, k),
        lambda c, x, k: c(x, cache=k),
        lambda c, x, k: c(cache=k, x=x),
        lambda c, x, k: c(x, k, False),
        lambda c, x, k: c(x, k, flag=False, mask=None),
    ],
)
def test_spellings(setup, call) -> None:
    model, compiled, x, cache = setup
    before = cache.keys.clone()
    y = call(compiled, x, cache)["y"]
    expected = torch.nn.functional.linear(x, model.proj.weight * 2) * model.scale
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache.keys, before + y, rtol=0, atol=0)


def test_an_argument_that_is_only_read_may_have_other_strides(setup) -> None:
    model, compiled, x, cache = setup
    check_same_as_eager(compiled, model, x.t().contiguous().t(), cache)


def test_a_written_tensor_may_not(setup) -> None:
    _, compiled, x, cache = setup
    strided = Cache(cache.keys.mT.contiguous().mT)
    with pytest.raises(GuardError, match=r"cache.keys.*stride"):
        compiled(x, strided)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c, x, k: c(x[:3], k),
            r"`x` \(args\[0\]\): expected float32\[4, 16\].*found float32\[3, 16\].*compile again",
        ),
        (lambda c, x, k: c(x.double(), k), r"`x` .*found float64\[4, 16\]"),
        (lambda c, x, k: c(None, k), r"`x` .*found None"),
        (lambda c, x, k: c(x.to("meta"), k), r"`x` .*on cpu.*on meta"),
        (lambda c, x, k: c(x, Cache(k.keys[:, :2])), r"`cache.keys` \(args\[1\].keys\).*float32\[1, 2, 8\]"),
        (lambda c, x, k: c(x, None), r"`cache.keys`.*\.keys failed on args\[1\] \(NoneType\)"),
        (lambda c, x, k: c(x, k, True), r"argument `flag`: its default False was used.*found True"),
        (lambda c, x, k: c(x, k, mask=x), r"argument `mask`: its default None.*found float32\[4, 16\]"),
    ],
)
def test_guards_name_the_argument(setup, call, message: str) -> None:
    model, compiled, x, cache = setup
    before = cache.keys.clone()
    with pytest.raises(GuardError, match=message):
        call(compiled, x, cache)
    assert torch.equal(cache.keys, before)
    assert int(model.count) == 0
    check_same_as_eager(compiled, model, x, cache)


def test_wrong_arity_is_a_type_error(setup) -> None:
    _, compiled, x, cache = setup
    with pytest.raises(TypeError, match="missing a required argument: 'cache'"):
        compiled(x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        compiled(x, cache, nope=1)


def test_guards_hold_on_every_call(setup) -> None:
    _, compiled, x, cache = setup
    compiled(x, cache)
    for _ in range(2):
        with pytest.raises(GuardError):
            compiled(x.double(), cache)


def test_strides_of_dimensions_of_size_one_do_not_matter(setup) -> None:
    model, compiled, x, cache = setup
    odd = Cache(cache.keys.as_strided((1, 4, 8), (7, 8, 1)))
    check_same_as_eager(compiled, model, x, odd)


def test_training_flag_and_constants_are_guarded() -> None:
    model = tiny()
    x, cache = example()
    program = tiny_program(model, x, cache)
    program.facts["constants"] = {"self.factor": 2.0}
    compiled, x, cache = compile_tiny(model, eager(), program)
    compiled(x, cache)
    model.factor = 3.0
    with pytest.raises(GuardError, match=r"`self.factor`: the graph is compiled for 2.0, found 3.0"):
        compiled(x, cache)
    model.factor = 2
    with pytest.raises(GuardError, match=r"found 2;"):
        compiled(x, cache)
    model.factor = 2.0
    model.train()
    with pytest.raises(GuardError, match=r"self.training.*False, found True"):
        compiled(x, cache)


def test_a_view_never_copies() -> None:
    model = tiny()
    x, _ = example()
    cache = Cache(torch.randn(1, 8, 4).transpose(1, 2))
    program = tiny_program(model, x, cache)
    i = next(i for i, s in enumerate(program.inputs) if s.name == "keys")
    program.inputs[i] = replace(program.inputs[i], view=(32,))
    found = look(model, (x, cache), eager())
    compiled = build(program, model, "forward", (x, cache), {}, eager(), found, {}, make_output)
    with pytest.raises(GuardError, match=r"`cache.keys`.*cannot be viewed as \[32\] without a copy"):
        compiled(x, cache)


def test_written_memory_given_twice_is_refused() -> None:
    model = tiny()
    compiled, _x, _cache = compile_tiny(model, eager())
    shared = torch.randn(4 * 16)
    with pytest.raises(GuardError, match=r"same memory"):
        compiled(shared.view(4, 16), Cache(shared[:32].view(1, 4, 8)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_grad_mode(setup, mode) -> None:
    _model, compiled, x, cache = setup
    before = cache.keys.clone()
    with mode():
        y = compiled(x, cache)["y"]
    assert not y.requires_grad
    torch.testing.assert_close(cache.keys, before + y, rtol=0, atol=0)


def test_two_compiled_models_do_not_mix() -> None:
    a, b = tiny(0), tiny(5)
    ca, x, cache_a = compile_tiny(a, eager())
    cb, _, cache_b = compile_tiny(b, eager())
    check_same_as_eager(ca, a, x, cache_a)
    check_same_as_eager(cb, b, x, cache_b)
    check_same_as_eager(ca, a, x, cache_a)
