"""Models with a state of linear attention or of a convolution: decode compiles behind a prompt read in eager mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Lfm2Config

from cannopy import Options, trial
from cannopy.frontend import sources
from cannopy.frontend.errors import CaptureError


def folder(path: Path) -> str:
    config = Lfm2Config(vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=1, max_position_embeddings=64, layer_types=["conv", "full_attention"])
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"dtype": "bfloat16"}), encoding="utf-8")
    return str(path)


def test_decode_holds_parity_and_prefill_is_refused(tmp_path: Path) -> None:
    loaded = sources.load(folder(tmp_path), batch=2)
    options = Options(cache_dir=tmp_path / "cache")
    found = trial.run(loaded, options, ("decode",), 4)
    assert found.parity is not None
    assert found.parity.failures == []
    assert found.reports["decode"].fusions["fused_infer_attention"] == 1
    with pytest.raises(CaptureError, match="read the prompt in eager mode first"):
        trial.run(loaded, options, ("prefill",), 1)
