"""MODEL as zoo name, Hugging Face folder and path.py:factory; random weights that hide nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from cannopy.frontend import sources
from cannopy.frontend.capture import capture
from cannopy.frontend.errors import CaptureError, ModelSourceError
from cannopy.frontend.generation import GenerationCase
from cannopy.frontend.state import prepare_state
from cannopy.models import zoo
from cannopy.models.lively import lively_

from .models import mini_v32

PUBLISHED = {
    # deepseek-ai/DeepSeek-V3.2-Exp, config.json
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def test_presets_name_the_published_sizes() -> None:
    from transformers import DeepseekV32Config

    config = DeepseekV32Config(**zoo.preset("deepseek-v3.2", "full").config)
    assert {k: getattr(config, k) for k in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("size", ["tiny", "small", "full"])
def test_presets_keep_to_the_limits_of_the_fused_operators(size: str) -> None:
    from transformers import DeepseekV32Config

    preset = zoo.preset("deepseek-v3.2", size)
    c = DeepseekV32Config(**preset.config)
    assert c.hidden_size in (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
    assert c.num_attention_heads in (1, 2, 4, 8, 16, 32, 64, 128)
    assert (c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim) == (1536, 512, 64)
    assert (c.qk_nope_head_dim, c.v_head_dim, c.index_head_dim) == (128, 128, 128)
    assert c.index_n_heads <= 64
    assert c.n_routed_experts % c.n_group == 0
    assert preset.prefill_tokens < preset.max_cache_len <= c.max_position_embeddings
    assert preset.prefill_tokens > c.index_topk, "selection must matter"


def test_zoo_model_with_cases() -> None:
    loaded = sources.load("deepseek-v3.2", size="tiny", seed=1, batch=2)
    assert loaded.name == "deepseek-v3.2 (tiny)"
    assert any("random weights, seed 1" in n for n in loaded.notes)
    assert loaded.method == "forward"
    case = loaded.case
    assert case is not None
    assert not loaded.model.training
    (ids,), kwargs = loaded.make_inputs("prefill")
    assert ids.shape == (2, 96)
    assert kwargs["cache"].layers[0].max_cache_len == 256
    assert kwargs["use_cache"] is True
    (one,), _ = loaded.make_inputs("decode")
    assert one.shape == (2, 1)
    assert torch.equal(case.ids("decode", 1), case.ids("decode", 1))
    assert not torch.equal(case.ids("prefill")[:, :8], torch.cat([case.ids("decode", i) for i in range(8)], 1))
    dtypes = {p.dtype for n, p in loaded.model.named_parameters() if not n.endswith("mlp.gate.weight")}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    ("spec", "size", "message"),
    [
        ("deepsek-v3.2", None, "did you mean 'deepseek-v3.2'"),
        ("deepseek-v3.2", "tinny", "did you mean 'tiny'"),
        ("no/such/folder", None, "'no/such/folder': no folder of that name exists"),
        ("model.py", None, "model.py:FUNCTION"),
        ("absent.py:make", None, "absent.py does not exist"),
    ],
)
def test_unknown_names(spec: str, size: str | None, message: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        sources.load(spec, size=size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_dtype() -> None:
    with pytest.raises(ModelSourceError, match="did you mean 'bf16'"):
        sources.load("deepseek-v3.2", dtype="bf61")


def test_missing_transformers_is_one_line_with_the_cure(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from cannopy.frontend import sources\n"
        "from cannopy.frontend.errors import ModelSourceError\n"
        "for spec in sys.argv[1:]:\n"
        "    try: sources.load(spec)\n"
        "    except ModelSourceError as e: print(e)\n"
    )
    command = [sys.executable, "-c", code, "deepseek-v3.2", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "transformers" in line]
    assert lines == ["transformers is not installed: pip install 'transformers>=5.24'"] * 2


def test_folder_with_and_without_weights(tmp_path: Path) -> None:
    original = mini_v32()
    original.save_pretrained(tmp_path / "full")
    loaded = sources.load(str(tmp_path / "full"))
    assert loaded.notes == ()
    assert loaded.name == "full"
    state = original.state_dict()
    found = loaded.model.state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in state.items())
    assert type(loaded.model) is type(original)

    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tmp_path / "full" / "config.json").read_text())
    random = sources.load(str(bare), dtype="fp32", seed=4)
    assert random.notes == (f"{bare} has no safetensors: random weights, seed 4.",)
    assert {p.dtype for p in random.model.parameters()} == {torch.float32}
    (ids,), kwargs = random.make_inputs("prefill")
    with torch.no_grad():
        assert random.model(ids, **kwargs).logits.isfinite().all()
    with pytest.raises(ModelSourceError, match="one size"):
        sources.load(str(bare), size="tiny")
    empty = sources.load(str(bare), weights=False)
    assert empty.notes == ("no weights (meta device): compiles, but cannot run.",)
    assert all(p.is_meta for p in empty.model.parameters())
    assert [p.shape for p in empty.model.parameters()] == [p.shape for p in original.parameters()]


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"no config\.json"):
        sources.load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ModelSourceError, match="nonesuch"):
        sources.load(str(tmp_path))


FACTORY = """
import torch
from dataclasses import dataclass
from torch import nn

@dataclass
class Options:
    width: int = 4

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(Options().width, 3)
    def decode(self, x, *, scale=1.0):
        return self.lin(x) * scale

def plain():
    return Model(), "decode", (torch.ones(2, 4),)

def named(phase, seed):
    return Model(), "decode", ((torch.full((1 if phase == "decode" else 5, 4), float(seed)),), {"scale": 2.0})

def wrong():
    return Model(), (torch.ones(1),)

def absent():
    return Model(), "encode", ()
"""


def test_factories(tmp_path: Path) -> None:
    file = tmp_path / "my model.py"
    file.write_text(FACTORY)
    loaded = sources.load(f"{file}:plain")
    assert (loaded.method, loaded.case, loaded.name) == ("decode", None, "my model:plain")
    args, kwargs = loaded.make_inputs("decode")
    assert args[0].shape == (2, 4)
    assert kwargs == {}
    named = sources.load(f"{file}:named", phase="decode", seed=7)
    (x,), kwargs = named.make_inputs("decode")
    assert x.tolist() == [[7.0] * 4]
    assert kwargs == {"scale": 2.0}
    (again,), _ = named.make_inputs("decode")
    assert again is not x
    assert named.make_inputs("prefill")[0][0].shape == (5, 4)
    for name, message in [
        ("wrong", r"must return \(module, method name, inputs\).*returned \(Model, tuple\)"),
        ("absent", "Model has no method 'encode'"),
        ("plan", "did you mean 'plain'"),
    ]:
        with pytest.raises(ModelSourceError, match=message):
            sources.load(f"{file}:{name}")


def test_a_broken_factory_file_raises_its_own_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0")
    before = set(sys.modules)
    with pytest.raises(ZeroDivisionError):
        sources.load(f"{file}:make")
    assert set(sys.modules) == before


def test_lively_weights_leave_nothing_neutral() -> None:
    model = mini_v32(torch.float32)
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        assert p.isfinite().all(), name
        assert p.unique().numel() > p.numel() // 2, f"{name} is constant"
        if "norm" in name and name.endswith("weight"):
            assert 0.5 <= p.min() < 0.8 < 1.3 < p.max() <= 1.7
        elif name.endswith("correction_bias"):
            assert 0.05 < p.std() < 0.5
        elif p.dim() >= 2 and "embed" not in name:
            assert 0.8 < p.std() * p.shape[-1] ** 0.5 < 1.2, name
    case = GenerationCase(model, batch=2, prefill_tokens=24, max_cache_len=32)
    outs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _i, out: outs.append(out))
    (ids,), kwargs = case.inputs("prefill")
    with torch.no_grad():
        logits = model(ids, **kwargs).logits
    assert len(outs) == 2
    assert all(0.5 < out.std() < 5 for out in outs)
    assert 0.5 < logits.std() < 3


def test_lively_weights_depend_on_seed_and_name_only() -> None:
    def weights(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in lively_(model, seed).state_dict().items()}

    torch.manual_seed(1)
    one = weights(mini_v32(), 0)
    torch.manual_seed(2)
    two = weights(mini_v32(num_hidden_layers=3), 0)
    assert all(torch.equal(two[k], v) for k, v in one.items())
    other = weights(mini_v32(), 1)
    assert [k for k, v in one.items() if torch.equal(other[k], v)] == []


def test_layers_with_a_window_keep_all_tokens() -> None:
    """A cache of transformers that keeps the window alone counts its tokens in Python, which no graph can."""
    from transformers import MistralConfig, MistralForCausalLM, StaticCache

    config = MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, sliding_window=5)
    case = GenerationCase(lively_(MistralForCausalLM(config), 0).eval(), 2, 8, 16)
    ours, theirs = case.new_cache(), StaticCache(config=config, max_cache_len=16)
    for ids in (case.ids("prefill"), case.ids("decode"), case.ids("decode", 1)):
        with torch.no_grad():
            found, wanted = (case.model(*args, **kwargs).logits
                             for args, kwargs in (case.prefill(ids, cache) for cache in (ours, theirs)))
        torch.testing.assert_close(found, wanted)
    assert [layer.keys.shape[2] for layer in ours.layers] == [16, 16]
    assert [layer.keys.shape[2] for layer in theirs.layers] == [5, 5]
    args, kwargs = case.inputs("decode")
    prepare_state(case.model, args, kwargs)
    written = [spec.source for spec in capture(case.model, "forward", args, kwargs).inputs if spec.mutated]
    assert len([path for path in written if path.endswith((".keys", ".values"))]) == 4


def test_state_that_is_noted_in_python_is_refused_with_its_cure() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=1, max_position_embeddings=64, layer_types=["conv", "full_attention"])
    model = Lfm2ForCausalLM(config).eval()
    args, kwargs = GenerationCase(model, 1, 8, 16).inputs("prefill")
    prepare_state(model, args, kwargs)
    with pytest.raises(CaptureError, match="read the prompt in eager mode first, and compile the decode step"):
        capture(model, "forward", args, kwargs)


def test_a_model_without_static_cache_is_refused() -> None:
    from transformers import DeepseekV4Config, MiniMaxConfig, MiniMaxForCausalLM

    model = nn.Linear(1, 1)
    model.config = DeepseekV4Config(num_hidden_layers=1)  # type: ignore[assignment]
    with pytest.raises(ModelSourceError, match="no static cache for layers of the type 'heavily_compressed_attention'"):
        GenerationCase(model).new_cache()
    own = MiniMaxForCausalLM(MiniMaxConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=64, num_local_experts=2, layer_types=["full_attention"]))
    args, kwargs = GenerationCase(own, 1, 8, 16).inputs("prefill")
    with pytest.raises(CaptureError, match=r"uses cache of its own(.|\n)*cure: the model refuses this call in eager"):
        prepare_state(own, args, kwargs)


def test_the_case_refuses_a_cache_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="needs a cache of at least 33"):
        GenerationCase(nn.Linear(1, 1), prefill_tokens=32, max_cache_len=32)
