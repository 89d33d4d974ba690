"""The example examples/mtp.py: with drafts the text is that of greedy decoding, in fewer steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cannopy
from cannopy import api
from cannopy.backend.host.activate import activate
from cannopy.frontend.generation import Phase
from cannopy.frontend.state import prepare_state
from cannopy.models import zoo
from cannopy.models.deepseek import Deepseek, DeepseekConfig, DeepseekDraft
from cannopy.models.lively import lively_
from cannopy.models.longcat import Longcat, LongcatConfig
from cannopy.models.requests import Requests
from cannopy.models.serving import ServingModel
from tests.models.pairs import DEEPSEEK, MLA

FILE = Path(__file__).resolve().parents[2] / "examples" / "mtp.py"
VOCABULARY = 6


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mtp_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def deepseek() -> ServingModel:
    sizes = DEEPSEEK | {"vocab_size": VOCABULARY, "num_hidden_layers": 2}
    return lively_(Deepseek(DeepseekConfig(**sizes)), 0).eval()


def longcat() -> ServingModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_layers": 1, "ffn_hidden_size": 96, "moe_topk": 3,
             "expert_ffn_hidden_size": 24, "n_routed_experts": 6, "zero_expert_num": 4, **MLA}
    return lively_(Longcat(LongcatConfig(**sizes)), 0).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "next_n"), [(deepseek, 2), (longcat, 1)])
def test_drafts_do_not_change_the_text(example: ModuleType, make, next_n: int) -> None:
    length = 8
    run = example.speculate(make(), 3, next_n, length, cannopy.Options(use_cache=False, verify=False))
    assert sorted(method for _, method in run.compiled) == ["decode", "decode", "prefill", "prefill"]
    assert all(compiled.report.cache_copies == 0 for compiled in run.compiled.values())
    assert 0 < run.accepted < run.proposed
    steps = run.proposed // (3 * next_n)
    assert sum(len(text) for text in run.texts) == 3 + 8 + 13 + 3 * (1 + steps) + run.accepted


class Eager:
    """Stands for a compiled method."""

    def __init__(self, model, method, args, options):
        self.call = getattr(model, method)

    def __call__(self, *args):
        return self.call(*args)


def test_proposals_are_those_of_a_draft_that_has_read_the_whole_text(example, monkeypatch) -> None:
    monkeypatch.setattr(cannopy, "compile", Eager)
    target = deepseek()
    run = example.speculate(target, 3, 3, 9, cannopy.Options())
    assert run.accepted > 0
    for text, proposed in zip(run.texts, run.next, strict=True):
        tokens = torch.tensor(text)
        own, drafts = (Requests(m, 1, 4, 16) for m in (target, run.draft))
        with torch.no_grad():
            _, hidden = target.prefill(*own.prefill_inputs([tokens[:-1]]), own.cache)
            _, ends, slots = drafts.prefill_inputs([tokens[1:]])
            logits, hidden = run.draft.prefill(tokens[1:], hidden, ends, slots, drafts.cache)
            for guess in proposed:
                assert guess == logits[-1].argmax()
                packed, *rest = drafts.decode_inputs(guess[None, None])
                logits, hidden = run.draft.decode(packed, hidden[-1:], *rest, drafts.cache)


def test_a_wrong_text_is_noticed(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cannopy, "compile", Eager)
    monkeypatch.setattr(example, "greedy", lambda *_: [[0] * 99] * 3)
    with pytest.raises(SystemExit, match="the texts differ"):
        example.speculate(deepseek(), 3, 3, 8, cannopy.Options())


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("name", "attention"), [("deepseek-v3.2", "sparse_flash_attention"),
                                                 ("deepseek-r1", "fused_infer_attention")])
def test_a_draft_of_published_head_sizes_fuses_as_a_layer_of_its_target(
    name: str, attention: str, phase: Phase
) -> None:
    """(The residual of a prefill's last norm is not computed where the answers are picked first.)"""
    activate()
    target = zoo.build_serving(zoo.preset(name, "tiny"))
    assert isinstance(target, Deepseek)
    draft = lively_(DeepseekDraft(target).bfloat16(), 1).eval().requires_grad_(False)
    requests = Requests(draft, 3, 1, 128)
    requests.lengths = [5, 64, 126] if phase == "decode" else [0, 0, 0]
    tokens = torch.zeros(3, 2, dtype=torch.long)
    inputs = requests.decode_inputs(tokens) if phase == "decode" else requests.prefill_inputs(list(tokens), 2)
    previous = torch.randn(len(inputs[0]), target.config.hidden_size).bfloat16()
    args = (inputs[0], previous, *inputs[1:], requests.cache)
    prepare_state(draft, args, {})
    _, done = api.lower(draft, phase, args, {}, cannopy.Options(phase=phase, verify=False), {})
    counts = done.log.counts()
    key_side = "kv_rmsnorm_rope_cache" if (name, phase) == ("deepseek-r1", "prefill") else "mla_prolog"
    assert {rule: counts.get(rule) for rule in (attention, key_side, "moe_experts", "moe_gating_top_k")} == {
        attention: 1, key_side: 1, "moe_experts": 1, "moe_gating_top_k": 1}
