"""`cannopy cache`: the compiled artifacts on disk."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cannopy.cli.common import console, print_json
from cannopy.environment import import_torch

if TYPE_CHECKING:
    from cannopy.backend.cache import Entry

_DESCRIPTION = """\
A compilation is kept under a key made of the model's source and configuration, the shapes of its inputs,
the options, the compiler's own source, and the versions of Python, torch, torch_npu and CANN. A process with
the same key loads it and runs neither Dynamo nor torchair. Nothing here is needed for correctness: an
entry that does not fit or is damaged is rebuilt.
"""

_EXAMPLES = """\
examples:
  cannopy cache ls                               what is there, newest first
  cannopy cache ls --json                        the same for a script
  cannopy cache verify                           check every byte against the manifests; exit code 1 for a bad entry
  cannopy cache show DeepseekV32ForCausalLM-1f0c    one entry: key, versions, inputs (a unique beginning is enough)
  cannopy cache prune --older-than-days 30 --keep 5
  cannopy cache prune --all                      remove everything
"""

_DAY = 24 * 3600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cache ls|show|verify|prune` to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    cache = subparsers.add_parser(
        "cache",
        help="compiled artifacts on disk: ls, show, verify, prune",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    verbs = cache.add_subparsers(dest="cache_verb", required=True, metavar="ls|show|verify|prune")
    for verb, text in (
        ("ls", "list the entries"),
        ("show", "print one entry's manifest"),
        ("verify", "check the files of every entry"),
        ("prune", "remove entries"),
    ):
        parser = verbs.add_parser(verb, help=text, description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="the cache (~/.cache/cannopy)")
        if verb == "show":
            parser.add_argument("entry", metavar="ENTRY", help="name of an entry, or the beginning of its name or key")
        if verb == "prune":
            which = parser.add_mutually_exclusive_group(required=True)
            which.add_argument("--older-than-days", type=float, metavar="N", help="entries made more than N days ago")
            which.add_argument("--all", action="store_true", help="every entry")
            parser.add_argument("--keep", type=int, default=0, metavar="N", help="keep the N newest whatever their age")
        parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out one `cannopy cache` verb. 1 when `verify` finds a bad entry or `show` finds none."""
    import_torch()
    actions = {"ls": _list, "show": _show, "verify": _verify, "prune": _prune}
    return actions[args.cache_verb](args)


def _list(args: argparse.Namespace) -> int:
    from cannopy.backend import cache

    return _print_entries(args, cache.list_entries(args.cache_dir))


def _verify(args: argparse.Namespace) -> int:
    from cannopy.backend import cache

    return _print_entries(args, cache.verify(args.cache_dir))


def _show(args: argparse.Namespace) -> int:
    from cannopy.backend.cache import list_entries, manifest
    from cannopy.errors import CannopyError

    entries = list_entries(args.cache_dir)
    found = [e for e in entries if e.path.name.startswith(args.entry) or (args.entry and e.key.startswith(args.entry))]
    if len(found) != 1:
        names = ", ".join(e.path.name for e in (found or entries)) or "the cache is empty"
        raise CannopyError(f"{len(found)} entries begin with {args.entry!r}: {names}", "cannopy cache ls")
    print_json(manifest.parse((found[0].path / manifest.MANIFEST).read_bytes()))
    return 0


def _prune(args: argparse.Namespace) -> int:
    from cannopy.backend import cache

    age = 0.0 if args.all else args.older_than_days * _DAY
    removed = cache.prune(args.cache_dir, older_than=age, keep=args.keep)
    if args.json:
        print_json({"removed": [str(path) for path in removed]})
    else:
        print(f"removed {len(removed)} of the cache's entries")
    return 0


def _print_entries(args: argparse.Namespace, entries: Sequence[Entry]) -> int:
    bad = [e for e in entries if e.problem]
    if args.json:
        print_json({"ok": not bad, "entries": [_plain(e) for e in entries]})
        return 1 if bad else 0
    if not entries:
        print("no entries")
        return 0
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for column in ("entry", "made", "size", "state"):
        side: Literal["left", "right"] = "right" if column == "size" else "left"
        table.add_column(column, justify=side, no_wrap=column != "state", overflow="fold")
    for entry in entries:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
        state = f"[red]{entry.problem}[/]" if entry.problem else "ok"
        table.add_row(entry.path.name, made, f"{entry.bytes / 1e6:.1f} MB", state)
    console(args).print(table)
    return 1 if bad else 0


def _plain(entry: Entry) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "model_class": entry.model_class,
        "method": entry.method,
        "key": entry.key,
        "bytes": entry.bytes,
        "created": entry.created,
        "problem": entry.problem,
    }
