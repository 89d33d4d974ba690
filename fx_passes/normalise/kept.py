"""What an input held before its trailing ``copy_``, as a result or as another input's next value  →  a copy of it.

Rewrites that pass an operand on (x * 1, a mask that hides nothing, a copy that fills) may leave the input itself there.
"""

from __future__ import annotations

from torch import fx

from cannopy.fx_passes import alias
from cannopy.fx_passes.graph import Editor, aten, is_call
from cannopy.fx_passes.program import Program


def run(program: Program) -> int:
    """Copy every old value that would be read behind the write of its input; the number of copies."""
    graph = program.gm.graph
    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    if not writes:
        return 0
    editor, written, copies = Editor(program.gm), set[fx.Node](), dict[fx.Node, fx.Node]()
    for node in (*writes, graph.output_node()):
        first = node.args[:1] if is_call(node, aten.copy_.default) else ()
        values = node.args[len(first):]
        old = [used for used in alias.nodes_in(values) if alias.base(used) in written]
        for used in old:
            if used not in copies:
                with editor.before(writes[0]):
                    copies[used] = editor.call(aten.clone.default, used)
        if old:
            node.args = (*first, *fx.node.map_arg(values, lambda n: copies.get(n, n)))
        written.update(n for n in first if isinstance(n, fx.Node))
    return len(copies)
