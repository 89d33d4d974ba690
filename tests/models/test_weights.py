"""Published checkpoints: experts one by one, files by index, MTP layers apart, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cannopy.models.deepseek import Deepseek, DeepseekConfig, DeepseekDraft
from cannopy.models.lively import lively_
from cannopy.models.longcat import Longcat, LongcatConfig, LongcatDraft
from cannopy.models.weights import (
    WeightError,
    deepseek_draft,
    deepseek_target,
    load,
    longcat_draft,
    longcat_target,
)
from tests.models.pairs import DEEPSEEK, MLA

LONGCAT = {"vocab_size": 97, "hidden_size": 64, "num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 24,
           "n_routed_experts": 6, "zero_expert_num": 4, "moe_topk": 3, **MLA}
LAST = DEEPSEEK["num_hidden_layers"]


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with one tensor per expert and projection."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for e, rows in enumerate(tensor):
                found[f"{prefix}.{e}.gate_proj.weight"], found[f"{prefix}.{e}.up_proj.weight"] = rows.chunk(2)
        elif leaf == "down_proj":
            found |= {f"{prefix}.{e}.down_proj.weight": rows for e, rows in enumerate(tensor)}
        else:
            found[name] = tensor
    return {n: t.contiguous().clone() for n, t in found.items()}


def write(folder: Path, tensors: dict[str, Tensor], files: int = 1) -> Path:
    """A checkpoint of several files with their index."""
    weight_map = {}
    for i in range(files):
        part = {n: t for k, (n, t) in enumerate(sorted(tensors.items())) if k % files == i}
        save_file(part, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in mine.items())


def deepseek() -> Deepseek:
    return Deepseek(DeepseekConfig(**DEEPSEEK))


def deepseek_state(model: Deepseek, draft: DeepseekDraft) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    for name, tensor in draft.state_dict().items():
        place = {"embed_tokens": "embed_tokens", "lm_head": "shared_head.head"}.get(name.split(".")[0])
        inner = f"{place}.weight" if place else name.removeprefix("block.")
        state[f"model.layers.{LAST}.{inner}"] = tensor
    return published(state)


@pytest.mark.parametrize("files", [1, 3])
def test_deepseek_with_its_draft(tmp_path: Path, files: int) -> None:
    model = lively_(deepseek(), 3)
    draft = lively_(DeepseekDraft(model), 4)
    folder = write(tmp_path, deepseek_state(model, draft), files)
    again = deepseek()
    load(again, folder, lambda n: deepseek_target(n, LAST))
    other = DeepseekDraft(again)
    load(other, folder, lambda n: deepseek_draft(n, LAST), given=("embed_tokens.", "lm_head."))
    assert equal(again, model)
    assert equal(other, draft)


def test_longcat_with_its_draft(tmp_path: Path) -> None:
    model = lively_(Longcat(LongcatConfig(**LONGCAT)), 3)
    draft = lively_(LongcatDraft(model), 4)
    state = published(model.state_dict())
    for name, tensor in draft.state_dict().items():
        if name.startswith(("embed_tokens", "norm")):
            state[f"model.mtp.{name}"] = tensor.clone()
        elif not name.startswith("lm_head"):
            inner = name.replace("enorm.", "enorm.m.").replace("hnorm.", "hnorm.m.")
            place = "transformer_layer." if name.startswith("mlp") else ""
            state[f"model.mtp.layers.0.{place}{inner}"] = tensor.clone()
    folder = write(tmp_path, state)
    again = Longcat(LongcatConfig(**LONGCAT))
    load(again, folder, longcat_target)
    other = LongcatDraft(again)
    load(other, folder, longcat_draft, given=("lm_head.",))
    assert equal(again, model)
    assert equal(other, draft)


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(name)


def put(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__setitem__(name, torch.zeros(shape))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("model.norm.weight"), "model.norm.weight"),
        (drop("model.layers.1.mlp.experts.5.up_proj.weight"), "model.layers.1.mlp.experts.gate_up_proj"),
        (put("model.layers.1.mlp.experts.8.up_proj.weight", 24, 64), "8 experts"),
        (put("model.layers.0.self_attn.q_a_proj.bias", 48), "no parameter for model.layers.0.self_attn.q_a_proj.bias"),
        (put("model.norm.weight", 65), r"expected shape \[64\], found \[65\]"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[dict[str, Tensor]], None], reason: str) -> None:
    state = published(lively_(deepseek(), 3).state_dict())
    change(state)
    with pytest.raises(WeightError, match=reason):
        load(deepseek(), write(tmp_path, state))


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no safetensors"):
        load(deepseek(), tmp_path)
