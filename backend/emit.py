"""Program -> Python source of an ``nn.Module`` whose one method is the final graph.

Arguments, state and everything that the graph mutates become arguments of the method; parameters and buffers that
it only reads, derived weights and constants become attributes of the module. The text is what torchair traces and
what an artifact keeps, so it is written to be read: one statement per node, under comments that say where in the
user's model it comes from.
"""

from __future__ import annotations

import hashlib
import keyword
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from cannopy.fx_passes.paths import parse_path
from cannopy.fx_passes.program import InputSpec, Program

AttributeKind = Literal["parameter", "buffer", "weight", "constant"]

_RESERVED = {"self", "torch", "torch_npu", "call", "FINGERPRINT", "float", "inf", "nan"}
_PLUMBING = {"_modules", "_parameters", "_buffers"}


class EmitError(RuntimeError):
    """The graph has something that a generated method cannot say; the message names the node and its source."""


@dataclass(frozen=True)
class Attribute:
    """An attribute ``name`` of the generated module, bound to ``placeholder`` (for a constant: the graph's target)."""

    name: str
    placeholder: str
    kind: AttributeKind


@dataclass(frozen=True)
class EmittedModule:
    """Generated source and what its names stand for.

    ``arguments`` are the placeholders that the method takes, in its order, ``written`` those of them that it
    changes in place. ``digest`` covers the statements, the
    bindings and the weight recipes, not the comments: it does not move with line numbers of the user's files.
    """

    source: str
    class_name: str
    method_name: str
    digest: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    attributes: tuple[Attribute, ...]


@dataclass
class _Names:
    """Python names, one per key, without collisions."""

    taken: set[str] = field(default_factory=lambda: set(_RESERVED))
    of: dict[str, str] = field(default_factory=dict)

    def give(self, key: str, wanted: str) -> str:
        base = re.sub(r"\W+", "_", wanted).strip("_") or "t"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"t_{base}"
        name, n = base, 1
        while name in self.taken:
            name, n = f"{base}_{n}", n + 1
        self.taken.add(name)
        self.of[key] = name
        return name


def identifier(name: str) -> str:
    """`name` as an ASCII identifier of at most 48 characters: it goes into file names as well."""
    text = re.sub(r"[^0-9A-Za-z_]", "_", name)[:48]
    return f"_{text}" if not text or text[0].isdigit() else text


def readable_name(spec: InputSpec) -> str:
    """``self._modules['model']._parameters['weight']`` -> ``model_weight``; plumbing of nn.Module left out."""
    path = parse_path(spec.source)
    steps = [str(s.key) for s in path.steps if not (s.kind == "attr" and s.key in _PLUMBING)]
    if path.root == "args":
        steps.insert(0, "arg")
    return "_".join(steps) or path.root


def _where(node: fx.Node) -> str:
    source = node.meta.get("source")
    return f"node {node.name}" + (f" ({source})" if source else "")


def _literal(value: Any, names: dict[str, str], node: fx.Node) -> str:
    """The Python expression of an argument of `node`."""
    if isinstance(value, fx.Node):
        return names[value.name]
    if value is None or value is Ellipsis or isinstance(value, (bool, int, str, bytes)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f'float("{value}")'
    if isinstance(value, complex):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, slice):
        return f"slice({', '.join(_literal(v, names, node) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, (list, tuple)):
        items = ", ".join(_literal(v, names, node) for v in value)
        if isinstance(value, list):
            return f"[{items}]"
        return f"({items},)" if value else "()"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_literal(v, names, node)}" for k, v in value.items()) + "}"
    raise EmitError(
        f"{_where(node)}: argument {value!r} ({type(value).__name__}) is not a constant; graphs are compiled for"
        " fixed shapes and constants only"
    )


def _expression(node: fx.Node, names: dict[str, str]) -> str:
    """The right-hand side of the statement of a call_function node."""
    if node.target is operator.getitem:
        return f"{_literal(node.args[0], names, node)}[{_literal(node.args[1], names, node)}]"
    if not isinstance(node.target, torch._ops.OpOverload):
        raise EmitError(f"{_where(node)}: {node.target} is not an operator of torch.ops")
    parts = [_literal(a, names, node) for a in node.args]
    parts += [f"{k}={_literal(v, names, node)}" for k, v in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join(parts)})"


def _provenance(node: fx.Node) -> str:
    parts = [str(node.meta[k]) for k in ("module_path", "source") if node.meta.get(k)]
    if node.meta.get("rule"):
        parts.append(f"[{node.meta['rule']}]")
    return " ".join(" ".join(parts).split())


def _statements(graph: fx.Graph, names: _Names) -> Iterable[tuple[str, str]]:
    """(statement, provenance) of each node after the placeholders."""
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.op == "output":
            values = node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],)
            yield f"return {_literal(tuple(values), names.of, node)}", ""
        elif node.op == "call_function":
            expression = _expression(node, names.of)
            if node.users:
                expression = f"{names.give(node.name, node.name)} = {expression}"
            yield expression, _provenance(node)
        else:
            raise EmitError(f"{_where(node)}: {node.op} {node.target} cannot be emitted; only calls of torch.ops can")


def constant(gm: fx.GraphModule, target: str) -> torch.Tensor:
    """The tensor that a get_attr node reads; `EmitError` if it is anything else."""
    value: Any = gm
    for name in target.split("."):
        value = getattr(value, name)
    if not isinstance(value, torch.Tensor):
        raise EmitError(f"get_attr {target}: a {type(value).__name__}, only tensors can be constants of a graph")
    return value.detach()


def _written(program: Program) -> set[str]:
    """Placeholders that the graph changes in place."""
    written = {s.name for s in program.inputs if s.mutated}
    for n in program.gm.graph.nodes:
        if (
            n.target is torch.ops.aten.copy_.default
            and isinstance(n.args[0], fx.Node)
            and n.args[0].op == "placeholder"
        ):
            written.add(n.args[0].name)
    return written


def _bindings(program: Program, names: _Names) -> tuple[list[str], list[Attribute]]:
    """What each placeholder and get_attr node becomes: an argument of the method or an attribute of the module."""
    specs = {s.name: s for s in program.inputs}
    weights = {w.name for w in program.weights}
    written = _written(program)
    owned = weights | {s.name for s in program.inputs if s.kind in ("parameter", "buffer")} - written
    arguments: list[str] = []
    attributes: dict[str, Attribute] = {}
    for node in program.gm.graph.nodes:
        if node.op == "get_attr":
            key = f"constant {node.target}"
            if key not in attributes:
                constant(program.gm, str(node.target))
                name = names.give(key, str(node.target))
                attributes[key] = Attribute(name, str(node.target), "constant")
            names.of[node.name] = f"self.{attributes[key].name}"
        elif node.op == "placeholder" and not node.users and node.name in owned:
            continue  # the plan makes other weights of it, which the graph reads
        elif node.op == "placeholder" and node.name in weights:
            name = names.give(node.name, node.name)
            attributes[node.name] = Attribute(name, node.name, "weight")
            names.of[node.name] = f"self.{name}"
        elif node.op == "placeholder":
            spec = specs.get(node.name)
            if spec is None:
                raise EmitError(f"placeholder {node.name} has neither an InputSpec nor a WeightEntry")
            name = names.give(node.name, readable_name(spec))
            if (spec.kind == "parameter" or spec.kind == "buffer") and node.name not in written:
                attributes[node.name] = Attribute(name, node.name, spec.kind)
                names.of[node.name] = f"self.{name}"
            else:
                arguments.append(node.name)
    return arguments, list(attributes.values())


_TEMPLATE = '''"""{title}

Written by cannopy; the compile cache checks this file's digest, so an edited copy is not loaded.
"""

import torch
import torch_npu  # noqa: F401  registers torch.ops.npu

FINGERPRINT = "{fingerprint}"


class {class_name}(torch.nn.Module):
    def extra_repr(self) -> str:
        return f"fingerprint={{FINGERPRINT}}"

    def {method_name}({parameters}):
{body}


def call(compiled, tensors):
    """Run `compiled` with this file's globals in the calling frame, where torchair looks names up."""
    return compiled(*tensors)
'''


def emit(program: Program, model_class: str, method: str, fingerprint: str) -> EmittedModule:
    """The generated module of `program`.

    ``model_class`` and ``method`` name the user's model in the text; ``fingerprint`` is the compile-cache key, shown
    by the module's repr because torchair's own key is made of nothing else. Raises `EmitError`.
    """
    names = _Names()
    arguments, attributes = _bindings(program, names)
    statements = list(_statements(program.gm.graph, names))
    argument_names = [names.of[a] for a in arguments]
    digest = hashlib.sha256(
        "\n".join(
            [fingerprint, ",".join(argument_names), *(s for s, _ in statements), *map(repr, attributes)]
            + [repr(s) for s in program.inputs]
            + [repr(w) for w in program.weights]
        ).encode()
    ).hexdigest()
    class_name = f"{identifier(model_class)}_{digest[:12]}"
    method_name = f"{identifier(method)}_{digest[:12]}"
    lines, last = [], ""
    for statement, provenance in statements:
        if provenance and provenance != last:
            lines.append(f"        # {provenance}")
            last = provenance
        lines.append(f"        {statement}")
    source = _TEMPLATE.format(
        title=f"{identifier(model_class)}.{identifier(method)}, compiled.",
        fingerprint=fingerprint,
        class_name=class_name,
        method_name=method_name,
        parameters="".join(f"\n        {name}," for name in ["self", *argument_names]) + "\n    ",
        body="\n".join(lines),
    )
    return EmittedModule(
        source=source,
        class_name=class_name,
        method_name=method_name,
        digest=digest,
        arguments=tuple(arguments),
        written=tuple(a for a in arguments if a in _written(program)),
        attributes=tuple(attributes),
    )
