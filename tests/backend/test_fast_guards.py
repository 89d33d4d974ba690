"""The fast way lets through exactly what the guards let through; memory, modes and the cost of a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import guards as benchmark
from cannopy.backend import call_check
from cannopy.backend.call_check import CallCheck
from cannopy.backend.guards import GuardError
from cannopy.backend.memory import Separation
from tests.backend.programs import Cache, check_same_as_eager, compile_tiny, eager, example, tiny

X, Y, Z = (torch.full((2, 3), float(i)) for i in range(3))
PATHS = ["args[0]", "kwargs['cache'].layers[0].keys"]


def call(x=X, n=3, mask=None, keys=Y, more=(Z,)):
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=keys)])
    return (x, n, [{"mask": mask}, *more]), {"cache": cache}


@pytest.fixture
def check() -> CallCheck:
    args, kwargs = call()
    found = CallCheck.of(SimpleNamespace(training=False), args, kwargs, PATHS, ["self.training"])
    assert found is not None
    return found


def passes(check: CallCheck, args, kwargs, training=False) -> bool:
    return check.tensors(SimpleNamespace(training=training), args, kwargs) is not None


def test_a_call_like_the_first_passes(check) -> None:
    args, kwargs = call(x=X + 5, keys=Y * 2)
    tensors, pointers = check.tensors(SimpleNamespace(training=False), args, kwargs)
    assert [t is u for t, u in zip(tensors, (args[0], kwargs["cache"].layers[0].keys), strict=True)] == [True, True]
    assert pointers == [t.data_ptr() for t in tensors]


OTHER = {
    "shape": call(x=torch.zeros(3, 2)),
    "rank": call(x=torch.zeros(6)),
    "dtype": call(x=X.double()),
    "device": call(x=X.to("meta")),
    "stride": call(x=torch.zeros(3, 2).t()),
    "grad": call(x=torch.zeros(2, 3, requires_grad=True)),
    "subclass": call(x=torch.nn.Parameter(X, requires_grad=False)),
    "not a tensor": call(x=None),
    "inner shape": call(keys=torch.zeros(1, 3)),
    "inner none": call(keys=None),
    "value": call(n=4),
    "type of a value": call(n=3.0),
    "bool for int": call(n=True),
    "tensor for none": call(mask=torch.zeros(1)),
    "one tensor twice": call(more=(X,)),
    "one tensor as state too": call(keys=X),
    "unused tensor's shape": call(more=(torch.zeros(1),)),
    "one more": call(more=(Z, Z + 1)),
    "one less": call(more=()),
    "tuple for list": ((X, 3, ({"mask": None}, Z)), call()[1]),
    "more keys": ((X, 3, [{"mask": None, "b": 1}, Z]), call()[1]),
    "other key": ((X, 3, [{"musk": None}, Z]), call()[1]),
    "no layers": (call()[0], {"cache": SimpleNamespace(layers=[])}),
    "other cache": (call()[0], {"cache": None}),
}


@pytest.mark.parametrize("name", OTHER)
def test_any_other_call_goes_to_the_guards(check, name: str) -> None:
    assert passes(check, *call())
    assert not passes(check, *OTHER[name])
    assert passes(check, *call())


def test_state_of_the_module_is_compared(check) -> None:
    assert not passes(check, *call(), training=True)
    assert not passes(check, *call(), training=0)


def test_without_torchs_check_every_call_goes_to_the_guards(monkeypatch) -> None:
    monkeypatch.setattr(call_check, "_is_exact", lambda: False)
    args, kwargs = call()
    assert CallCheck.of(None, args, kwargs, PATHS, []) is None
    model = tiny()
    compiled, x, cache = compile_tiny(model, eager())
    check_same_as_eager(compiled, model, x, cache)
    with pytest.raises(GuardError, match="expected float32"):
        compiled(x.double(), cache)


@pytest.mark.parametrize("broken", [lambda *t: True, lambda *t: False])
def test_a_check_of_torchs_that_is_not_exact_is_not_used(monkeypatch, broken) -> None:
    monkeypatch.setattr(call_check, "_dynamo_check", lambda tensors: broken)
    call_check._is_exact.cache_clear()
    try:
        assert call_check.tensor_check([X]) is None
    finally:
        call_check._is_exact.cache_clear()


def test_results_are_right_on_the_fast_way() -> None:
    model = tiny()
    compiled, x, cache = compile_tiny(model, eager())
    for step in range(3):
        for given in (x + step, (x + step).t().contiguous().t()):  # a second kind of call, copied to the right strides
            check_same_as_eager(compiled, model, given, cache)
    assert len(compiled._checks) == 2


def test_modes_that_change_results_are_refused() -> None:
    model = tiny()
    compiled, x, cache = compile_tiny(model, eager())
    with torch.autocast("cpu"), pytest.raises(GuardError, match=r"no autocast, called .* to bfloat16 on cpu"):
        compiled(x, cache)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GuardError, match=r"default dtype float32, .* default dtype float64"):
            compiled(x, cache)
    finally:
        torch.set_default_dtype(before)
    check_same_as_eager(compiled, model, x, cache)


def test_a_written_tensor_that_overlaps_another_is_refused() -> None:
    model = tiny()
    compiled, _, _ = compile_tiny(model, eager())
    apart, room = torch.randn(4, 16), torch.randn(100)
    for calls in range(2):  # on the way that explains and on the fast one
        with pytest.raises(GuardError, match=r"share the same memory"):
            compiled(room[:64].view(4, 16), Cache(room[60:92].view(1, 4, 8)))
        check_same_as_eager(compiled, model, apart + calls, example()[1])
        check_same_as_eager(compiled, model, room[:64].view(4, 16), Cache(room[64:96].view(1, 4, 8)))


def test_addresses_are_compared_both_ways() -> None:
    memory = Separation([10, 10, 10, 0], [1])
    assert memory.clash([100, 110, 120, 5]) is None
    assert memory.clash([119, 110, 130, 5]) == (1, 0)
    assert memory.clash([100, 110, 120, 5]) is None
    assert memory.clash([100, 110, 99, 5]) is None  # what is only read may overlap
    assert memory.clash([101, 110, 120, 5]) == (1, 0)
    assert memory.clash([100, 110, 120, 112]) == (1, 3)  # rows with gaps: their first element counts
    assert memory.clash([100, 95, 120, 5]) == (1, 0)
    assert Separation([10, 10], []).clash([100, 100]) is None


def test_a_check_of_200_tensors_is_cheap() -> None:
    result = benchmark.measure(inputs=200, weights=200)
    python = result.first  # the guards that explain, in the same run
    assert result.same < python / 40
    assert result.fresh < python / 30
    assert result.weights_us < python / 30
