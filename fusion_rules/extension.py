"""Rules from outside of this package: the decorator that makes them, where they come from, and their place.

Nothing is registered anywhere. A compilation loads the files and entry points that it is given and forgets them.
"""

from __future__ import annotations

import difflib
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from cannopy.fusion_rules.engine.pattern import Pattern
from cannopy.fusion_rules.engine.rule import Check, Rewrite, Rule

GROUP = "cannopy.rules"
"""Group of the entry points that are looked at: each names a module, a rule or a list of rules."""
LIFT = "lift"
"""Place of the rules that bring ATen spellings into the dialect; a rule of one's own may stand before it."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class RuleFileError(ValueError):
    """A file or an entry point gives no rules that can be used; names the file and the line."""


class RuleCodeError(RuntimeError):
    """A rule's own code raised; names the file and the line in it."""


@dataclass(frozen=True)
class UserRule:
    """A rule with its place: before or after the group of rules of that name, after all fusions when neither is given.

    ``origin`` is ``file:line`` of its definition. A rule is a value: a module attribute holds it, nothing else does.
    """

    rule: Rule
    before: str | None = None
    after: str | None = None
    origin: str = ""

    @property
    def name(self) -> str:
        """The name by which it is switched and reported."""
        return self.rule.name

    @property
    def file(self) -> str:
        """The file of ``origin``."""
        return self.origin.rpartition(":")[0]


def rule(
    *,
    equation: str,
    pattern: Pattern,
    check: Check | None = None,
    kernel: str = "",
    name: str = "",
    before: str | None = None,
    after: str | None = None,
    near: int = 3,
) -> Callable[[Rewrite], UserRule]:
    """Make a rule of the function that does its rewrite: ``rewrite(match, context)``.

    Args:
        equation: what becomes what, with an arrow: ``"x · σ(x)  →  silu(x)"``.
        pattern: the tree to look for, its result first (`cannopy.rules`).
        check: side conditions; a `Refusal` with the reason and the node where one does not hold, else None.
        kernel: the device op that it ends in (``"npu_swiglu"``), empty when it only respells.
        name: by which it is switched and reported; the function's name when empty.
        before, after: the group of rules to stand before or behind, by name: a fusion, another rule of one's own, or
            ``"lift"``. Only one of them; behind all fusions when neither is given.
        near: number of matched operations from which a failed match is reported as a miss.

    Raises:
        RuleFileError: a name that the pipeline text cannot have, an equation without an arrow, or two places.
    """

    def make(rewrite: Rewrite) -> UserRule:
        code = getattr(rewrite, "__code__", None)
        origin = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        named = name or getattr(rewrite, "__name__", "")
        if not _NAME.fullmatch(named):
            raise RuleFileError(f"{origin}: {named!r} is no name for a rule: letters, digits and _ . - only")
        if "→" not in equation:
            raise RuleFileError(f"{origin}: rule {named}: the equation has no arrow (→): {equation!r}")
        if before is not None and after is not None:
            raise RuleFileError(f"{origin}: rule {named}: give before or after, not both")
        made = Rule(named, equation, pattern, rewrite, check, kernel, near)
        try:
            made.anchors  # noqa: B018 a pattern that starts with no operation is found here
        except TypeError as e:
            raise RuleFileError(f"{origin}: {e}") from e
        return UserRule(made, before, after, origin)

    return make


def load(files: Iterable[Path]) -> tuple[UserRule, ...]:
    """The rules of ``files`` and of the installed entry points, in that order.

    Each file is executed anew. Raises `RuleFileError`: a file that is absent, raises or has no rule in it, and two
    rules of one name.
    """
    found = [rule for path in files for rule in _of_file(path)]
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda e: e.name):
        found += _of_entry(entry)
    seen: dict[str, UserRule] = {}
    for one in found:
        if one.name in seen:
            raise RuleFileError(f"{one.origin}: there is a rule {one.name} already, at {seen[one.name].origin}")
        seen[one.name] = one
    return tuple(found)


def place(groups: Mapping[str, Sequence[Rule]], rules: Sequence[UserRule], taken: Iterable[str] = ()) -> list[str]:
    """Names of all groups in the order in which they run, `LIFT` among them.

    ``groups`` are the fusions by name, ``taken`` further names that a rule must not have. Raises `RuleFileError`: a
    name that is taken, a place that does not exist, or rules that wait for each other.
    """
    order = [LIFT, *groups]
    for one in rules:
        if one.name in {*order, *taken}:
            raise RuleFileError(f"{one.origin}: there is a rule {one.name} already, one of Cannopy's own; choose "
                                "another name")
    known = [*order, *(one.name for one in rules)]
    waiting = list(rules)
    while waiting:
        ready = next((one for one in waiting if (one.before or one.after) in {None, *order}), None)
        if ready is None:
            raise RuleFileError(_no_place(waiting, known))
        waiting.remove(ready)
        anchor = ready.before or ready.after
        at = len(order) if anchor is None else order.index(anchor) + (ready.before is None)
        while ready.before is None and at < len(order) and _follows(order[at], anchor, rules):
            at += 1  # rules behind the same group keep their own order
        order.insert(at, ready.name)
    return order


def _follows(name: str, anchor: str | None, rules: Sequence[UserRule]) -> bool:
    return anchor is not None and any(one.name == name and one.after == anchor for one in rules)


def _no_place(waiting: Sequence[UserRule], known: Sequence[str]) -> str:
    for one in waiting:
        wanted = one.before or one.after
        if wanted not in known:
            close = difflib.get_close_matches(str(wanted), known, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            return (f"{one.origin}: rule {one.name}: there is no group of rules {wanted!r}{hint} "
                    f"Known: {', '.join(known)}")
    circle = ", ".join(f"{one.name} ({one.origin})" for one in waiting)
    return f"these rules ask to stand before or behind one another in a circle: {circle}"


def code_error(error: Exception, one: UserRule) -> RuleCodeError:
    """``error``, raised while ``one`` ran, with the last line of the rule's own file that it passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == one.file]
    line = f"{one.file}:{frames[-1].lineno} ({frames[-1].line})" if frames else one.origin
    found = RuleCodeError(f"{line}: {type(error).__name__}: {error}")
    found.node = getattr(error, "node", None)  # type: ignore[attr-defined]
    return found


def _of_file(path: Path) -> list[UserRule]:
    if not path.is_file():
        raise RuleFileError(f"rules: {path} does not exist")
    file = str(path)  # messages show it as the user wrote it
    linecache.checkcache(file)
    module = ModuleType(f"_cannopy_rules_{path.stem}")
    module.__file__ = str(path.resolve())
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses look their module up by name while it runs
    try:  # not through importlib, whose bytecode would hide a change within one second
        exec(compile(path.read_bytes(), file, "exec"), module.__dict__)
    except (Exception, SystemExit) as e:  # whatever the user's file raises; a script's exit would end ours in silence
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
        number = frames[-1].lineno if frames else getattr(e, "lineno", 0)
        raise RuleFileError(f"{path}:{number}: {type(e).__name__}: {e}") from e
    finally:
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before
    found = list(_rules_in(module))
    if not found:
        raise RuleFileError(f"{path}: no rule in it; a rule is a function with @cannopy.rule(…) above it")
    return found


def _of_entry(entry: metadata.EntryPoint) -> list[UserRule]:
    label = f"entry point {entry.name} = {entry.value} of {GROUP}"
    try:
        value = entry.load()
    except (Exception, SystemExit) as e:  # whatever another distribution raises when it is imported
        raise RuleFileError(f"{label}: {type(e).__name__}: {e}") from e
    found = list(_rules_in(value)) if isinstance(value, ModuleType) else [value]
    if not isinstance(value, ModuleType) and isinstance(value, Sequence):
        found = list(value)
    if not found or not all(isinstance(one, UserRule) for one in found):
        raise RuleFileError(f"{label}: expected a module with rules, a rule or a list of rules")
    return [one if one.origin else replace(one, origin=label) for one in found]


def _rules_in(module: ModuleType) -> Iterator[UserRule]:
    seen: list[Any] = []
    for value in vars(module).values():
        if isinstance(value, UserRule) and not any(value is other for other in seen):
            seen.append(value)
            yield value
