"""DeepSeek's draft module computes what the MTP layer of `transformers` computes; LongCat's, what its parts compute."""

from __future__ import annotations

import torch
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from cannopy.models.deepseek import DeepseekDraft
from cannopy.models.lively import lively_
from cannopy.models.longcat import LongcatDraft
from cannopy.models.requests import Requests
from cannopy.models.weights import deepseek_draft, fill
from tests.models.pairs import DEEPSEEK, deepseek_v3, longcat


def test_deepseek_draft() -> None:
    pair = deepseek_v3()
    stock = lively_(MtpLayer(pair.stock.config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, layer_idx=2), 1).eval()
    draft = DeepseekDraft(pair.own).eval()
    last = DEEPSEEK["num_hidden_layers"]
    renamed = {
        f"model.layers.{last}.{n.replace('mtp_block.', '').replace('post_norm', 'shared_head.norm')}": t
        for n, t in stock.state_dict().items()
    }
    fill(draft, renamed.items(), lambda n: deepseek_draft(n, last), given=("embed_tokens.", "lm_head."))
    tokens, previous = torch.randint(0, 97, (9,)), torch.randn(9, 64)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        embedded = pair.stock.get_input_embeddings()(tokens)
        angles = pair.stock.model.rotary_emb(embedded[None], torch.arange(9)[None])
        wanted = pair.stock.lm_head(stock(embedded[None], previous[None], angles, causal, None, None))[0]
        engine = Requests(draft, 1)
        first, hidden = draft.prefill(*_with(previous[:5], engine.prefill_inputs([tokens[:5]])), engine.cache)
        second, _ = draft.decode(*_with(previous[5:], engine.decode_inputs(tokens[None, 5:])), engine.cache)
    assert hidden.shape == (5, 64)
    torch.testing.assert_close(torch.cat((first, second)), wanted[4:], rtol=1e-4, atol=1e-4)


def test_longcat_draft_decodes_as_it_prefills() -> None:
    pair = longcat()
    draft = lively_(LongcatDraft(pair.own), 1).eval()
    tokens, previous = torch.randint(0, 97, (9,)), torch.randn(9, 64)
    with torch.no_grad():
        whole = Requests(draft, 1)
        wanted, _ = draft.prefill(*_with(previous, whole.prefill_inputs([tokens])), whole.cache)
        engine = Requests(draft, 1)
        draft.prefill(*_with(previous[:6], engine.prefill_inputs([tokens[:6]])), engine.cache)
        logits, _ = draft.decode(*_with(previous[6:], engine.decode_inputs(tokens[None, 6:])), engine.cache)
    torch.testing.assert_close(logits[-1:], wanted, rtol=1e-4, atol=1e-4)


def _with(previous: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0], previous, *inputs[1:])
