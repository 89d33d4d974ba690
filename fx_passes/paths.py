"""Access paths: how a tensor of a program is found among the user's objects at each call.

A path is the text that `fx_passes.program.InputSpec.source` holds: a root (``self`` for the module, ``args`` or
``kwargs`` for those of the call) and steps ``.name``, ``['key']`` and ``[0]``, as in
``kwargs['cache'].layers[0].keys``. Nothing else of Python is understood and nothing is evaluated.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOTS = ("self", "args", "kwargs")

Resolver = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""``resolver(module, args, kwargs)`` is the object at a path."""

_STEP = re.compile(
    r"""\.(?P<attr>[^\W\d]\w*)"""
    r"""|\[\s*(?P<key>-?\d+|True|False|None|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*\]""",
    re.DOTALL,
)
_ROOT = re.compile(r"[^\W\d]\w*")


class PathSyntaxError(ValueError):
    """The text is not an access path."""


class PathLookupError(LookupError):
    """The objects of this call have nothing at the path; `step` is the first step that failed."""

    def __init__(self, path: str, step: str, found: str) -> None:
        super().__init__(f"nothing at {path}: {step} failed on {found}")
        self.path = path
        self.step = step
        self.found = found


@dataclass(frozen=True)
class Step:
    """One step of a path: attribute `key` (a name) or item `key` (str, int, bool or None)."""

    kind: str
    key: Any

    def __str__(self) -> str:
        return f".{self.key}" if self.kind == "attr" else f"[{self.key!r}]"

    def apply(self, value: Any) -> Any:
        """The object one step below `value`; what Python raises when there is none."""
        return getattr(value, self.key) if self.kind == "attr" else value[self.key]


def attr(name: str) -> Step:
    """Step ``.name``."""
    return Step("attr", name)


def item(key: Any) -> Step:
    """Step ``[key]``."""
    return Step("item", key)


@dataclass(frozen=True)
class Path:
    """A parsed path. `str` gives one canonical spelling back."""

    root: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.root + "".join(map(str, self.steps))

    def then(self, *steps: Step) -> Path:
        """This path with ``steps`` behind it."""
        return Path(self.root, (*self.steps, *steps))

    def resolve(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The object at this path; `PathLookupError` names the step at which the objects end."""
        value = module if self.root == "self" else args if self.root == "args" else kwargs
        for i, step in enumerate(self.steps):
            try:
                value = step.apply(value)
            except (AttributeError, LookupError, TypeError) as e:
                prefix = Path(self.root, self.steps[:i])
                raise PathLookupError(str(self), str(step), f"{prefix} ({type(value).__name__})") from e
        return value


def parse_path(path: str) -> Path:
    """The steps of `path`; `PathSyntaxError` if it is not one."""
    parsed = parse_expression(path)
    if parsed.root not in ROOTS:
        raise PathSyntaxError(f"{path!r}: a path starts with one of {', '.join(ROOTS)}")
    return parsed


def parse_expression(path: str) -> Path:
    """As `parse_path`, but the root may be any name (``L['self'].weight`` in Dynamo's sources)."""
    root = _ROOT.match(path)
    if root is None:
        raise PathSyntaxError(f"{path!r}: expected a name at its start")
    steps = []
    pos = root.end()
    while pos < len(path):
        m = _STEP.match(path, pos)
        if m is None:
            raise PathSyntaxError(f"{path!r}: expected .name, ['key'] or [index] at character {pos}")
        if m["attr"] is not None:
            steps.append(attr(m["attr"]))
        else:
            steps.append(item(ast.literal_eval(m["key"])))
        pos = m.end()
    return Path(root.group(), tuple(steps))


def compile_path(path: str) -> Resolver:
    """A function ``(module, args, kwargs) -> object`` for `path`, made once and called at every step."""
    parsed = parse_path(path)
    getters = tuple(
        operator.attrgetter(s.key) if s.kind == "attr" else operator.itemgetter(s.key) for s in parsed.steps
    )
    root = ROOTS.index(parsed.root)

    def resolve(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value: Any = (module, args, kwargs)[root]
        try:
            for get in getters:
                value = get(value)
        except (AttributeError, LookupError, TypeError):
            return parsed.resolve(module, args, kwargs)  # says which step failed
        return value

    return resolve
