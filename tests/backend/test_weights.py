"""Parameters that are replaced, written, moved or untied after compiling."""

from __future__ import annotations

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


CHANGES = {
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
