"""What cannot be captured is refused with the user's own line and a cure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cannopy.frontend.capture import capture
from cannopy.frontend.errors import CaptureError

from .models import marked_line

TABLE = torch.arange(4.0)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.steps = 0
        self.log: list[Any] = []
        self.scratch: torch.Tensor | None = None
        self.kv = torch.zeros(2, 4)
        self.flat = self.kv.view(-1)


class Prints(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(x.shape)  # HERE
        return x + 1


class Branches(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # HERE
            return x + 1
        return x


class BranchesInHelper(Base):
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x[0] > 0 else x  # HERE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x) * 2


class ReadsItem(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = int(x.sum().item())  # HERE
        return x + n


class SizeFromValue(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(int(x[0]), 3)  # HERE


class Nonzero(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hits = x.nonzero()  # HERE
        return x[hits[:, 0]]


class BooleanIndex(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]  # HERE


class Breaks(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # HERE
        return x + 1


class AssignsTensor(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch = torch.zeros(4)  # HERE
        return x + self.scratch


class CountsSteps(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1  # HERE
        return x + self.steps


class AppendsToList(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(x)  # HERE
        return x + 1


class RegistersBuffer(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("late", x * 2)  # HERE
        return self.late + 1


class MakesModule(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sub = nn.Linear(4, 4)  # HERE
        return self.sub(x)


class Raises(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.missing(x)  # HERE


class RaisesOnPurpose(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            raise ValueError("four is one too many")  # HERE
        return x


class BadShape(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(3)  # HERE


class DrawsNumbers(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)  # HERE


class DropsOut(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training) + 1  # HERE


class RouterJitter(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        if self.training:
            h *= torch.empty_like(h).uniform_(0.9, 1.1)  # HERE
        return h


class AttentionDropout(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 1, 1, 4)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)  # HERE


class ReadsGlobal(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + TABLE  # HERE


TABLE_OF_CLOSURE = torch.ones(4)


def _closure() -> type[nn.Module]:
    table = TABLE_OF_CLOSURE

    class ReadsClosure(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + table  # HERE

    return ReadsClosure


ReadsClosure = _closure()

CASES = [
    (Prints, "prints", "is_compiling"),
    (Branches, "control flow depends", "torch.where"),
    (BranchesInHelper, "control flow depends", "torch.where"),
    (ReadsItem, r"reads a tensor's value", "keep the value in a tensor"),
    (SizeFromValue, r"reads a tensor's value", "keep the value in a tensor"),
    (Nonzero, "size of nonzero's result depends on the data", "fixed output size"),
    (BooleanIndex, "depends on the data", "fixed output size"),
    (Breaks, "graph break", "graph_break"),
    (AssignsTensor, "self.scratch", "__init__"),
    (CountsSteps, "self.steps", "__init__"),
    (AppendsToList, "self.log", "__init__"),
    (RegistersBuffer, "self._buffers", "__init__"),
    (MakesModule, "makes parameters or modules", "__init__"),
    (Raises, "raises AttributeError: 'Raises' object has no attribute 'missing'", "eager"),
    (RaisesOnPurpose, "raises ValueError: four is one too many", "eager"),
    (BadShape, "invalid for input of size 4", "eager"),
    (DrawsNumbers, "random numbers", "model.eval"),
    (DropsOut, "random numbers", "model.eval"),
    (RouterJitter, "random numbers", "model.eval"),
    (AttentionDropout, "dropout_p=0.1", "dropout to 0"),
    (ReadsGlobal, "global variable: TABLE", "buffer"),
    (ReadsClosure, "closure variable: table", "buffer"),
]


@pytest.mark.parametrize(("model", "reason", "remedy"), CASES, ids=[c[0].__name__ for c in CASES])
def test_the_error_names_line_reason_and_cure(model: type[nn.Module], reason: str, remedy: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model(), "forward", (torch.ones(4),))
    error = caught.value
    assert reason in error.reason
    assert remedy in error.remedy
    assert (error.source_file, error.line) == (__file__, marked_line(model))
    assert "# HERE" in error.code
    assert f"{__file__}:{error.line}: {error.code}" in str(error)


@pytest.mark.parametrize("model", [Branches, Prints, BadShape])
def test_the_original_exception_is_the_cause(model: type[nn.Module]) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model(), "forward", (torch.ones(4),))
    assert type(caught.value.__cause__).__module__.startswith("torch.")


@pytest.mark.parametrize("model", [AssignsTensor, CountsSteps, AppendsToList, RegistersBuffer])
def test_a_refused_capture_leaves_the_module_alone(model: type[nn.Module]) -> None:
    made = model()
    before = {k: v for k, v in vars(made).items() if not k.startswith("_")}
    with pytest.raises(CaptureError):
        capture(made, "forward", (torch.ones(4),))
    assert {k: v for k, v in vars(made).items() if not k.startswith("_")} == before
    assert made.log == []
    assert list(made.named_buffers()) == []


class Overlapping(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kv[0].add_(x)
        return self.flat + 1


class ReplacesData(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = x
        return self.weight + 1


class ReplacesShape(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 2).t_() + x.t_()


class ReadsNumpy(Base):
    def forward(self, x: torch.Tensor, y: Any) -> torch.Tensor:
        return x + torch.from_numpy(y)


class ReturnsObject(Base):
    def forward(self, x: torch.Tensor) -> Any:
        class Box:
            pass

        box = Box()
        box.value = x + 1
        return box


class ReinterpretsInput(Base):
    def forward(self, x: torch.Tensor) -> Any:
        return x.view(torch.int32), x + 1


@pytest.mark.parametrize(
    ("model", "more", "reason"),
    [
        (Overlapping, (), "self.kv, self.flat"),
        (ReplacesData, (), "other memory"),
        (ReplacesShape, (), "changes an input's shape"),
        (ReadsNumpy, (np.ones(4, dtype=np.float32),), "from_numpy"),
        (ReinterpretsInput, (), "torch.int32"),
    ],
)
def test_bindings_that_no_graph_can_have(model: type[nn.Module], more: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model(), "forward", (torch.ones(4), *more))
    assert reason in caught.value.reason
    assert caught.value.remedy


def test_a_result_of_an_unknown_class_is_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(ReturnsObject(), "forward", (torch.ones(4),))
    assert "Box" in str(caught.value)


def test_a_dynamic_size_is_refused() -> None:
    x = torch.ones(4)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(CaptureError, match="dynamic"):
        capture(_Adds(), "forward", (x,))


class _Adds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_a_method_that_is_no_method_is_refused() -> None:
    model = _Adds()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"torch\.compile"):
        capture(model, "forward", (torch.ones(4),))
    with pytest.raises(CaptureError, match="not a method"):
        capture(model, "absent", (torch.ones(4),))


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CaptureError, match="missing a required argument: 'x'"):
        capture(_Adds(), "forward", ())


def test_nothing_to_compile_is_said() -> None:
    class Idle(nn.Module):
        def forward(self, n: int) -> int:
            return n + 1

    with pytest.raises(CaptureError, match="nothing to compile"):
        capture(Idle(), "forward", (3,))


ADDS_ITS_MASK = """
import torch

class Scores(torch.nn.Module):
    def forward(self, scores, visible):
        return torch.topk(scores + visible, 2)[1]
"""


@pytest.mark.parametrize(("folder", "dtype", "refused"), [
    ("transformers/models", torch.bool, True), ("transformers/models", torch.float32, False),
    ("mine", torch.bool, False),
])
def test_a_boolean_mask_that_transformers_adds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, dtype: torch.dtype, refused: bool
) -> None:
    file = tmp_path / folder / "modeling_scores.py"
    file.parent.mkdir(parents=True)
    file.write_text(ADDS_ITS_MASK)
    spec = importlib.util.spec_from_file_location("modeling_scores", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "modeling_scores", module)
    spec.loader.exec_module(module)
    args = (torch.randn(3, 5), torch.ones(3, 5).tril().to(dtype))
    if not refused:
        assert capture(module.Scores(), "forward", args).output
        return
    with pytest.raises(CaptureError, match=r"a boolean mask is added to scores(.|\n)*scores \+ visible(.|\n)*eager"):
        capture(module.Scores(), "forward", args)
