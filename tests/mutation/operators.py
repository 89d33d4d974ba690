"""What a mutation operator is, and how it edits a captured graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.order import sort
from cannopy.fx_passes.program import InputSpec, Program

Tensor = torch.Tensor
MARK = "mutant.py:1"
"""The source line of every node that a mutation makes or changes: a reason that points there names the thing."""

ATTENTION = ("sparse_flash_attention", "fused_infer_attention", "mla_prolog")
NORM = ("rms_norm", "add_rms_norm", "mla_prolog")
ROPE = ("rotary_mul", "mla_prolog")
ROUTER = ("moe_gating_top_k",)
EXPERTS = ("moe_experts",)
MLP = ("swiglu",)
ALL = (*ATTENTION, "rms_norm", "add_rms_norm", "rotary_mul", *ROUTER, *EXPERTS, *MLP)


class NotHereError(Exception):
    """The operator does not apply at this site: the mutated graph would have no meaning."""


@dataclass
class Edit:
    """A program under mutation. ``nodes`` are float64 values of the unchanged program's nodes by name."""

    program: Program
    rng: random.Random
    nodes: Mapping[str, Any]
    values: dict[str, Tensor]
    editor: Editor = field(init=False)
    read: set[str] = field(default_factory=set)
    """Nodes that are read where another one was, and inputs that the change adds: a reason at one names the change."""
    lines: set[str] = field(default_factory=set)
    """Source lines of those: a formula written out with one of them names the change."""
    instead: set[str] = field(default_factory=set)
    """Nodes that are no longer read there: a reason that two places read different values names the change at one."""

    def __post_init__(self) -> None:
        self.editor = Editor(self.program.gm)

    def mark(self, node: fx.Node) -> fx.Node:
        """Note that ``node`` is (part of) the mutated thing."""
        node.meta["source"] = MARK
        return node

    def before(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call in front of ``node``."""
        with self.editor.before(node):
            return self.mark(self.editor.call(target, *args, **kwargs))

    def after(self, node: fx.Node, target: Any, *args: Any, users: Sequence[fx.Node] | None = None,
              **kwargs: Any) -> fx.Node:
        """``target(node, *args)`` right behind ``node``; ``users`` (default: all) read it instead of ``node``."""
        readers = list(node.users) if users is None else list(users)
        new = self.behind(node, target, node, *args, **kwargs)
        for reader in readers:
            if not (is_call(reader, aten.copy_.default) and reader.args[0] is node):
                reader.replace_input_with(node, new)
        return new

    def behind(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call right behind ``node``."""
        following = node.next
        while following.op == "placeholder":
            following = following.next
        return self.before(following, target, *args, **kwargs)

    def swap_input(self, user: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """``user`` reads ``new`` instead of ``old``."""
        user.replace_input_with(old, new)
        self.mark(user)

    def set_arg(self, node: fx.Node, index: int, value: Any) -> None:
        """Change one positional argument."""
        args = list(node.args)
        while len(args) <= index:
            args.append({2: -1, 3: True, 4: True}[len(args)])  # the defaults of topk
        args[index] = value
        node.args = tuple(args)
        self.mark(node)

    def become(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
        """Turn ``node`` into another call."""
        node.target, node.args, node.kwargs = target, args, kwargs
        self.mark(node)

    def bypass(self, node: fx.Node, other: fx.Node) -> None:
        """Users of ``node`` read ``other``."""
        for reader in list(node.users):
            reader.replace_input_with(node, other)
            self.mark(reader)

    def returned(self, node: fx.Node) -> None:
        """Return ``node`` as one more result."""
        output = self.program.gm.graph.output_node()
        output.args = ((*output.args[0], node),)  # type: ignore[misc]
        self.mark(node)

    def argument(self, tensor: Tensor) -> fx.Node:
        """One more argument of the call, with the value ``tensor``."""
        with self.editor.fake_mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
        node = self.mark(self.editor.placeholder("extra", fake))
        spec = InputSpec(node.name, "argument", f"args[{len(self.program.inputs)}]", tuple(tensor.shape),
                         tensor.stride(), tensor.dtype)
        self.program.inputs.append(spec)
        self.values[node.name] = tensor
        self.read.add(node.name)
        return node

    def noise(self, *size: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers."""
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        return (scale * torch.randn(size, generator=generator)).to(dtype)

    def typical(self, node: fx.Node) -> float:
        """The mean size of a node's values in the unchanged program."""
        value = self.nodes.get(node.name)
        if not isinstance(value, Tensor) or value.numel() == 0:
            raise NotHereError
        found = float(value.double().nan_to_num(posinf=0, neginf=0).abs().mean())
        if not 0 < found < 1e30:
            raise NotHereError
        return found

    def factor(self) -> float:
        """A factor that is well away from 1."""
        return self.rng.choice([0.25, 0.5, 1.75, 3.0, round(self.rng.uniform(1.3, 4), 3)])


Sites = Callable[[Program], list[Any]]
Apply = Callable[[Edit, Any], None]


@dataclass(frozen=True)
class Operator:
    """One kind of change.

    Attributes:
        name: of the operator.
        rules: fusions whose pattern the change touches.
        sites: where in a program it can be applied.
        apply: makes the change; raises `NotHereError` where it has no meaning.
        legal: True when the fused ops compute the mutated function too, so that every fusion must remain.
        words: a reason with one of these names the mutated thing, as does one that points at a marked node.
        same: the change keeps the function, so that there is nothing to expose.
    """

    name: str
    rules: tuple[str, ...]
    sites: Sites
    apply: Apply
    legal: bool = False
    words: tuple[str, ...] = ()
    same: bool = False


def calls(program: Program, *targets: Any) -> list[fx.Node]:
    """The calls of ``targets`` in graph order."""
    return [n for n in program.gm.graph.nodes if is_call(n, *targets)]


def user(node: fx.Node, *targets: Any) -> fx.Node | None:
    """The first user of ``node`` that calls one of ``targets``."""
    return next((u for u in node.users if is_call(u, *targets)), None)


def floating(node: fx.Node) -> bool:
    """Whether a node is a floating tensor."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def through(node: Any, *targets: Any) -> Any:
    """``node`` before calls of ``targets``."""
    while is_call(node, *targets):
        node = node.args[0]
    return node


def mutate(operator: Operator, edit: Edit, site: Any) -> None:
    """Apply and make metadata true again. Raises `NotHereError` when the result is no meaningful graph."""
    try:
        operator.apply(edit, site)
    except (RuntimeError, IndexError) as e:  # what a fake kernel says of shapes that do not fit
        raise NotHereError(str(e)) from e
    graph = edit.program.gm.graph
    edit.editor.sweep()
    sort(graph)
    output = graph.output_node()
    for node in [n for n in graph.nodes if is_call(n, aten.copy_.default)]:
        output.prepend(node)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        try:
            edit.editor.refresh(node)
        except Exception as e:
            raise NotHereError(str(e)) from e
        if is_call(node, aten.copy_.default):
            cache, new = node.args[:2]
            if (shape(cache), dtype(cache)) != (shape(new), dtype(new)):  # type: ignore[arg-type]
                raise NotHereError("a cache would change its shape or dtype")
    output.meta["val"] = tuple(n.meta["val"] for n in output.args[0])  # type: ignore[union-attr]
    graph.lint()
    edit.program.gm.recompile()


def retype(edit: Edit, placeholder: fx.Node, dtype: torch.dtype) -> None:
    """Give an input another dtype."""
    with edit.editor.fake_mode:
        placeholder.meta["val"] = placeholder.meta["val"].to(dtype)
    edit.values[placeholder.name] = edit.values[placeholder.name].to(dtype)
    i = next(i for i, s in enumerate(edit.program.inputs) if s.name == placeholder.name)
    edit.program.inputs[i] = replace(edit.program.inputs[i], dtype=dtype)
    edit.mark(placeholder)
