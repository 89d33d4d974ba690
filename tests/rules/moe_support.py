"""Small programs for the rules of the MoE: traced from functions or captured from the stock MoE block."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the npu ops)

from cannopy.backend.host import kernels
from cannopy.frontend.capture import capture
from cannopy.fusion_rules.engine.apply import Log, apply
from cannopy.fusion_rules.engine.rule import Context, Rule
from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import program_of

Tensor = torch.Tensor
BLOCK = {
    "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 4, "intermediate_size": 64,
}


@dataclasses.dataclass
class Traced:
    """A normalised program and the values of its placeholders by name."""

    program: Program
    values: dict[str, Tensor]

    def fused(self, rules: Sequence[Rule], target: str = "atlas-a3") -> tuple[Traced, Log]:
        """A copy of this after ``rules``, normalised and verified."""
        program, log = copy.deepcopy(self.program), Log()
        verifier = Verifier(program)
        apply(rules, Context(program, Editor(program.gm), target), log)
        normalise.run(program)
        verifier.verify(program)
        return Traced(program, self.values), log

    def run(self) -> list[Tensor]:
        """The program's outputs; derived weights are built from their recipes."""
        kernels.register()
        values = dict(self.values)
        for entry in self.program.weights:
            values[entry.name] = entry.build([values[s] for s in entry.sources])
        names = [n.name for n in self.program.gm.graph.nodes if n.op == "placeholder"]
        self.program.gm.recompile()
        with torch.no_grad():
            return list(self.program.gm(*(values[n] for n in names)))

    def calls(self, name: str) -> list[dict[str, Any]]:
        """The keyword arguments of every call of ``name``, for example "npu_swiglu"."""
        return [
            dict(n.kwargs)
            for n in self.program.gm.graph.nodes
            if n.op == "call_function" and getattr(n.target, "__name__", "").split(".")[0] == name
        ]

    def operations(self) -> list[str]:
        """The called operations in graph order."""
        return [str(n.target) for n in self.program.gm.graph.nodes if n.op == "call_function"]


def trace(fn: Callable[..., Any], *inputs: Tensor, parameters: Sequence[int] = ()) -> Traced:
    """The normalised graph of ``fn``; inputs numbered in ``parameters`` are bound to parameters of the model."""
    program = program_of(fn, *inputs)
    for i in parameters:
        program.inputs[i] = dataclasses.replace(program.inputs[i], kind="parameter", source=f"self.p{i}")
    normalise.run(program)
    program.gm.graph.eliminate_dead_code()
    names = [s.name for s in program.inputs]
    return Traced(program, dict(zip(names, inputs, strict=True)))


def block(dtype: torch.dtype, experts: str = "grouped_mm", seed: int = 0, **sizes: Any) -> torch.nn.Module:
    """The stock MoE block of DeepSeek-V3.2 with lively weights; the router's bias is fp32 as in a loaded model."""
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32MoE

    config = DeepseekV32Config(**{**BLOCK, **sizes})
    config._experts_implementation = experts
    module = DeepseekV32MoE(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        bias = module.gate.e_score_correction_bias
        bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))
    module.to(dtype)
    module.gate.e_score_correction_bias = bias.float()
    return module.eval()


def captured(module: torch.nn.Module, x: Tensor) -> Traced:
    """The normalised graph of ``module(x)`` as the front end captures it."""
    program = capture(module, "forward", (x,), {})
    normalise.run(program)
    scope = {"self": module, "args": (x,), "kwargs": {}}
    return Traced(program, {s.name: eval(s.source, scope) for s in program.inputs})


def tokens(batch: int, length: int, hidden: int, dtype: torch.dtype, seed: int = 7) -> Tensor:
    """Normal activations [batch, length, hidden]."""
    return torch.randn((batch, length, hidden), generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of ``wanted``, in float64."""
    return float((found.double() - wanted).norm() / wanted.norm())


def assert_refused(before: Traced, rules: Sequence[Rule], reason: str) -> Traced:
    """No rule applies, one says ``reason``, and nothing has changed; the program afterwards."""
    after, log = before.fused(rules)
    assert log.hits == []
    assert [m.reason for m in log.misses if reason in m.reason], [m.reason for m in log.misses]
    assert after.program.weights == []
    assert after.operations() == before.operations()
    return after
