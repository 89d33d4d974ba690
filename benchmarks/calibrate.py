"""Fit the constants of the cost model on the calibration points and write them.

    python benchmarks/calibrate.py            write stream_scheduler/constants/kernels.yaml
    python benchmarks/calibrate.py --check    exit code 1 when that file is not what the fit gives
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fit import Group, fit_all, load_groups
from benchmarks.fit_networks import fit_networks
from cannopy.stream_scheduler.constants import Constant, Constants
from cannopy.stream_scheduler.constants.model import parse

FOLDER = Path(__file__).resolve().parents[1] / "stream_scheduler" / "constants"
TARGET = FOLDER / "kernels.yaml"
DIGITS = 4
SAME = 0.01
HEAD = "# Written by benchmarks/calibrate.py from stream_scheduler/calibration/*.csv; do not edit.\n"


def published() -> Mapping[str, Constant]:
    """The constants that are not fitted here: every file of the folder but the one written here."""
    found: dict[str, Constant] = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        if path != TARGET:
            found |= parse(path.read_text(encoding="utf-8"), path.name)
    return found


def text(constants: Constants, groups: tuple[Group, ...]) -> str:
    """The fitted constants as YAML, rounded to four digits."""
    sections: dict[str, list[str]] = {}
    for group in groups:
        for searched in group.constants:
            section, _, name = searched.name.partition(".")
            entry = constants.entry(searched.name)
            sections.setdefault(section, []).append(
                f"  {name}: {{value: {entry.value:.{DIGITS}g}, unit: {entry.unit}, "
                f'fitted_on: "{entry.fitted_on}", source: "{entry.source}"}}'
            )
    return HEAD + "\n".join(line for name, lines in sections.items() for line in (f"{name}:", *lines)) + "\n"


def differences(fitted: Constants, stored: Mapping[str, Constant]) -> list[str]:
    """Names of constants that the file has otherwise than the fit, by more than a percent."""
    wrong = [n for n in stored if n not in fitted.table]
    for name in fitted.names():
        if name not in stored or abs(math.log(stored[name].value / fitted[name])) > SAME:
            wrong.append(name)
    return wrong


def main(arguments: list[str]) -> int:
    groups = load_groups()
    fitted = fit_all(groups, published())
    for group in groups:
        if group.on_networks:
            fitted = fit_networks(group, fitted)
    if "--check" not in arguments:
        TARGET.write_text(text(fitted, groups), encoding="utf-8")
        return 0
    stored = {**published(), **parse(TARGET.read_text(encoding="utf-8"), TARGET.name)}
    wrong = differences(fitted, stored)
    if wrong:
        print(f"{TARGET.name} is not what the fit gives: {', '.join(wrong)}; run {sys.argv[0]}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
