"""The example of docs/add-a-fusion.md: the page shows the file, and the file does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import cannopy
from cannopy.fusion_rules import extension
from cannopy.fusion_rules.extension import UserRule
from cannopy.testing import check_rule

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "unit_norm.py"


@pytest.fixture(scope="module")
def rule() -> UserRule:
    (found,) = extension.load([FILE])
    return found


def test_the_page_shows_the_file() -> None:
    page = (ROOT / "docs" / "add-a-fusion.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert FILE.read_text(encoding="utf-8") in blocks, "docs/add-a-fusion.md does not show examples/unit_norm.py"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_numbers(rule: UserRule, dtype: torch.dtype) -> None:
    x, gamma = torch.randn(32, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    found = check_rule(rule, lambda x, gamma: F.normalize(x, dim=-1) * 8 * gamma, x, gamma, parameters=(1,))
    assert "npu.npu_rms_norm.default" in found.after
    assert "linalg_vector_norm" not in found.after


def test_a_row_of_zeros_stays_zero(rule: UserRule) -> None:
    def function(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return F.normalize(x * 0, dim=-1) * 8 * gamma

    check_rule(rule, function, torch.randn(4, 64), torch.randn(64), parameters=(1,))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, gamma: F.normalize(x, dim=-1) * 7 * gamma, "the scale is 7, RMSNorm has √64 = 8"),
        (lambda x, gamma: F.normalize(x, dim=0) * 8 * gamma, "over the last dim, this norm over dims [0]"),
        (lambda x, gamma: F.normalize(x, p=1, dim=-1) * 8 * gamma, "order = 2"),
    ],
    ids=["scale", "dim", "p"],
)
def test_refusals(rule: UserRule, function: object, reason: str) -> None:
    found = check_rule(rule, function, torch.randn(32, 64), torch.randn(64), parameters=(1,), times=0, trials=1)
    assert any(reason in text for text in found.reasons), found.reasons


def test_with_a_model(tmp_path: Path) -> None:
    """The command of the page, from Python: the rule applies in both layers and its op is in the compiled graph."""
    from cannopy.frontend import sources

    loaded = sources.load(f"{ROOT / 'examples' / 'unit_norm_model.py'}:make", size=None, dtype="bf16", seed=0,
                          phase="decode", batch=1, weights=True)
    args, kwargs = loaded.make_inputs("decode")
    options = cannopy.Options(rules=(FILE,), fusions={"unit_norm": "require"}, cache_dir=tmp_path)
    compiled = cannopy.compile(loaded.model, loaded.method, args, kwargs, options)
    assert compiled.report.fusions["unit_norm"] == 2
    assert {hit["layer"] for hit in compiled.report.hits if hit["rule"] == "unit_norm"} == {0, 1}
    assert compiled.report.kernels["RmsNorm"] == 2
