"""_grouped_mm(x [T, K], w [E, K, N], ends [E])  →  npu_grouped_matmul with cumulative ends as group_list."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes import weight_plan
from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.legalise.error import LegaliseError
from cannopy.fx_passes.program import Program

MOST_GROUPS = 1024
LONGEST_INNER = 65535
TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Limits of the op-plugin document of npu_grouped_matmul on A2/A3 without quantisation."""

CUMULATIVE, LIST_OF_ONE = 0, 3
"""group_list_type 0: ends, not counts. split_item 3: one tensor out."""


def run(program: Program, editor: Editor) -> int:
    """Replace PyTorch's and transformers' grouped products of rows."""
    found = [n for n in editor.graph.nodes if _is_grouped(n)]
    for node in found:
        x, weight, ends = _operands(node)
        weight = _stored(program, editor, weight)
        with editor.before(node):
            if dtype(ends) != torch.int64:
                ends = editor.call(aten._to_copy.default, ends, dtype=torch.int64)
            product = editor.call(
                torch.ops.npu.npu_grouped_matmul.default, [x], [weight], group_list=ends, split_item=LIST_OF_ONE,
                group_type=0, group_list_type=CUMULATIVE,
            )
            editor.replace(node, editor.item(product, 0))
    return len(found)


def _is_grouped(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return is_call(node, aten._grouped_mm.default) or str(node.target) == "transformers.grouped_mm_fallback.default"


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    names = ("x", "weight", "offs", "bias", "out_dtype")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x, weight, ends = given["x"], given["weight"], given.get("offs")
    ranks = (len(shape(x)), len(shape(weight)))
    plain = ends is not None and given.get("bias") is None and given.get("out_dtype") in (None, dtype(x))
    fits = shape(weight)[0] <= MOST_GROUPS and max(shape(weight)[1:]) <= LONGEST_INNER
    if ranks != (2, 3) or not plain or not fits or dtype(x) not in TYPES or dtype(x) != dtype(weight):
        raise LegaliseError(
            node, f"rows [T, K] of bf16, fp16 or fp32 by weights [E <= {MOST_GROUPS}, K, N < 65536] of the same dtype",
            f"{dtype(x)}{list(shape(x))} by {dtype(weight)}{list(shape(weight))}",
            "use the model's batched or eager experts",
        )
    return x, weight, cast(fx.Node, ends)


def _stored(program: Program, editor: Editor, weight: fx.Node) -> fx.Node:
    """``weight`` itself, or, when it is a transpose of a parameter, a parameter stored that way."""
    if not is_call(weight, aten.permute.default):
        return weight
    source, order = weight.args[0], weight.args[1]
    if weight_plan.why_not_weight(program, source) is not None:
        return weight
    source = cast(fx.Node, source)
    return weight_plan.derived(program, editor, f"{source.name}_kn", [source], f"w[0].permute({order})")
