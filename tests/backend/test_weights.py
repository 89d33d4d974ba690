"""Parameters that are replaced, written, moved or untied after compiling."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from cannopy.backend.build import build
from cannopy.backend.guards import GuardError
from cannopy.fx_passes.program import WeightEntry
from tests.backend.programs import (
    check_same_as_eager,
    compile_tiny,
    eager,
    example,
    look,
    make_output,
    tiny,
    tiny_program,
)


def replaced_attribute(model):
    model.proj.weight = torch.nn.Parameter(torch.randn(8, 16))


def replaced_module(model):
    model.proj = torch.nn.Linear(16, 8, bias=False)


def optimiser_step(model):
    """As the optimisers of torch write; they themselves want a device where torch_npu is installed."""
    with torch.no_grad():
        torch._foreach_add_([model.proj.weight], [torch.ones(8, 16)], alpha=-0.125)


def swapped(model):
    torch.utils.swap_tensors(model.proj.weight, torch.nn.Parameter(torch.randn(8, 16)))


def moved_and_back(model):
    with torch.no_grad():
        model.double().proj.weight.mul_(3)
    model.float()


def shrunk_and_set(model):
    """New memory that may stand where the old stood."""
    old = model.proj.weight.data_ptr()
    model.proj.weight.data = torch.empty(0)
    for _ in range(8):
        new = torch.randn(8, 16)
        if new.data_ptr() == old:
            break
    model.proj.weight.data = new


CHANGES = {
    "optimiser step": optimiser_step,
    "swapped": swapped,
    "dtype and back": moved_and_back,
    "data, old memory freed": shrunk_and_set,
    "state dict entry": lambda m: m.state_dict()["proj.weight"].copy_(torch.randn(8, 16)),
    "assign": lambda m: m.load_state_dict({k: v * 3 + 1 for k, v in m.state_dict().items()}, assign=True),
    "copy": lambda m: m.load_state_dict({k: v * 3 + 1 for k, v in m.state_dict().items()}),
    "data": lambda m: setattr(m.proj.weight, "data", torch.randn(8, 16)),
    "in place": lambda m: torch.no_grad()(m.proj.weight.mul_)(-2),
    "attribute": replaced_attribute,
    "module": replaced_module,
    "buffer": lambda m: setattr(m, "scale", torch.randn(8)),
    "buffer in place": lambda m: m.scale.add_(1),
    "buffer data": lambda m: m.scale.data.add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_weights_give_right_results(change) -> None:
    model = tiny()
    compiled, x, cache = compile_tiny(model, eager())
    check_same_as_eager(compiled, model, x, cache)
    before = compiled(x, cache)["y"]
    change(model)
    check_same_as_eager(compiled, model, x, cache)
    assert not torch.allclose(compiled(x, cache)["y"], before, rtol=1e-2)
    check_same_as_eager(compiled, model, x, cache)


RELAID = {"dtype": lambda w: w.view(torch.int32), "strides": lambda w: w.view(16, 8).t()}


@pytest.mark.parametrize("name", ["proj.weight", "scale"])
@pytest.mark.parametrize("relaid", RELAID.values(), ids=RELAID.keys())
def test_the_same_memory_in_another_layout_is_an_error(name: str, relaid) -> None:
    """(Object, address and version stay as they were.)"""
    model = tiny().requires_grad_(False)
    compiled, x, cache = compile_tiny(model, eager())
    weight = model.get_parameter(name) if name == "proj.weight" else model.get_buffer(name)
    if weight.dim() == 1 and relaid is RELAID["strides"]:
        relaid = lambda w: w.as_strided(w.shape, (0,))  # noqa: E731
    weight.data = relaid(weight.data)
    with pytest.raises(GuardError, match=name):
        compiled(x, cache)


def test_write_through_data_needs_a_refresh() -> None:
    model = tiny()
    compiled, x, cache = compile_tiny(model, eager())
    model.proj.weight.data.add_(1)
    compiled.refresh_weights()
    check_same_as_eager(compiled, model, x, cache)


def test_unchanged_weights_are_built_once(monkeypatch) -> None:
    model = tiny()
    calls = []
    original = WeightEntry.build
    monkeypatch.setattr(WeightEntry, "build", lambda self, tensors: calls.append(self.name) or original(self, tensors))
    compiled, x, cache = compile_tiny(model, eager())
    for _ in range(3):
        compiled(x, cache)
    assert calls == ["w"]
    with torch.no_grad():
        model.proj.weight.mul_(2)
    for _ in range(3):
        compiled(x, cache)
    assert calls == ["w", "w"]


def test_weights_are_shared_not_copied() -> None:
    model = tiny()
    compiled, _, _ = compile_tiny(model, eager())
    instance = compiled._generated.instance
    assert instance.scale.data_ptr() == model.scale.data_ptr()
    assert not instance.w.requires_grad
    assert isinstance(instance.w, torch.nn.Parameter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.to(torch.float64), r"`self\.\w+(\.weight)?`: expected float32.*found float64"),
        (lambda m: setattr(m.proj, "weight", torch.nn.Parameter(torch.randn(8, 8))), r"`self.proj.weight`.*\[8, 8\]"),
        (lambda m: delattr(m, "proj"), r"`self.proj.weight`: the model no longer has it"),
    ],
)
def test_another_layout_is_refused(change, message: str) -> None:
    model = tiny()
    compiled, x, cache = compile_tiny(model, eager())
    change(model)
    for _ in range(2):
        with pytest.raises(GuardError, match=message):
            compiled(x, cache)


def test_broken_ties_are_refused() -> None:
    model = tiny()
    model.alias = torch.nn.Linear(16, 8, bias=False)
    model.alias.weight = model.proj.weight
    compiled, x, cache = compile_tiny(model, eager())
    check_same_as_eager(compiled, model, x, cache)
    model.alias.weight = torch.nn.Parameter(model.proj.weight.detach().clone())
    for _ in range(2):
        with pytest.raises(GuardError, match=r"alias.weight = proj.weight.*compile again"):
            compiled(x, cache)
    model.alias.weight = model.proj.weight
    check_same_as_eager(compiled, model, x, cache)


def test_chained_recipes() -> None:
    model = tiny()
    x, cache = example()
    program = tiny_program(model, x, cache)
    program.weights[:] = [WeightEntry("half", ("weight",), "w[0] * 4"), WeightEntry("w", ("half",), "(w[0] / 2).t()")]
    found = look(model, (x, cache), eager())
    compiled = build(program, model, "forward", (x, cache), {}, eager(), found, {}, make_output)
    check_same_as_eager(compiled, model, x, cache)
    with torch.no_grad():
        model.proj.weight.neg_()
    check_same_as_eager(compiled, model, x, cache)


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny()
        compiled, x, cache = compile_tiny(model, eager())
        check_same_as_eager(compiled, model, x, cache)
        model.proj.weight.neg_()
        compiled.refresh_weights()
        check_same_as_eager(compiled, model, x, cache)


def weights(compiled):
    instance = compiled._generated.instance
    return instance.w


def test_two_methods_of_a_model_share_derived_weights() -> None:
    model = tiny()
    first, x, cache = compile_tiny(model, eager())
    second, _, _ = compile_tiny(model, eager())
    other, _, _ = compile_tiny(tiny(5), eager())
    assert weights(first) is weights(second)
    assert weights(other) is not weights(first)
    size = model.proj.weight.nbytes
    memory = [(c.weight_memory.bytes, c.weight_memory.shared_bytes) for c in (first, second, other)]
    assert memory == [(size, 0), (0, size), (size, 0)]
    assert first.weight_memory.source_bytes == size
    for _ in range(2):
        with torch.no_grad():
            model.proj.weight.neg_()
        for compiled in (first, second):
            check_same_as_eager(compiled, model, x, cache)
    model.proj.weight = torch.nn.Parameter(torch.randn(8, 16))
    for compiled in (second, first):
        check_same_as_eager(compiled, model, x, cache)
    assert weights(first) is weights(second)


def test_shared_weights_are_brought_up_to_date_when_another_method_is_made() -> None:
    model = tiny()
    first, x, cache = compile_tiny(model, eager())
    model.proj.weight.data.mul_(3)  # leaves no trace
    second, _, _ = compile_tiny(model, eager())
    for compiled in (second, first):
        check_same_as_eager(compiled, model, x, cache)


def test_shared_weights_live_as_long_as_a_method_that_has_them() -> None:
    model = tiny()
    first, _, _ = compile_tiny(model, eager())
    second, x, cache = compile_tiny(model, eager())
    kept = weakref.ref(weights(first))
    del first
    gc.collect()
    check_same_as_eager(second, model, x, cache)
    assert kept() is not None
    del second
    gc.collect()
    assert kept() is None


def test_a_weight_that_is_its_source_takes_no_memory() -> None:
    model = tiny()
    x, cache = example()
    program = tiny_program(model, x, cache)
    program.weights[:] = [WeightEntry("same", ("weight",), "w[0].view(8, 16)"),
                          WeightEntry("w", ("same",), "(w[0] * 2.0).t()")]  # fmt: skip
    found = look(model, (x, cache), eager())
    compiled = build(program, model, "forward", (x, cache), {}, eager(), found, {}, make_output)
    assert compiled.weight_memory.bytes == model.proj.weight.nbytes
    check_same_as_eager(compiled, model, x, cache)
