"""cat or stack of weights  →  one weight that is built at load time (`weight_plan`).

Experts in a list of modules are stacked in the graph; that happens once, not in every step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.weight_plan import derived, why_not_weight

JOINS = (aten.cat.default, aten.stack.default)


def run(program: Program) -> int:
    """Replace every concatenation of weights that is no operand of another concatenation."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    if any(is_call(_behind_reshapes(user), *JOINS) for user in node.users) or not _constant(program, node):
        return 0
    sources: list[fx.Node] = []
    recipe = _recipe(node, sources)
    editor.replace(node, derived(program, editor, f"{sources[0].name}_stacked", sources, recipe))
    return 1


STEP = Step("stacks", frozenset(JOINS), _visit)


def _behind_reshapes(node: fx.Node) -> fx.Node:
    """The first reader of a value that is not a reshape with one reader."""
    while is_call(node, aten.reshape.default) and len(node.users) == 1:
        node = next(iter(node.users))
    return node


def _constant(program: Program, node: fx.Node) -> bool:
    """Whether a value is made of weights by concatenation and reshapes."""
    if node.op == "placeholder":
        return why_not_weight(program, node) is None
    return is_call(node, *JOINS, aten.reshape.default) and all(
        _constant(program, n) for n in node.all_input_nodes)


def _recipe(node: fx.Node, sources: list[fx.Node]) -> str:
    """The text that builds ``node``; its weights are appended to ``sources``."""
    if node.op == "placeholder":
        sources.append(node)
        return f"w[{len(sources) - 1}]"
    if is_call(node, aten.reshape.default):
        return f"{_recipe(cast(fx.Node, node.args[0]), sources)}.reshape({list(cast('list[int]', node.args[1]))})"
    join = "torch.stack" if is_call(node, aten.stack.default) else "torch.cat"
    parts, dim = cast("tuple[list[fx.Node], int]", (*node.args, 0)[:2])
    firsts, texts = [], []
    for part in parts:
        firsts.append(len(sources))
        texts.append(_recipe(part, sources))
    step = firsts[1] - firsts[0] if len(firsts) > 1 else 0
    if len(parts) > 2 and firsts == [firsts[0] + i * step for i in range(len(parts))]:
        shifted = [re.sub(r"w\[(\d+)\]", _minus(first), text) for first, text in zip(firsts, texts, strict=True)]
        if len(set(shifted)) == 1 and " for i in " not in shifted[0]:
            return f"{join}([{shifted[0]} for i in range({firsts[0]}, {len(sources)}, {step})], {dim})"
    return f"{join}([{', '.join(texts)}], {dim})"


def _minus(first: int) -> Callable[[re.Match[str]], str]:
    return lambda found: f"w[i + {int(found[1]) - first}]"


