"""`cannopy cache`: the compiled artifacts on disk."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cannopy.cli.common import console, positive, print_json
from cannopy.environment import import_torch

if TYPE_CHECKING:
    from cannopy.backend.cache import Entry
    from cannopy.backend.cache.prune import Removal, Wanted

_DESCRIPTION = """\
A compilation is kept under a key made of the model's source and configuration, the shapes of its inputs,
the options, the compiler's own source, and the versions of Python, torch, torch_npu and CANN. A process with
the same key loads it and runs neither Dynamo nor torchair. Nothing here is needed for correctness: an
entry that does not fit or is damaged is rebuilt.
"""

_EXAMPLES = """\
examples:
  cannopy cache ls                               what is there, newest first; --json for a script
  cannopy cache show DeepseekV32ForCausalLM-1f0c    what its key is made of (a unique beginning is enough)
  cannopy cache diff DeepseekV32-1f0c DeepseekV32-77ab   why the one was not a hit for the other
  cannopy cache verify                           check every byte against the manifests
  cannopy cache prune --stale --dry-run          what this installation can no longer load, and why
  cannopy cache prune --unused-days 30 --keep 5
  cannopy cache prune --max-size 20GB            the least recently used go first
  cannopy cache prune --old-weights              derived weights of a checkpoint that was replaced
  cannopy cache prune --all                      remove everything

An entry that a process is running, or loading, is never removed: it is listed as in use.
Half-written and set-aside entries (.tmp-…, .aside-…) older than a day go with every prune.
Exit code 1: verify found a bad entry, diff found a difference, show found no entry, prune had to keep one in use.
"""

_DAY = 24 * 3600.0
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size(text: str) -> int:
    """An argparse type: ``500MB``, ``20GB``, ``1.5TB`` as bytes."""
    number = text.rstrip("KMGTBkmgtb")
    unit = text[len(number) :].upper()
    try:
        if unit in _UNITS and float(number) >= 0:
            return int(float(number) * _UNITS[unit])
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a size as 500MB or 20GB, found {text!r}")


def days(text: str) -> float:
    """An argparse type: a number of days from 0, as seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected days from 0, found {text!r}")
    return value * _DAY


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cache ls|show|diff|verify|prune` to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    cache = subparsers.add_parser(
        "cache", help="compiled artifacts on disk: ls, show, diff, verify, prune", description=_DESCRIPTION,
        epilog=_EXAMPLES, formatter_class=raw,
    )
    verbs = cache.add_subparsers(dest="cache_verb", required=True, metavar="ls|show|diff|verify|prune")
    for verb, func, text in (
        ("ls", _list, "list the entries: size, age, phase, hits, state"),
        ("show", _show, "what one entry's key is made of"),
        ("diff", _diff, "what differs between the keys of two entries"),
        ("verify", _verify, "check the files of every entry"),
        ("prune", _prune, "remove entries that no process uses"),
    ):
        parser = verbs.add_parser(verb, help=text, description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw,
                                  allow_abbrev=False)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="the cache (~/.cache/cannopy)")
        name = "name of an entry, or the beginning of its name or key"
        if verb == "show":
            parser.add_argument("entry", metavar="ENTRY", help=name)
        if verb == "diff":
            parser.add_argument("entry", metavar="ENTRY", help=name)
            parser.add_argument("other", metavar="OTHER", help="the entry to compare it with")
        if verb == "prune":
            _add_prune_arguments(parser)
        parser.set_defaults(func=run, action=func)


def _add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("which entries go (one at least; any of them suffices)")
    which.add_argument("--older-than-days", type=days, metavar="N", help="made more than N days ago")
    which.add_argument("--unused-days", type=days, metavar="N", help="neither made nor loaded in the last N days")
    which.add_argument("--max-size", type=size, metavar="SIZE", help="least recently used ones, until SIZE is left")
    which.add_argument("--stale", action="store_true", help="of other versions than are installed here")
    which.add_argument("--bad", action="store_true", help="with files that are not what the manifest says")
    which.add_argument("--old-weights", action="store_true",
                       help="derived weights kept for other values than those loaded last; the entries stay")
    which.add_argument("--all", action="store_true", help="every entry")
    parser.add_argument("--keep", type=positive, default=0, metavar="N", help="keep the N newest in any case")
    parser.add_argument("--dry-run", action="store_true", help="say what would go and remove nothing")


def run(args: argparse.Namespace) -> int:
    """Carry out one `cannopy cache` verb; the exit code is in the help."""
    import_torch()
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)


def _list(args: argparse.Namespace) -> int:
    from cannopy.backend.cache import list_entries

    return _print_entries(args, list_entries(args.cache_dir))


def _verify(args: argparse.Namespace) -> int:
    from cannopy.backend.cache import verify

    return _print_entries(args, verify(args.cache_dir))


def _one(args: argparse.Namespace, text: str) -> Entry:
    """The entry that ``text`` is the beginning of."""
    from cannopy.backend.cache import list_entries
    from cannopy.errors import CannopyError

    entries = list_entries(args.cache_dir)
    found = [e for e in entries if text and (e.path.name.startswith(text) or e.key.startswith(text))]
    exact = [e for e in found if text in (e.path.name, e.key)]
    if len(exact or found) != 1:
        names = ", ".join(e.path.name for e in (found or entries)) or "the cache is empty"
        raise CannopyError(f"{len(found)} entries begin with {text!r}: {names}", "cannopy cache ls")
    return (exact or found)[0]


def _show(args: argparse.Namespace) -> int:
    from cannopy.backend.cache.listing import stale
    from cannopy.backend.cache.store import read_manifest

    entry = _one(args, args.entry)
    if args.json:
        print_json(dict(read_manifest(entry.path)))
        return 0
    screen = console(args)
    screen.print(f"[bold]{entry.path.name}[/] {entry.model_class}.{entry.method} {entry.phase}", soft_wrap=True)
    screen.print(f"  {entry.path}", soft_wrap=True, markup=False)
    screen.print(f"  {_bytes(entry.bytes)}, made {_ago(entry.created)}, {entry.hits} hits, last used {_ago(entry.used)}"
                 + (", in use" if entry.in_use else ""), markup=False)
    if entry.weight_sets:
        screen.print(f"  of it {_bytes(entry.weight_bytes)} in {entry.weight_sets} sets of derived weights",
                     markup=False)
    screen.print(f"  key {entry.key}", soft_wrap=True)
    differing = stale(entry)
    if differing:
        screen.print(f"  this installation cannot load it: {'; '.join(differing)}", style="yellow", markup=False)
    if entry.fingerprint is not None:
        for field, items in entry.fingerprint.details.items():
            screen.print(f"{field} ({len(items)})", style="bold")
            for name, value in sorted(items.items()):
                screen.print(f"  {name}: {value}", soft_wrap=True, markup=False)
    return 0


def _diff(args: argparse.Namespace) -> int:
    from cannopy.backend.cache import differences

    one, other = _one(args, args.entry), _one(args, args.other)
    if one.fingerprint is None or other.fingerprint is None:
        from cannopy.errors import CannopyError

        bad = one if one.fingerprint is None else other
        raise CannopyError(f"{bad.path.name}: {bad.problem}", "cannopy cache verify")
    a, b = one.fingerprint.details, other.fingerprint.details
    items = [
        {"field": field, "item": item, "entry": a.get(field, {}).get(item), "other": b.get(field, {}).get(item)}
        for field in sorted(a.keys() | b.keys())
        for item in sorted(a.get(field, {}).keys() | b.get(field, {}).keys())
        if a.get(field, {}).get(item) != b.get(field, {}).get(item)
    ]
    if args.json:
        print_json({"entry": one.path.name, "other": other.path.name, "differences": items})
    else:
        screen = console(args)
        lines = differences(one.fingerprint, other.fingerprint, limit=10**6)
        screen.print("\n".join(lines) or "the keys are the same", soft_wrap=True, markup=False)
    return 1 if items else 0


def _prune(args: argparse.Namespace) -> int:
    from cannopy.backend.cache.prune import remove

    done = remove(args.cache_dir, _wanted(args), dry_run=args.dry_run)
    if args.json:
        print_json({"dry_run": args.dry_run, "removed": [_removal(r) for r in done if not r.kept],
                    "kept": [_removal(r) for r in done if r.kept]})
    else:
        screen = console(args)
        for r in done:
            verb = "keep" if r.kept else "would remove" if args.dry_run else "removed"
            why = f"{r.kept}; {r.why}" if r.kept else r.why
            screen.print(f"{verb} {r.path.name} {_bytes(r.bytes)} ({why})", soft_wrap=True, markup=False)
        gone = [r for r in done if not r.kept]
        verb, total = "would remove" if args.dry_run else "removed", _bytes(sum(r.bytes for r in gone))
        screen.print(f"{verb} {len(gone)}, {total}; kept {len(done) - len(gone)}")
    return 1 if any(r.kept == "in use" for r in done) else 0


def _wanted(args: argparse.Namespace) -> Wanted:
    from cannopy.backend.cache.prune import Wanted
    from cannopy.errors import OptionError

    older = 0.0 if args.all else args.older_than_days
    wanted = Wanted(older, args.unused_days, args.max_size, args.stale, args.bad, args.keep, args.old_weights)
    if wanted == Wanted(keep=args.keep):
        raise OptionError("prune removes nothing unless it is told what", "cannopy cache prune --unused-days 30, "
                          "--max-size 20GB, --stale, --bad, --old-weights or --all; with --dry-run to see what would "
                          "go")
    return wanted


def _removal(r: Removal) -> dict[str, Any]:
    return {"path": str(r.path), "bytes": r.bytes, "why": r.why, **({"kept": r.kept} if r.kept else {})}


def _print_entries(args: argparse.Namespace, entries: Sequence[Entry]) -> int:
    bad = [e for e in entries if e.problem]
    if args.json:
        print_json({"ok": not bad, "bytes": sum(e.bytes for e in entries), "entries": [_plain(e) for e in entries]})
        return 1 if bad else 0
    if not entries:
        print("no entries")
        return 0
    rows = [["entry", "phase", "made", "size", "weights", "hits", "last hit", "state"]]
    for e in entries:
        state = e.problem or ("in use" if e.in_use else "ok")
        used = _ago(e.used) if e.hits else "-"
        rows.append([e.path.name, e.phase or "-", _ago(e.created), _bytes(e.bytes),
                     _bytes(e.weight_bytes) if e.weight_sets else "-", str(e.hits), used, state])
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    screen = console(args)
    for row in rows:  # a name stays on one line, however narrow the screen is
        line = "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True))
        screen.print(line, soft_wrap=True, markup=False, style="bold" if row is rows[0] else "")
    screen.print(f"{len(entries)} entries, {_bytes(sum(e.bytes for e in entries))}"
                 + (f", {len(bad)} bad: the next process that looks one up rebuilds it" if bad else ""), style="dim")
    return 1 if bad else 0


def _plain(entry: Entry) -> dict[str, Any]:
    names = ("model_class", "method", "phase", "key", "bytes", "created", "used", "hits", "in_use", "problem",
             "weight_sets", "weight_bytes")
    return {"path": str(entry.path)} | {name: getattr(entry, name) for name in names}


def _bytes(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"


def _ago(at: float) -> str:
    seconds = time.time() - at
    if seconds < 0:
        return time.strftime("%Y-%m-%d", time.localtime(at))
    for unit, length in (("d", _DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
