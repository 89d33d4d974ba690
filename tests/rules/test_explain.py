"""What `explain` says of a tiny model with one thing changed: the thing, its line, and what would make it apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cannopy.errors import CannopyError
from cannopy.explain import Explanation, Refused, explain
from cannopy.explain_view import lines
from cannopy.options import Options

LAYERS, WIDTH = 3, 32
Form = Callable[["Block", Tensor], Any]


class Block(nn.Module):
    """A norm and a gated MLP, each as ``form`` writes it."""

    def __init__(self, norm: Form, mlp: Form) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.eps = nn.Parameter(torch.tensor(1e-6))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        out = self.mlp(self, self.norm(self, x))
        hidden, extra = out if isinstance(out, tuple) else (out, None)
        return x + self.down(hidden), extra


class Model(nn.Module):
    """Three blocks of one kind."""

    def __init__(self, norm: Form, mlp: Form) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(norm, mlp) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Any:
        extras = []
        for layer in self.layers:
            x, extra = layer(x)
            extras += [] if extra is None else [extra]
        return (x, *extras) if extras else x


def rms(block: Block, x: Tensor, eps: Any = 1e-6, power: float = 2) -> Tensor:
    wide = x.float()
    return block.gamma * (wide * torch.rsqrt(wide.pow(power).mean(-1, keepdim=True) + eps)).to(x.dtype)


def root(block: Block, x: Tensor) -> Tensor:
    wide = x.float()
    return block.gamma * (wide / torch.sqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def swiglu(block: Block, y: Tensor) -> Tensor:
    return F.silu(block.gate(y)) * block.up(y)


def gate_returned(block: Block, y: Tensor) -> tuple[Tensor, Tensor]:
    gate = block.gate(y)
    return F.silu(gate) * block.up(y), gate


def gate_read(block: Block, y: Tensor) -> Tensor:
    gate = block.gate(y)
    return F.silu(gate) * block.up(y) + gate


def inputs_differ(block: Block, y: Tensor) -> Tensor:
    return F.silu(block.gate(y)) * block.up(y + y)


def explained(norm: Form = rms, mlp: Form = swiglu, dtype: torch.dtype = torch.bfloat16, width: int = WIDTH,
              **options: Any) -> Explanation:
    model = Model(norm, mlp).to(dtype).eval()
    return explain(model, "forward", (torch.randn(4, width).to(dtype),), options=Options(**options))


def the_miss(found: Explanation, rule: str) -> Refused:
    """The only kind of miss of ``rule``, at all layers."""
    (miss,) = found.of_rule(rule).refused
    assert (miss.layers, miss.places) == ((0, 1, 2), LAYERS)
    assert "test_explain.py:" in miss.source
    return miss


CASES: dict[str, tuple[Callable[[], Explanation], str, str, str, str, str]] = {
    # name: (what is explained, rule, kind, expected, found, remedy), each a part of the text
    "eps is a tensor": (lambda: explained(lambda b, x: rms(b, x, b.eps)), "lift_rms_norm", "constant",
                        "a number (eps)", "an input or weight", "make eps a Python number"),
    "another power": (lambda: explained(lambda b, x: rms(b, x, power=3)), "lift_rms_norm", "constant",
                      "the number = 2", "3", "use the number = 2"),
    "sum for mean": (lambda: explained(root), "lift_rms_norm", "operation", "aten.mean", "aten.sum",
                     "compute this step with aten.mean"),
    "another activation": (lambda: explained(mlp=lambda b, y: F.gelu(b.gate(y)) * b.up(y)), "swiglu", "operation",
                           "aten.silu", "aten.gelu", ""),
    "clamped": (lambda: explained(mlp=lambda b, y: F.silu(b.gate(y)).clamp(max=1) * b.up(y)), "swiglu", "operation",
                "no clamp", "aten.clamp", ""),
    "fp32 result": (lambda: explained(mlp=lambda b, y: (F.silu(b.gate(y).float()) * b.up(y).float() * 2).to(y.dtype)),
                    "swiglu", "dtype", "bfloat16", "float32", "cast the product"),
    "returned": (lambda: explained(mlp=gate_returned), "swiglu", "output", "no reader", "the method returns it",
                 "do not return"),
    "read elsewhere": (lambda: explained(mlp=gate_read), "swiglu", "reader", "no reader", "test_explain.py:",
                       "test_explain.py:"),
    "two inputs": (lambda: explained(mlp=inputs_differ), "swiglu", "operand", "the same x", "aten.add",
                   "let both places read"),
    "no product": (lambda: explained(mlp=lambda b, y: F.silu(b.gate(y)) + b.up(y)), "swiglu", "missing", "aten.mul",
                   "aten.add", "follow it with"),
    "weight is computed": (lambda: explained(mlp=lambda b, y: F.silu(F.linear(y, 2 * b.gate.weight)) * b.up(y)),
                           "swiglu", "weight", "a parameter", "", "as a parameter"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_changed_thing_is_named(name: str) -> None:
    make, rule, kind, expected, found, remedy = CASES[name]
    miss = the_miss(make(), rule)
    assert (miss.kind, miss.anchor != "") == (kind, True)
    assert expected in miss.expected
    assert found in miss.found
    assert remedy in miss.remedy


def test_a_broken_clause_is_named_with_what_is_allowed() -> None:
    found = explained(dtype=torch.float64)
    miss = the_miss(found, "swiglu")
    assert (miss.kind, miss.clause) == ("contract", "npu_swiglu.input-dtype")
    assert "float16 or bfloat16 or float32" in miss.expected
    assert miss.found == "float64"
    assert "this model has float64" in miss.remedy


def test_what_the_graph_lacks() -> None:
    absent = explained(lambda b, x: x).absent
    assert "no aten.topk, which every form of it needs" in absent["moe_gating_top_k"]
    assert "aten.rsqrt" in absent["lift_rms_norm"]
    assert "lift_attention makes cannopy.attention" in absent["sparse_flash_attention"]
    assert absent["moe_finalize_add"].endswith("which every form of it needs")  # the rule itself makes it again


def test_a_rule_that_applied_is_not_blamed() -> None:
    """All norms became add_rms_norm: nothing is to be seen of why lift_rms_norm did not apply."""
    found = explained(norm=lambda b, x: rms(b, x + x.sin()))
    assert {a.rule for a in found.applied} >= {"lift_rms_norm", "add_rms_norm"}
    assert found.absent["rms_norm"] == ("its last operation, cannopy.rms_norm, is not in the graph; the nearest to "
                                        "cannopy.rms_norm that it has is npu.npu_add_rms_norm")


def test_matches_are_explained_by_kind_of_layer() -> None:
    found = explained()
    (mlp,) = found.of_rule("swiglu").applied
    assert (mlp.layers, mlp.places, mlp.kernels) == ((0, 1, 2), LAYERS, ("npu_swiglu",))
    assert all("test_explain.py:" in line for line in mlp.lines)
    assert not found.of_rule("swiglu").refused


def test_a_node_is_followed_to_its_kernel() -> None:
    found = explained()
    fate = found.lineage.fate("silu")
    assert any("part of a match of swiglu" in step for step in fate.steps)
    assert any("npu_swiglu" in kernel for kernel in fate.kernels)
    assert "F.silu" in fate.source_text
    kernels = found.at_node("npu_swiglu").applied
    assert [k.rule for k in kernels if k.rule == "swiglu"] == ["swiglu"]
    assert {h.rule for h in found.at_node("rsqrt").applied} >= {"lift_rms_norm"}
    with pytest.raises(CannopyError, match="did you mean"):
        found.lineage.fate("npu_swigl")


def test_a_required_rule_that_applies_nowhere_is_unmet() -> None:
    found = explained(mlp=lambda b, y: F.gelu(b.gate(y)) * b.up(y), fusions={"swiglu": "require", "rms_norm": False})
    assert found.unmet == ["swiglu"]
    assert found.off == ["rms_norm"]
    text = "\n".join(line for line, _ in lines(found))
    assert "swiglu is required (--fusion swiglu=require) and applies nowhere" in text
    assert "rms_norm is switched off" in text
    assert text.count("F.gelu") == 1
    with pytest.raises(CannopyError, match="did you mean 'swiglu'"):
        found.of_rule("swigluu")
