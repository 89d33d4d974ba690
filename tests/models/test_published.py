"""Checkpoint folders in serving form: weights that `transformers` has written, configurations with other math."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cannopy
from cannopy.frontend import sources
from cannopy.frontend.errors import ModelSourceError
from cannopy.models import published
from cannopy.models.longcat import Longcat
from cannopy.models.published import PublishedConfigError
from cannopy.models.serving import ServingModel
from tests.models.pairs import DEEPSEEK, INDEX, PAIRS

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0}


DEEPSEEK_V3 = {"model_type": "deepseek_v3", **DEEPSEEK, "n_shared_experts": 1, "norm_topk_prob": True,
               "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
QWEN3 = {"model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN2 = {"model_type": "qwen2", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
LONGCAT = {"model_type": "longcat_flash", "vocab_size": 97, "hidden_size": 64, "num_layers": 1, "ffn_hidden_size": 96,
           "expert_ffn_hidden_size": 24, "n_routed_experts": 6, "zero_expert_num": 4, "moe_topk": 3, "q_lora_rank": 48,
           "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
           "num_attention_heads": 4, "routed_scaling_factor": 6.0, "rms_norm_eps": 1e-5, "rope_theta": 1e7}
DEEPSEEK_V32 = {**DEEPSEEK_V3, "model_type": "deepseek_v32", **INDEX}
QWEN3_DENSE = {**QWEN2, "model_type": "qwen3", "head_dim": 16}
NEEDED = {"deepseek_v3": DEEPSEEK_V3, "qwen3_moe": QWEN3, "qwen2": QWEN2, "longcat_flash": LONGCAT}


@pytest.mark.parametrize("name", PAIRS)
def test_a_folder_gives_the_model_of_its_weights(name: str, tmp_path: Path) -> None:
    pair = PAIRS[name]()
    pair.stock.save_pretrained(tmp_path)
    loaded = sources.load(str(tmp_path), form="serving", batch=2, next_n=1, block_size=16)
    assert loaded.notes == ()
    assert isinstance(loaded.model, ServingModel)
    assert type(loaded.model) is type(pair.own)
    found, wanted = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (loaded.model, pair.own))
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []
    with torch.no_grad():
        for phase in ("prefill", "decode"):
            assert loaded.case is not None
            args, _ = loaded.case.filled(phase)
            logits, _ = getattr(loaded.model, loaded.method_of(phase))(*args)
            expected, _ = getattr(pair.own, phase)(*args)
            torch.testing.assert_close(logits, expected)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    config = {**DEEPSEEK_V3, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = sources.load(str(tmp_path), form="serving")
    assert loaded.notes == (f"{tmp_path} has no safetensors: random weights, seed 0.",)
    assert next(loaded.model.parameters()).dtype == torch.float16
    empty = sources.load(str(tmp_path), form="serving", weights=False, dtype="bf16")
    assert all(p.is_meta for p in empty.model.parameters())
    args, _ = empty.make_inputs("decode")
    assert all(value.is_meta for value in args[:4])


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    PAIRS["qwen2.5"]().stock.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelSourceError, match=r"the checkpoint has no .* model\.layers\.2\."):
        sources.load(str(tmp_path), form="serving")


def test_published_spellings_of_longcat_and_yarn() -> None:
    config = {**LONGCAT, "attention_method": "MLA", "mla_scale_q_lora": True, "rope_scaling": None}
    model = published.read(config).build()
    assert isinstance(model, Longcat)
    assert model.config.rope == {"theta": 1e7}
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
               "mscale": 1.0, "mscale_all_dim": 1.0}
    scaled = published.read(config | {"rope_scaling": scaling}).build()
    assert isinstance(scaled, Longcat)
    assert scaled.config.rope == {"theta": 1e7, "factor": 40, "original_positions": 4096, "beta_fast": 32,
                                  "beta_slow": 1, "mscale_all_dim": 1.0}


def test_other_names_of_transformers_and_entries_of_other_families() -> None:
    longcat = {k: v for k, v in LONGCAT.items() if k not in ("moe_topk", "n_routed_experts")}
    model = published.read(longcat | {"num_experts_per_tok": 2, "num_local_experts": 5, "num_hidden_layers": 2}).build()
    assert isinstance(model, Longcat)
    assert (model.config.moe_topk, model.config.n_routed_experts, model.config.num_layers) == (2, 5, 1)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    dense = published.read(QWEN3_DENSE | experts).build()
    assert dense.get_submodule("model.layers.0.mlp.gate_proj") is not None
    sparse = published.read({k: v for k, v in QWEN3.items() if k != "num_experts"} | {"num_local_experts": 3}).build()
    assert sparse.get_parameter("model.layers.0.mlp.experts.down_proj").shape[0] == 3
    both = DEEPSEEK_V3 | {"rope_parameters": YARN, "rope_scaling": {k.replace("rope_", ""): v for k, v in YARN.items()}}
    assert published.read(both).build() is not None


REFUSED = [
    (DEEPSEEK_V3, {"q_lora_rank": None}, "q_lora_rank: expected the rank of the queries, found none"),
    (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias: expected False, found True"),
    (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method: expected 'noaux_tc', found 'greedy'"),
    (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave: expected True, found False"),
    (DEEPSEEK_V3, {"rope_parameters": YARN | {"mscale": 0.7}}, "expected mscale equal to mscale_all_dim"),
    (DEEPSEEK_V3, {"rope_parameters": {"rope_type": "llama3"}}, "rope_type: expected default or yarn, found llama3"),
    (DEEPSEEK_V3, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "YaRN without original_positions"),
    (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "bf16, fp16 or fp32, found fp8"),
    (DEEPSEEK_V3, {"model_type": "deepseek_v2"}, "model_type: expected one of deepseek_v3, .* found deepseek_v2"),
    (QWEN3, {"use_sliding_window": True}, "use_sliding_window: expected False, found True"),
    (QWEN3, {"mlp_only_layers": [0]}, r"mlp_only_layers: expected \[\] or None, found \[0\]"),
    (QWEN3, {"layer_types": ["sliding_attention"]}, "found sliding windows"),
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
    (DEEPSEEK_V3, {"model_type": "deepseek_v32"}, "index_topk: expected how many keys the indexer chooses, found none"),
    (QWEN3, {"rope_theta": None}, "rope_theta: expected the base of the angles, found none"),
    (QWEN3, {"vocab_size": None}, "the configuration is not complete: .*vocab_size"),
    (QWEN2, {"is_causal": False}, "is_causal: expected True, found False"),
    (QWEN2, {"architectures": ["Qwen2ForSequenceClassification"]}, "architectures: .* Qwen2ForSequenceClassification"),
    (DEEPSEEK_V3, {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0}}, "mscale_all_dim above 0, found 0"),
    (DEEPSEEK_V3, {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
     "rope_scaling: expected what rope_parameters says"),
    (DEEPSEEK_V3, {"num_local_experts": 4}, "num_local_experts: expected n_routed_experts, 8, found 4"),
    (DEEPSEEK_V32, {"num_experts": 4}, "num_experts: expected n_routed_experts, 8, found 4"),
    (DEEPSEEK_V32, {"mlp_layer_types": ["sparse", "dense", "sparse"]},
     r"mlp_layer_types: expected \['dense', 'sparse', 'sparse'\] or None, found"),
    (DEEPSEEK_V32, {"layer_types": ["indexed_attention"] * 2 + ["full_attention"]}, "layer_types: expected"),
    (DEEPSEEK_V32, {"index_head_dim": 4}, "qk_rope_head_dim: expected at most 4, the indexer's heads, found 8"),
    (DEEPSEEK_V3, {"n_group": 3}, "n_group: expected a divisor of 8, the experts, found 3"),
    (DEEPSEEK_V3, {"n_group": 8}, "n_group: expected at most 4, two experts in each, found 8"),
    (DEEPSEEK_V3, {"topk_group": 5}, "topk_group: expected at most 4, the groups, found 5"),
    (DEEPSEEK_V3, {"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most 4, .* found 5"),
    (DEEPSEEK_V3, {"n_shared_experts": 0}, "n_shared_experts: expected a whole number from 1 on, found 0"),
    (DEEPSEEK_V3, {"hidden_size": "64"}, "hidden_size: expected a whole number from 1 on, found '64'"),
    (LONGCAT, {"num_experts_per_tok": 2}, "num_experts_per_tok: expected moe_topk, 3, found 2"),
    (LONGCAT, {"qk_head_dim": 12}, "qk_head_dim: expected 24 or None, found 12"),
    (LONGCAT, {"num_hidden_layers": 6}, "num_hidden_layers: expected 2 or 1 or None, found 6"),
    (LONGCAT, {"moe_topk": 11}, "moe_topk: expected at most 10, all experts, found 11"),
    (QWEN2, {"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 4, the heads, found 3"),
    (QWEN3, {"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most 4, the experts, found 5"),
    (QWEN3, {"num_experts": 0}, "the configuration is not complete: expected intermediate_size"),
    (QWEN3_DENSE, {"head_dim": None}, "head_dim: expected the size of a head, found none"),
]


@pytest.mark.parametrize("family", NEEDED)
def test_no_size_is_filled_in_from_another_checkpoint(family: str) -> None:
    config = NEEDED[family]
    published.read(config)
    for name in config.keys() - {"model_type"}:
        for incomplete in ({k: v for k, v in config.items() if k != name}, {**config, name: None}):
            with pytest.raises(PublishedConfigError, match=f"{name}.*(expected|found none)"):
                published.read(incomplete)


def test_every_missing_size_is_named() -> None:
    incomplete = {k: v for k, v in LONGCAT.items() if k not in ("moe_topk", "v_head_dim")}
    with pytest.raises(PublishedConfigError, match="expected v_head_dim, moe_topk, found none"):
        published.read(incomplete)


@pytest.mark.parametrize(("config", "change", "reason"), REFUSED, ids=[next(iter(c)) + str(i) for i, (_, c, _)
                                                                       in enumerate(REFUSED)])
def test_other_math_is_refused(config: dict[str, Any], change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    published.read(config)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelSourceError, match=f"has no serving form: .*{reason}.*; --form stock takes it"):
        sources.load(str(tmp_path), form="serving")


def test_the_example_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager mode: what it calls compiled is tested elsewhere."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    block = page.partition("```python\n")[2].partition("```")[0]

    def eager(model: Any, method: str, args: Any, options: cannopy.Options) -> Any:
        assert options.phase == method
        return getattr(model, method)

    monkeypatch.setattr(cannopy, "compile", eager)
    names: dict[str, Any] = {}
    with torch.no_grad():
        exec(block, names)
    assert names["logits"].shape == (2, 512)
    assert names["requests"].lengths == [41, 24]
