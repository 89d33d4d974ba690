"""Put a graph back into topological order after a rewrite that placed a node behind some of its users."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


def settle(users: Iterable[fx.Node]) -> int:
    """Bring in front of each of ``users`` the operands that stand behind it; the number of nodes moved.

    As `sort` when only the operands of ``users`` may be out of place, without looking at the rest of the graph.
    A cycle raises ValueError with the nodes in it.
    """
    moved = 0
    for user in sorted({node for node in users if not node._erased}):
        open_nodes = {user}
        stack = [(user, iter(user.all_input_nodes))]
        while stack:
            node, operands = stack[-1]
            behind = next((i for i in operands if not i < user), None)
            if behind is None:
                stack.pop()
                open_nodes.discard(node)
                if node is not user:
                    user.prepend(node)
                    moved += 1
            elif behind in open_nodes:
                raise ValueError(f"the graph has a cycle through {behind.name} and {node.name}")
            else:
                open_nodes.add(behind)
                stack.append((behind, iter(behind.all_input_nodes)))
    return moved


def sort(graph: fx.Graph) -> int:
    """Move nodes as little as possible so that every node stands behind its inputs; the number of nodes moved.

    Nodes keep their order where it was legal. A cycle raises ValueError with the nodes in it.
    """
    order: list[fx.Node] = []
    done: set[fx.Node] = set()
    for root in graph.nodes:
        stack = [(root, iter(root.all_input_nodes))] if root not in done else []
        open_nodes = {root}
        while stack:
            node, inputs = stack[-1]
            pending = next((i for i in inputs if i not in done), None)
            if pending is None:
                stack.pop()
                open_nodes.discard(node)
                if node not in done:
                    done.add(node)
                    order.append(node)
            elif pending in open_nodes:
                raise ValueError(f"the graph has a cycle through {pending.name} and {node.name}")
            else:
                open_nodes.add(pending)
                stack.append((pending, iter(pending.all_input_nodes)))
    moved = 0
    for wanted, previous in zip(order[1:], order, strict=False):
        if previous.next is not wanted:
            previous.append(wanted)
            moved += 1
    return moved
