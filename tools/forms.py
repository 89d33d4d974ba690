"""Fusion counts of stock models under several versions of transformers, written to docs/forms.md.

    python tools/forms.py                        every version below, in environments of their own (1.2 GB, 3 minutes)
    python tools/forms.py --versions 5.24.0      some of them
    python tools/forms.py --jobs 2               so many versions at a time
    python tools/forms.py --envs DIR             where the environments are kept; default: ~/.cache/cannopy-forms

The version of this environment is used as it is; each other one is installed with ``pip install --target`` in front of
its torch and torch_npu. Exit code 1 when a count differs from what the model's layers ask for, or a fused graph is less
exact than the plain model by more than half.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "forms.md"
VERSIONS = ("4.57.6", "5.4.0", "5.8.0", "5.14.1", "5.24.0")
MODELS = ("deepseek_v3", "deepseek_v32", "qwen3_moe")


def environment(folder: Path, version: str) -> dict[str, str]:
    """Environment variables under which ``import transformers`` is ``version``, installed when it is not there yet."""
    if version == importlib.metadata.version("transformers"):
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    place = folder / version
    if not (place / f"transformers-{version}.dist-info").is_dir():
        print(f"installing transformers {version} into {place}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target"]
        subprocess.run([*command, str(place), f"transformers=={version}"], check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(place), str(ROOT))), "OMP_NUM_THREADS": "1"}


def measure(folder: Path, version: str, models: Sequence[str]) -> dict[str, Any]:
    """What the probe found under ``version``: {model: {phase: row}}."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "forms_probe.py"), *models], env=environment(folder, version),
        capture_output=True, text=True, check=False,
    )
    if done.returncode:
        raise SystemExit(f"transformers {version}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(found: dict[str, dict[str, Any]], torch_version: str, day: str) -> str:
    """The Markdown page."""
    lines = [
        "# Forms of stock models", "",
        f"Written by `python tools/forms.py` on {day}, torch {torch_version}. Each cell: places where the rule applied "
        "/ places where the model has the math. All models are stock `transformers` classes, tiny, bf16, with a "
        "`StaticCache`; the counts are for the layers given, and grow with the layers.", "",
    ]
    names = list(dict.fromkeys(name for models in found.values() for name in models))
    for name in names:
        rows = {(v, p): row for v, models in found.items() for p, row in models.get(name, {}).items()}
        rules = list(dict.fromkeys(rule for row in rows.values() for rule in row.get("expected", {})))
        about = next(row["about"] for row in rows.values() if "about" in row)
        lines += [f"## {name}", "", about, ""]
        head = f"| transformers | phase | {' | '.join(rules)} | error / plain bf16 |"
        lines += [head, "|" + " --- |" * (len(rules) + 3)]
        for (version, phase), row in rows.items():
            if "error" in row:
                lines.append(f"| {version} | {phase} | {row['error']} |" + " |" * len(rules))
                continue
            cells = [f"{row['found'].get(rule, 0)} / {row['expected'].get(rule, 0)}" for rule in rules]
            numbers = f"{row['fused']:.1e} / {row['plain']:.1e}" if "fused" in row else "not run"
            lines.append(f"| {version} | {phase} | {' | '.join(cells)} | {numbers} |")
        lines.append("")
        left = dict.fromkeys(f"- {version}: {note}" for version, models in found.items()
                             for row in models.get(name, {}).values() for note in row.get("notes", ()))
        lines += [*left, ""] if left else []
    lines += [*NOTES, ""]
    return "\n".join(lines)


NOTES = (
    "The last column compares logits with those of the same weights in fp32: median over the tokens of the relative "
    "error, for the fused graph and for the plain model. A version that is not in a table does not have the model.",
    "",
    "What differs between the versions and fuses all the same:",
    "",
    "- experts: a list of MLPs with a loop over the experts (4.57, replaced before capture after a check in float64), "
    "stacked weights with `grouped_mm`, tokens gathered twice (5.0 to 5.4), once (from 5.8), ids checked against the "
    "number of experts (5.8, 5.14);",
    "- routing in the router or in the block, dropped groups at 0.0 (to 5.4) or -inf. The 0.0 form is the same "
    "function where the correction bias has no negative entry, which is looked up at compile time and asserted "
    "whenever weights are loaded; with a negative entry it is left as it is, with the reason;",
    "- a correction bias in bf16 (to 5.14), widened at load;",
    "- rotary of pairs by a transpose (to 5.8) or by even and odd slices (from 5.14).",
    "",
    "transformers 4.57 keeps keys and values of a static cache at one head size, so `v_head_dim` equals the query's "
    "there, and its caches do not know their length: calls pass `cache_position`. That these positions count upwards "
    "is not in the graph, so attention over several queries keeps its mask and stays plain; that of one query fuses.",
    "",
    "transformers 5.14 expands keys and values of DeepSeek-V3.2 before it caches them. There is no latent cache to "
    "attend or to write, so its indexer, norms and rotary fuse one by one. It is measured with "
    "`attn_implementation='eager'`: with 'sdpa' that version makes no mask in an eager call and a boolean one when it "
    "is traced, which its indexer adds to the scores (`index_scores + attention_mask`), where True counts as 1 and "
    "hides nothing. A traced call would compute something else than an eager one, in prefill and in decode, so capture "
    "refuses the model with that line and the cure (5.24 fills the masked scores instead and is taken as it is).",
    "",
    "Fused attention of DeepSeek-V3 has no column: its kernel takes the published head sizes, and these models have "
    "smaller ones. [models.md](models.md) has it for 5.24.0.",
)


def wrong(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows whose counts or numbers are not as they should be."""
    faults = []
    for version, models in found.items():
        for name, phases in models.items():
            for phase, row in phases.items():
                place = f"transformers {version}, {name}, {phase}"
                if "error" in row:
                    faults.append(f"{place}: {row['error']}")
                    continue
                faults += [f"{place}: {rule} {row['found'].get(rule, 0)} of {count}"
                           for rule, count in row["expected"].items() if row["found"].get(rule, 0) != count]
                if "fused" in row and not row["fused"] <= 1.5 * row["plain"]:
                    faults.append(f"{place}: error {row['fused']:.2e}, plain bf16 {row['plain']:.2e}")
    return faults


def main() -> int:
    """Install, measure, write; 1 when something is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="V")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="M", help="names of tools/forms_probe.py")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "cannopy-forms", metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print what was found; write no page")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="versions measured at a time (default: 1)")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    torch_version = importlib.metadata.version("torch")
    with ThreadPoolExecutor(max_workers=given.jobs) as pool:
        rows = pool.map(lambda version: measure(given.envs.resolve(), version, given.models), given.versions)
        for version, row in zip(given.versions, rows, strict=True):
            found[version] = row
            if not given.json:  # after each version, which takes minutes
                PAGE.write_text(page(found, torch_version, datetime.date.today().isoformat()), encoding="utf-8")
    if given.json:
        print(json.dumps(found))
    faults = wrong(found)
    print(*faults, sep="\n", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
