"""`cannopy explain`: why each fusion matched or did not."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from cannopy.cli.common import (
    add_model_arguments,
    add_offline_argument,
    console,
    load_model,
    options_of,
    print_json,
    verb_parser,
    working,
)
from cannopy.errors import CannopyError, unknown

if TYPE_CHECKING:
    from rich.console import Console

    from cannopy.explain import Explanation, Fate
    from cannopy.options import Options

_DESCRIPTION = """\
For each kind of place where a fusion rule applied: the layers, and the lines of the model's source that became a
kernel. For each kind of place where one came near and did not apply: how many operations of its pattern were there,
the node at which it stopped, what was expected and found there, the line of the source, and what would make it apply.
Layers with the same answer are one entry. Nothing is emitted: neither torchair nor the compile cache takes part.

--rule also tells of attempts that ended early, or which operation of the rule the graph lacks.
--node takes a node of the captured or of the final graph (names as in `cannopy dump`), or a kernel: where it went,
which lines it is made of, and what was tried there. All layers are captured for it, where else like layers are
captured once.

Exit code 1 when a fusion that is required (--fusion RULE=require) applies nowhere.
"""

_EXAMPLES = """\
  cannopy explain deepseek-v3.2                        decode of the tiny preset
  cannopy explain deepseek-v3.2 --dtype fp32           which contracts a float32 model breaks
  cannopy explain ./my-checkpoint --rule mla_prolog    one rule
  cannopy explain ./my-checkpoint --node mm_12         where one captured node went, what was tried there
  cannopy explain ./my-checkpoint --node npu_rms_norm  the source lines behind a kernel
  cannopy explain ./my-checkpoint --json | jq '.misses[] | {rule, layers, expected, found, remedy}'
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the command line."""
    parser = verb_parser(subparsers, "explain", run, "why each fusion matched or did not", _DESCRIPTION, _EXAMPLES)
    add_model_arguments(parser)
    add_offline_argument(parser)
    parser.add_argument("--rule", metavar="RULE", help="only this rule, with its best attempts")
    parser.add_argument("--node", metavar="NODE", help="only this node or kernel")


def run(args: argparse.Namespace) -> int:
    """Explain; 1 when a required fusion applies nowhere, 0 otherwise, also when nothing fused."""
    options = options_of(args)
    if args.rule:
        _check_rule(args.rule, options)
    loaded = load_model(args)
    screen = console(args)
    for note in loaded.notes:
        screen.print(note, style="dim")
    if args.node:  # of layers that are copied, nodes have no history of their own
        options = dataclasses.replace(options, regions=False)
    from cannopy import explain

    call_args, call_kwargs = loaded.make_inputs(args.phase)
    with working(screen, f"explaining {args.phase} of {loaded.name} for {options.target}"):
        whole = explain.explain(loaded.model, loaded.method_of(args.phase), call_args, call_kwargs, options)
    found = whole.of_rule(args.rule) if args.rule else whole
    fate = None
    if args.node:
        fate = whole.lineage.fate(args.node)
        found = found.at_node(args.node, args.rule)
    if args.json:
        data = found.to_dict()
        print_json(data if fate is None else {**data, "node": explain.plain(fate)})
    else:
        _show(found, fate, screen)
    return int(bool(found.unmet))


def _check_rule(rule: str, options: Options) -> None:
    from cannopy.environment import import_torch

    import_torch()
    from cannopy import pipeline

    names = pipeline.plan(options).rule_names
    if rule not in names:
        raise CannopyError(unknown("rule", rule, names))


def _show(found: Explanation, fate: Fate | None, screen: Console) -> None:
    from cannopy import explain_view

    for text, style in explain_view.lines(found, fate):
        screen.print(text, style=style, markup=False, soft_wrap=True, highlight=False)
