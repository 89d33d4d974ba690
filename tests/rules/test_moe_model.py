"""The rules of the MoE on a whole stock DeepSeek-V3.2: the same picks, logits within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cannopy.backend.host import kernels
from cannopy.fusion_rules.engine.apply import Log, apply
from cannopy.fusion_rules.engine.rule import Context
from cannopy.fusion_rules.rewrite import moe_experts, moe_experts_batched, moe_gating_top_k, swiglu
from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.verifier import Verifier
from tests.rules import support

RULES = (*moe_gating_top_k.RULES, *moe_experts.RULES, *moe_experts_batched.RULES, *swiglu.RULES)
SIZES = {
    "hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "index_head_dim": 32, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 4, "num_hidden_layers": 3,
}


class Picks(torch.fx.Interpreter):
    """Runs a program and keeps the sorted expert ids that each router chose."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm)
        self.ids: list[torch.Tensor] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        name = str(n.target)
        if name.startswith("npu.npu_moe_gating_top_k"):
            self.ids.append(value[1].long().sort(-1).values)
        elif name == "aten.topk.default" and value[0].shape[-1] == 4 and n.args[0].meta["val"].shape[-1] == 16:  # type: ignore[union-attr]
            self.ids.append(value[1].sort(-1).values)
        return value


def run(case: support.Case, program: Program) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(logits, ids per router)."""
    values: dict[str, torch.Tensor] = {}
    for spec in program.inputs:
        tensor = compile_path(spec.source)(case.model, case.args, case.kwargs)
        values[spec.name] = tensor.clone() if spec.mutated else tensor
    for entry in program.weights:
        values[entry.name] = entry.build([values[s] for s in entry.sources])
    names = [n.name for n in program.gm.graph.nodes if n.op == "placeholder"]
    picks = Picks(program.gm)
    with torch.no_grad():
        outputs = picks.run(*(values[n] for n in names))
    return outputs[0], picks.ids


def lively(dtype: torch.dtype) -> torch.nn.Module:
    """A model whose correction biases spread the experts, so that bf16 rounding does not decide a choice."""
    model = support.build(dtype, **SIZES)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "batch", "past", "dtype"), [
    (1, 1, 20, torch.bfloat16), (24, 1, 0, torch.bfloat16), (1, 3, 8, torch.float32),
], ids=["decode bf16", "prefill bf16", "batched decode fp32"])
def test_whole_model(tokens: int, batch: int, past: int, dtype: torch.dtype) -> None:
    kernels.register()
    case = support.case(lively(dtype), tokens, batch, past)
    program, log = support.fresh(case), Log()
    verifier = Verifier(program)
    apply(RULES, Context(program, Editor(program.gm)), log)
    normalise.run(program)
    verifier.verify(program)
    assert log.counts() == {"moe_gating_top_k": 2, "moe_experts": 2, "swiglu": 3}
    assert log.misses == []
    assert len(program.weights) == 2 * 2 + 3
    logits, ids = run(case, program)
    old_logits, old_ids = run(case, case.program)
    assert len(ids) == len(old_ids) == 2
    assert [int((a != b).sum()) for a, b in zip(ids, old_ids, strict=True)] == [0, 0]
    assert ids[0].unique(dim=0).shape[0] > 1 or tokens * batch == 1
    difference = (logits.double() - old_logits.double()).norm() / old_logits.double().norm()
    # Each of three layers and the head rounds to bf16 once or twice on its own.
    assert difference < (2.0**-6 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(logits.argmax(-1), old_logits.argmax(-1))
