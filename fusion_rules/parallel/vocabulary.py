"""Embedding and head by parts of the vocabulary, over embed_tp and lm_head_tp.

    E[ids]   →  reduce_scatter(masked E[r][IDS - first]),  IDS = all_gather(ids): ids of other ranks give zeros
    h Whᵀ    →  all_to_all(H Wh[r]ᵀ),  H = all_gather(h): each rank gets all columns of its own tokens back

Both are exact: the sum has one term that is not zero, and the products are those of one die. Ranks that have the same
tokens (attn_tp) gather nothing first; they add by all_reduce and gather the columns.
"""

from __future__ import annotations

import math
from typing import cast

from torch import fx

from cannopy.fusion_rules.parallel.collectives import all_gather, all_to_all
from cannopy.fusion_rules.parallel.narrow import Narrow
from cannopy.fusion_rules.parallel.places import heads_of_vocabulary, operands
from cannopy.fusion_rules.parallel.shards import Part
from cannopy.fusion_rules.parallel.tokens import Rows, rows_at
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, shape

EMBEDDING, HEAD = "embed_tp", "lm_head_tp"


def cut_embedding(work: Work) -> int:
    """Cut every embedding; the number of look-ups. Raises `ParallelError` where one cannot be cut."""
    rows = rows_at(work, EMBEDDING)
    part = Part(work.layout.position(EMBEDDING), work.layout.size(EMBEDDING))
    parameters = {spec.name for spec in work.program.inputs if spec.kind == "parameter"}
    found = [n for n in work.editor.calls([aten.embedding.default]) if cast(fx.Node, n.args[0]).name in parameters]
    for node in found:
        _embedding(work, rows(node), part, node)
    return len(found)


def _embedding(work: Work, rows: Rows, part: Part, node: fx.Node) -> None:
    editor, (weight, ids) = work.editor, cast("tuple[fx.Node, fx.Node]", node.args[:2])
    first, end = part.of(shape(weight)[0], f"{EMBEDDING}: the vocabulary", node)
    with editor.before(node):
        matrix = Narrow(work, EMBEDDING).weight(weight, 0, [(first, end)])
        own = editor.call(aten.sub.Tensor, rows.all(ids, node), first)
        near = editor.call(aten.clamp.default, own, 0, end - first - 1)
        other = editor.call(aten.ne.Tensor, own, near)
        found = editor.call(aten.embedding.default, matrix, near)
        mask = editor.reshape(other, [*shape(other), 1])
        editor.replace(node, rows.summed(editor.call(aten.masked_fill.Scalar, found, mask, 0)))


def cut_head(work: Work) -> int:
    """Cut every projection to the vocabulary; the number of them. Raises `ParallelError` where one cannot be cut."""
    rows = rows_at(work, HEAD)
    part = Part(work.layout.position(HEAD), work.layout.size(HEAD))
    found = heads_of_vocabulary(work.program, work.editor)
    for node in found:
        _head(work, rows(node), part, node)
    return len(found)


def _head(work: Work, rows: Rows, part: Part, node: fx.Node) -> None:
    editor, narrow = work.editor, Narrow(work, HEAD)
    x, weight, bias = operands(node)
    columns = part.of(shape(node)[-1], f"{HEAD}: the vocabulary", node)
    tokens, size, width = math.prod(shape(node)[:-1]), part.parts, columns[1] - columns[0]
    with editor.before(node):
        parts = [narrow.weight(w, 0, [columns]) for w in (weight, bias) if w is not None]
        local = editor.call(aten.linear.default, rows.all(x, node), *parts)
        flat = editor.reshape(local, [rows.factor * tokens, width])
        exchange = all_gather if rows.same else all_to_all
        blocks = editor.reshape(exchange(editor, flat, rows.group), [size, tokens, width])
        joined = editor.call(aten.permute.default, blocks, [1, 0, 2])
        editor.replace(node, editor.reshape(joined, shape(node)))
