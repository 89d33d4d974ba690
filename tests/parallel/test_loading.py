"""Weights of one rank from a published checkpoint: equal to those cut from the whole model, and hardly more is read."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cannopy
from cannopy import checkpoints
from cannopy.backend.artifact import Artifact, CallForm, Fingerprint
from cannopy.backend.emit import emit
from cannopy.backend.guards import GuardError
from cannopy.backend.weights.checkpoint import Checkpoint, CheckpointError, Stored
from cannopy.backend.weights.filling import Loading, Source, check_shapes
from cannopy.backend.weights.pieces import Box, Piece
from cannopy.frontend.shells import hollow, shell
from cannopy.fx_passes import weight_layout
from cannopy.fx_passes.parallel import Parallel
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program
from cannopy.models import zoo
from tests.parallel import lockstep, ranks

SIZES = {"num_hidden_layers": 2}
LAYOUTS = ["dp=4,ep=4", "dp=4,dense_tp=4", "dp=4,o_proj_tp=4", "dp=4,embed_tp=4", "dp=4,lm_head_tp=4",
           "dp=2,attn_tp=2", "dp=4,ep=4,dense_tp=2,o_proj_tp=4,embed_tp=2,lm_head_tp=4"]


def published(model: torch.nn.Module, folder: Path, shards: int = 1) -> Checkpoint:
    """``model``'s weights as they are published, a tensor for each expert and projection, over ``shards`` files."""
    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = value
            continue
        for i, expert in enumerate(value):
            parts = {"gate": expert.chunk(2)[0], "up": expert.chunk(2)[1]} if "gate" in leaf else {"down": expert}
            found |= {f"{stem}.{i}.{kind}_proj.weight": part.clone() for kind, part in parts.items()}
    for i in range(shards):
        save_file(dict(list(found.items())[i::shards]), folder / f"model-{i}.safetensors")
    return Checkpoint(folder)


def artifact_of(program: Program) -> Artifact:
    """The final graph with transposed matrices, as the backend gets it."""
    weight_layout.run(program)
    return Artifact(Fingerprint("", {}), "Model", "decode", CallForm(0, ()), emit(program, "Model", "decode", "0"),
                    tuple(program.inputs), {}, program.output, tuple(program.weights), {}, {}, {})


def sources_of(artifact: Artifact, model: torch.nn.Module, stored: Mapping[str, Stored]) -> dict[str, Source]:
    names = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    found = {}
    for spec in artifact.inputs:
        if spec.kind in ("parameter", "buffer"):
            value = compile_path(spec.source)(model, (), {})
            known = stored.get(names[id(value)])
            found[spec.name] = Source(spec, known, None if known else value)
    return found


@pytest.fixture(scope="module")
def case(activated: None) -> ranks.Case:
    return ranks.serving("deepseek-r1", **SIZES)


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_a_rank_reads_its_shard(case: ranks.Case, parallel: str, tmp_path: Path) -> None:
    _reads_its_shard(case, parallel, tmp_path)


@pytest.mark.usefixtures("activated")
def test_heads_of_keys(tmp_path: Path) -> None:
    """With biases, and where two ranks share a head of keys, with norms of heads that all have."""
    for name, parallel in (("qwen2.5", "attn_tp=2,dense_tp=2"), ("qwen3-moe", "attn_tp=4,ep=4")):
        case = ranks.serving(name, tie_word_embeddings=False, **SIZES)
        (tmp_path / name).mkdir()
        _reads_its_shard(case, parallel, tmp_path / name)


def _reads_its_shard(case: ranks.Case, parallel: str, folder: Path) -> None:
    checkpoint = published(case.model, folder, shards=3)
    rank = Parallel.parse(parallel).dies - 1
    program = ranks.cut(case.program, parallel, rank)
    artifact = artifact_of(program)
    sources = sources_of(artifact, case.model, checkpoints.stored(case.model, checkpoint, lambda name: name))
    check_shapes(checkpoint, sources)
    found, shared = Loading(artifact, checkpoint, sources, torch.device("cpu")).run()
    assert shared == 0
    whole = {n: s.value if s.value is not None else compile_path(s.spec.source)(case.model, (), {}).detach()
             for n, s in sources.items()}
    whole = {n: t if (view := sources[n].spec.view) is None else t.view(view) for n, t in whole.items()}
    for name, value in found.items():
        assert torch.equal(value, lockstep._weight(program, name, whole)), name
        assert value.untyped_storage().nbytes() == value.nbytes, f"{name} keeps more in memory than it is"
    made = {n for n, s in sources.items() if s.stored is None} | {w.name for w in artifact.weights if not w.sources}
    shard = sum(v.nbytes for n, v in found.items() if n not in made)
    assert shard <= checkpoint.bytes_read <= 1.05 * shard
    assert checkpoint.bytes_read < sum(t.nbytes for t in case.model.state_dict().values())


def test_methods_of_one_model_share_what_they_load(case: ranks.Case, tmp_path: Path) -> None:
    checkpoint = published(case.model, tmp_path)
    artifact = artifact_of(ranks.cut(case.program, "dp=4,ep=4", 1))
    sources = sources_of(artifact, case.model, checkpoints.stored(case.model, checkpoint, lambda name: name))
    loading = Loading(artifact, checkpoint, sources, torch.device("cpu"))
    first, _ = loading.run()
    read = checkpoint.bytes_read
    second, shared = loading.run()
    assert checkpoint.bytes_read == read
    assert shared == sum(v.nbytes for v in first.values())
    assert all(second[name] is first[name] for name in first)
    save_file({"other": torch.ones(1)}, tmp_path / "model-1.safetensors")  # another folder now
    third, shared = replace(loading, checkpoint=Checkpoint(tmp_path)).run()
    made = {n for n, s in sources.items() if s.stored is None} | {w.name for w in artifact.weights if not w.sources}
    assert shared == sum(v.nbytes for n, v in third.items() if n in made)


def test_errors_name_tensor_and_file(case: ranks.Case, tmp_path: Path) -> None:
    checkpoint = published(case.model, tmp_path)
    artifact = artifact_of(ranks.cut(case.program, "dp=4,ep=4", 1))
    stored = checkpoints.stored(case.model, checkpoint, lambda name: name)
    sources = sources_of(artifact, case.model, {**stored, "lm_head.weight": stored["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"model.norm.weight in .*model-0.safetensors: self.lm_head.weight has"):
        check_shapes(checkpoint, sources)
    with pytest.raises(CheckpointError, match=r"no tensor for expert 1 of .*\(up_proj\)"):
        checkpoints.stored(case.model, checkpoint, lambda name: None if ".1.up_proj" in name else name)
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        Checkpoint(tmp_path / "nothing")
    (tmp_path / "model-0.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(CheckpointError, match=r"model-0.safetensors cannot be read"):
        Checkpoint(tmp_path)


def test_views_of_a_piece_read_what_they_reach() -> None:
    generator = random.Random(0)
    exact = 0
    for _ in range(200):
        shape = [generator.randint(1, 6) for _ in range(generator.randint(1, 4))]
        real = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
        read: list[int] = []

        def fetch(name: str, box: Box, real: torch.Tensor = real, read: list[int] = read) -> torch.Tensor:
            part = real[tuple(slice(a, b) for a, b in box)].contiguous()
            read.append(part.numel())
            return part

        piece: torch.Tensor = Piece.of("w", torch.empty(shape, dtype=torch.int64, device="meta"), fetch)
        for _ in range(3):
            if not real.dim():
                break
            d = generator.randrange(real.dim())
            a = generator.randrange(real.shape[d])
            b = generator.randint(a + 1, real.shape[d])
            order = generator.sample(range(real.dim()), real.dim())
            step = generator.choice(["slice", "permute", "select", "unsqueeze"])
            piece, real = ((t.narrow(d, a, b - a) if step == "slice" else t.permute(order) if step == "permute"
                            else t.select(d, a) if step == "select" else t.unsqueeze(d)) for t in (piece, real))
        assert isinstance(piece, Piece)
        assert not read
        assert torch.equal(piece + 1, real + 1)
        assert sum(read) >= real.numel()
        exact += sum(read) == real.numel()
    assert exact == 200


def test_recipes_with_asserts_run_on_values() -> None:
    piece = Piece.of("w", torch.empty(4, 3, device="meta"), lambda name, box: torch.ones(4, 3))
    assert bool((piece[1:3] > 0).all())
    assert piece.float().sum().item() == 12
    assert piece.shape == (4, 3)


class Small(torch.nn.Module):
    """A matrix, a table of angles that the model computes, a correction that the checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        self.register_buffer("angles", torch.arange(32).float() / 32, persistent=False)
        self.register_buffer("correction", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).float() * self.angles + self.correction


def test_a_compiled_method_loads_its_weights(activated: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    real, x = Small().eval(), torch.randn(4, 64).bfloat16()
    real.correction += 1
    save_file({n: t.clone() for n, t in real.state_dict().items()}, tmp_path / "model.safetensors")
    for empty in (shell(Small).eval(), hollow(real)):
        assert [n for n, t in [*empty.named_parameters(), *empty.named_buffers()] if not t.is_meta] == ["angles"]
        compiled = cannopy.compile(empty, example_inputs=(x,), options=cannopy.Options(use_cache=False))
        with pytest.raises(CheckpointError, match=r"has no tensor for proj.weight"):
            compiled.load(tmp_path, rename=lambda name: None if name == "proj.weight" else name)
        read = compiled.load(tmp_path)
        assert read.shard_bytes == 2 * 64 * 32 + 2 * 4 * 32
        assert read.bytes_read + read.shared_bytes <= read.shard_bytes
        assert read.bytes_read >= (2 * 64 * 32 + 4 * 32) * (not read.shared_bytes)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), real(x))
        with pytest.raises(GuardError, match="load them again"):
            compiled.refresh_weights()


@pytest.mark.parametrize("name", ["deepseek-v3.2", "longcat-flash", "qwen2.5", "qwen3-moe"])
def test_names_of_transformers(name: str, tmp_path: Path) -> None:
    model = zoo.build(zoo.preset(name, "tiny"), torch.bfloat16, 0)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    stored = checkpoints.stored(model, checkpoint)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(model.state_dict()) - set(stored) == tied
    for key, value in model.state_dict().items():
        if key in tied:
            continue
        assert checkpoint.shape(stored[key]) == value.shape, key
        assert torch.equal(checkpoint.read(stored[key], tuple((0, n) for n in value.shape), value.dtype), value), key
    empty = shell(lambda: type(model)._from_config(model.config, dtype=torch.bfloat16))
    assert {k: v.dtype for k, v in empty.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}
