"""YAML that remembers its lines."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from cannopy.stream_scheduler.plan.model import PlanError


class Mapping(dict[Any, Any]):
    """A mapping; ``line`` of its start and ``lines`` of its values."""

    line: int
    lines: dict[Any, int]


class Sequence(list[Any]):
    """A sequence; ``line`` of its start and ``lines`` of its items."""

    line: int
    lines: list[int]


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except PlanError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            value = str(node.value) if isinstance(node, yaml.ScalarNode) else node.tag
            raise PlanError(f"line {node.start_mark.line + 1}: no YAML: {value[:40]!r} is no "
                            f"{node.tag.rpartition(':')[2]}") from None

    def mapping(self, node: yaml.MappingNode) -> Mapping:
        found = Mapping()
        found.line, found.lines = node.start_mark.line + 1, {}
        for key_node, value_node in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise PlanError(f"line {line}: expected a name, found {key!r}")
            if key in found:
                raise PlanError(f"line {line}: {key!r} is given twice, first in line {found.lines[key]}")
            found[key] = self.construct_object(value_node, deep=True)
            found.lines[key] = line
        return found

    def sequence(self, node: yaml.SequenceNode) -> Sequence:
        found = Sequence(self.construct_object(item, deep=True) for item in node.value)
        found.line = node.start_mark.line + 1
        found.lines = [item.start_mark.line + 1 for item in node.value]
        return found


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.sequence)


def load(text: str) -> Any:
    """The data in ``text``. `PlanError` with the line for what is no YAML and for a key that is given twice."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise PlanError(f"{line}no YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise PlanError(f"no YAML: {error}") from None
    except RecursionError:
        raise PlanError("no plan: lists or mappings in one another, more than a plan has") from None


def at(where: str, line: int | None) -> str:
    """``where`` in ``line``, in place of the line that it has."""
    rest = where.partition(": ")[2] if where.startswith("line ") else where
    return where if line is None else f"line {line}: {rest}"
