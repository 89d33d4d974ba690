"""The serving form from the command line: run with parity, explain, and what cannot be asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from cannopy import cli
from cannopy.frontend.errors import ModelSourceError
from cannopy.frontend.serving import ServingCase
from cannopy.models.lively import lively_
from cannopy.models.qwen import Qwen, QwenConfig
from tests.models.pairs import QWEN

CALL = ["--form", "serving", "--batch", "3", "--next-n", "1", "--block-size", "16", "--prompt-tokens", "20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 checkpoint."""
    made = tmp_path_factory.mktemp("checkpoint")
    config = transformers.Qwen2Config(**QWEN, intermediate_size=96)
    lively_(transformers.Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16), 0).save_pretrained(made)
    return made


@pytest.mark.slow
def test_run_measures_results_cache_rows_and_untouched_bits(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 3
    arguments = ["--steps", str(steps), "--max-cache-len", "64", "--no-cache", "--json", "--out", str(tmp_path)]
    code = cli.main(["run", str(folder), *CALL, *arguments])
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (code, found["parity"]["failures"]) == (0, [])
    assert found["settings"]["prompts"] == [20, 15, 16]
    rows = {e["phase"]: e["compiled"]["tokens"] for e in found["parity"]["errors"]}
    tokens = 3 * 2 * steps
    assert rows == {
        "prefill logits": 3, "prefill hidden": 51, "prefill cache key": 102, "prefill cache value": 102,
        "decode logits": tokens, "decode hidden": tokens, "decode cache key": 2 * tokens,
        "decode cache value": 2 * tokens,
    }
    slots = (3 * 4 + 2 + 1) * 16
    writes = {(w["phase"], w["name"]): (w["rows"], w["outside"], w["changed"]) for w in found["parity"]["writes"]}
    assert writes["prefill", "key"] == (2 * 64, 2 * (slots - 64), 0)
    assert writes["decode", "value"] == (2 * tokens, 2 * (steps * slots - tokens), 0)
    assert [len(row) for row in found["tokens"]] == [1 + 2 * steps] * 3
    assert "rows outside the step" in captured.err
    assert "Rows of the cache" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert all(phase["cache_copies"] == 0 for phase in found["phases"].values())


def test_explain_takes_the_form(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(folder), *CALL, "--offline", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    assert sum(hit["rule"] == "swiglu" for hit in hits) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen2.5", "--next-n", "1"], "drafts (next_n) belong to the serving form: --form serving"),
        (["model.py:make", "--form", "serving"], "has the form that its factory gives it"),
        (["qwen2.5", "--form", "serving", "--next-n", "3", "--prompt-tokens", "253"],
         "a prompt of 253 tokens and a step of 4 tokens does not fit a cache of 256"),
        (["qwen2.5", "--form", "serving", "--block-size", "24"], "expected a multiple of 16"),
        (["qwen2.5", "--form", "serving", "--steps", "99", "--next-n", "1"],
         "96 prompt tokens and 99 steps of 2 are 294 tokens, and the blocks of a request hold 256"),
        (["qwen2.5", "--form", "paged"], "unknown form 'paged'"),
    ],
)
def test_what_cannot_be_asked_for(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["run", *arguments])
    except SystemExit as e:  # argparse
        code = int(e.code or 0)
    assert code != 0
    assert message in capsys.readouterr().err


def test_lengths_of_a_case_end_on_all_sides_of_a_block() -> None:
    model = Qwen(QwenConfig(**QWEN, head_dim=16, intermediate_size=96))
    one = ServingCase(model, 8, 40, 64, seed=3, next_n=2, block_size=16)
    assert one.prompt_lengths[:7] == [40, 31, 32, 33, 15, 16, 17]
    assert one.packed_tokens % 16 == 0
    assert 0 < one.packed_tokens - sum(one.prompt_lengths) <= 16
    (tokens, ends, slots, _), _ = one.inputs("prefill")
    assert ends.tolist() == torch.tensor(one.prompt_lengths).cumsum(0).tolist()
    assert (slots[sum(one.prompt_lengths):] < 16).all()
    assert len(set(slots.tolist())) == len(tokens)
    (tokens, lengths, table, slots, _), _ = one.inputs("decode")
    assert lengths.tolist() == [n + 3 for n in one.prompt_lengths]
    assert (len(tokens), table.shape, len(slots)) == (24, (8, 4), 24)
    with pytest.raises(ModelSourceError, match="a prompt of 62 tokens and a step of 3 need a cache of at least 65"):
        ServingCase(model, 1, 62, 64, next_n=2)
