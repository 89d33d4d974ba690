"""`cannopy run --parallel` as torchrun starts it: a process per rank, one verdict, what is said when one fails."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from cannopy.cli import main
from tests.cache_faults.kills import start, wait
from tests.parallel.world import _free_port

pytestmark = pytest.mark.usefixtures("activated")
FACTORY = '''
import os
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 128, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

def make():
    torch.manual_seed(0)
    model = Mlp().eval()
    return model, "forward", (torch.randn(4, 64).bfloat16(),)

def broken():
    if os.environ["RANK"] == "1":
        raise RuntimeError("no such disk")
    return make()

def longer():
    model, method, (x,) = make()
    return model, method, (torch.cat([x] * (1 + int(os.environ["RANK"]))),)
'''


def ranks_of(world: int, arguments: list[str], folder: Path) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each rank of one command."""
    port = _free_port()
    found = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def run(rank: int) -> None:
        os.environ.update(found, RANK=str(rank), LOCAL_RANK=str(rank))
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
        with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as err, \
                contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        os._exit(code)

    codes = [wait(pid) for pid in [start(lambda r=rank: run(r)) for rank in range(world)]]
    return [(code, *((folder / f"{rank}.{name}").read_text() for name in ("out", "err")))
            for rank, code in enumerate(codes)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with factories."""
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    return path


def arguments(model: Path, factory: str, parallel: str, *more: str) -> list[str]:
    return ["run", f"{model}:{factory}", "--parallel", parallel, "--phase", "decode", "--cache-dir",
            str(model.parent / "cache"), "--group-timeout", "30", *more]


def test_one_verdict_for_all_ranks(model: Path, tmp_path: Path) -> None:
    (code, out, _), (other, silence, _) = ranks_of(2, arguments(model, "make", "dp=2,dense_tp=2", "--json"), tmp_path)
    assert (code, other, silence) == (0, 0, "")
    report = json.loads(out)
    assert report["passed"]
    assert [rank["passed"] for rank in report["ranks"]] == [True, True]
    ops = report["phases"]["decode"]["ge_ops"]
    assert (ops["HcomAllGather"], ops["HcomReduceScatter"]) == (1, 1)
    (code, out, _), (other, silence, _) = ranks_of(2, arguments(model, "make", "dp=2,dense_tp=2"), tmp_path)
    assert (code, other, silence) == (0, 0, "")
    assert "ranks: errors as multiples" in out
    assert out.partition("ranks: errors as multiples")[2].count("hit") == 2


def test_an_error_of_one_rank_is_told_by_all(model: Path, tmp_path: Path) -> None:
    (first, _, text), (second, _, own) = ranks_of(2, arguments(model, "broken", "dp=2,dense_tp=2"), tmp_path)
    assert (first, second) == (1, 1)
    assert "no such disk" in own
    assert "rank 1" in text
    assert "no such disk" in text
    assert "Traceback" not in text
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_caches_that_run_does_not_know(model: Path, tmp_path: Path) -> None:
    for code, _, text in ranks_of(2, arguments(model, "make", "kvp=2"), tmp_path):
        assert code == 1
        assert "kvp=2 spreads the rows of paged caches, and model:make has none that run knows\n  cure: --form" in text


def test_other_shapes_on_one_rank(model: Path, tmp_path: Path) -> None:
    for code, _, text in ranks_of(2, arguments(model, "longer", "dp=2,dense_tp=2"), tmp_path):
        assert code == 1
        assert "rank 1 and rank 0 compile Mlp.forward (decode) differently: inputs args[0]" in text
        assert "Traceback" not in text


def test_worlds_that_do_not_fit(model: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(arguments(model, "make", "ep=4,dp=4")) == 1
    assert "ep=4,dp=4 needs 4 ranks, and this process is alone\n  cure: torchrun --nproc-per-node 4" in (
        capsys.readouterr().err)
    assert main(arguments(model, "make", "auto")) == 1
    assert "--parallel auto spreads a run over the ranks of torchrun" in capsys.readouterr().err
    assert main(["run", "deepseek-v3.2", "--form", "serving", "--parallel", "cp=2"]) == 1
    assert "cp=2 splits a prompt over dies, and a decode step has none to split\n  cure: --phase prefill" in (
        capsys.readouterr().err)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(arguments(model, "make", "ep=4,dp=4,attn_tp=2")) == 1
    assert "max(dp·attn_tp = 4·2, ep·moe_tp = 4·1) = 8 dies, and torchrun has started 3" in capsys.readouterr().err
    assert main(["compile", f"{model}:make", "--rank", "1"]) == 1
    assert "--rank 1 without --parallel" in capsys.readouterr().err


def test_one_rank_is_compiled_offline(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compile", f"{model}:make", "--parallel", "dp=128,dense_tp=4", "--rank", "77", "--no-cache", "--json"]
    assert main(asked) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ge_ops"]["HcomAllGather"], report["ge_ops"]["HcomReduceScatter"]) == (1, 1)
