"""Norms, activations, rotary embedding, routing, caches, and ATen operations without a fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from cannopy.fx_passes.parallel import ranks_of
from cannopy.stream_scheduler.graph_cost.shapes import Call, argument, itemsize, numel, rows, width

Pricer = Callable[[fx.Node], Call]


def _rows_of(kernel: str, index: int = 0) -> Pricer:
    """A kernel over the rows of argument ``index``."""

    def price(node: fx.Node) -> Call:
        x = node.args[index]
        return Call(kernel, {"rows": rows(x), "width": width(x)})

    return price


def _rows_of_result(kernel: str) -> Pricer:
    def price(node: fx.Node) -> Call:
        return Call(kernel, {"rows": rows(node), "width": width(node)})

    return price


def _elementwise(ops: float = 1.0) -> Pricer:
    def price(node: fx.Node) -> Call:
        tensors = [n for n in node.all_input_nodes if numel(n) > 1]
        return Call("elementwise", {"elements": numel(node), "inputs": float(max(1, len(tensors))),
                                    "bytes": itemsize(node), "ops": ops})

    return price


def _moved(kernel: str) -> Pricer:
    def price(node: fx.Node) -> Call:
        return Call(kernel, {"elements": numel(node), "bytes": itemsize(node)})

    return price


def _rotary(node: fx.Node) -> Call:
    x = node.args[0]
    dim = width(x)
    heads = max(1.0, numel(x) / dim / max(1.0, numel(node.args[1]) / width(node.args[1])))
    return Call("rotary", {"rows": max(1.0, numel(x) / dim / heads), "heads": heads, "dim": dim})


def _interleave(node: fx.Node) -> Call:
    found = _rotary(node)
    return Call("interleave_rope", found.sizes)


def _gating(node: fx.Node) -> Call:
    x = node.args[0]
    return Call("moe_gating_top_k", {"tokens": rows(x), "experts": width(x), "top_k": float(_int(node, 1, "k"))})


def _int(node: fx.Node, index: int, name: str) -> int:
    found: Any = argument(node, index, name, 1)
    return int(found)


def _init_routing(node: fx.Node) -> Call:
    x, targets = node.args[0], argument(node, 1, "expert_idx")
    return Call("moe_init_routing", {"tokens": rows(x), "top_k": width(targets), "hidden": width(x),
                                     "bytes": itemsize(x)})


def _finalize(node: fx.Node) -> Call:
    top_k = numel(node.args[0]) / numel(node)
    return Call("moe_finalize_routing", {"tokens": rows(node), "top_k": max(1.0, top_k), "hidden": width(node)})


def _exchange(kernel: str, world: int) -> Pricer:
    """``world``: place of ``ep_world_size`` among the arguments."""

    def price(node: fx.Node) -> Call:
        targets = argument(node, 1, "expert_ids")
        tokens, top_k = rows(targets), width(targets)
        data = node.args[0] if kernel == "moe_dispatch" else node
        payload = itemsize(node) if kernel == "moe_dispatch" else itemsize(node.args[0])
        ranks = float(argument(node, world, "ep_world_size", 1) or 1)
        return Call(kernel, {"tokens": tokens, "top_k": top_k, "hidden": width(data), "ranks": max(1.0, ranks),
                             "payload_bytes": payload})

    return price


def _top_k(node: fx.Node) -> Call:
    x = node.args[0]
    k = float(_int(node, 1, "k")) if "topk" in str(node.target) else width(x)
    return Call("top_k", {"rows": rows(x), "width": width(x), "k": k})


def _reduce(node: fx.Node) -> Call:
    x = node.args[0]
    results = numel(node)
    return Call("reduce", {"rows": results, "width": max(1.0, numel(x) / results)})


def _update(index: int) -> Pricer:
    """Rows written into a cache; what is not written is not touched."""

    def price(node: fx.Node) -> Call:
        written = node.args[index]
        if not isinstance(written, fx.Node):
            return Call("elementwise", {"elements": numel(node), "bytes": itemsize(node)})
        return Call("cache_update", {"rows": rows(written), "width": width(written), "bytes": itemsize(written)})

    return price


def _embedding(node: fx.Node) -> Call:
    return Call("embedding", {"tokens": rows(node), "hidden": width(node), "bytes": itemsize(node)})


def _collective(kernel: str, scale: Callable[[fx.Node, float], float]) -> Pricer:
    def price(node: fx.Node) -> Call:
        before, after = numel(node.args[0]), numel(node)
        ranks = _ranks(node, kernel, before, after)
        return Call(kernel, {"ranks": max(2.0, ranks), "bytes_per_rank": scale(node, itemsize(node))})

    return price


def _ranks(node: fx.Node, kernel: str, before: float, after: float) -> float:
    if kernel == "all_gather":
        return after / before
    if kernel == "reduce_scatter":
        return before / after
    splits = node.args[1] if kernel == "all_to_all" and isinstance(node.args[1], (list, tuple)) else ()
    return float(ranks_of(str(node.args[-1])) or len(splits) or 2)


ELEMENTWISE = (
    "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar", "mul.Tensor", "mul.Scalar", "div.Tensor",
    "div.Scalar", "neg", "relu", "abs", "rsqrt", "sqrt", "pow.Tensor_Scalar", "reciprocal", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "where.self", "masked_fill.Scalar", "masked_fill.Tensor", "eq.Scalar",
    "eq.Tensor", "ne.Scalar", "ne.Tensor", "lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor", "gt.Scalar", "gt.Tensor",
    "ge.Scalar", "ge.Tensor", "bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_not", "logical_and", "logical_or",
    "logical_not", "floor_divide", "floor_divide.Scalar", "remainder.Scalar", "remainder.Tensor", "trunc", "floor",
    "_to_copy", "full_like", "zeros_like", "ones_like", "tril", "triu",
)
TRANSCENDENTAL = ("exp", "log", "cos", "sin", "tanh", "sigmoid", "silu", "gelu", "softplus")
CREATED = ("arange", "arange.start", "arange.start_step", "full", "zeros", "ones", "new_full", "new_ones", "new_zeros")

TABLE: dict[str, Pricer] = {
    **{f"aten.{name}": _elementwise() for name in ELEMENTWISE},
    **{f"aten.{name}": _elementwise(ops=8.0) for name in TRANSCENDENTAL},
    **{f"aten.{name}": _elementwise() for name in CREATED},
    "aten._softmax": _rows_of("softmax"),
    "aten.native_layer_norm": _rows_of("layer_norm"),
    "aten.embedding": _embedding,
    "aten.cat": _moved("cat"), "aten.stack": _moved("cat"),
    "aten.permute": _moved("transpose"), "aten.transpose.int": _moved("transpose"), "aten.t": _moved("transpose"),
    "aten.clone": _moved("copy"), "aten.expand": _moved("copy"), "aten.slice.Tensor": _moved("copy"),
    "aten.select.int": _moved("copy"), "aten.split_with_sizes": _moved("copy"), "aten.split.Tensor": _moved("copy"),
    "aten.index.Tensor": _moved("copy"), "aten.gather": _moved("copy"), "aten.index_select": _moved("copy"),
    "aten.repeat": _moved("copy"),
    "aten.topk": _top_k, "aten.sort": _top_k, "aten.sort.stable": _top_k, "aten.argsort": _top_k,
    "aten.argsort.stable": _top_k,
    "aten.sum.dim_IntList": _reduce, "aten.mean.dim": _reduce, "aten.amax": _reduce, "aten.max.dim": _reduce,
    "aten.any.dim": _reduce, "aten.all.dim": _reduce, "aten.argmax": _reduce, "aten.cumsum": _rows_of("reduce"),
    "aten.index_copy": _update(3), "aten.index_put": _update(2), "aten.slice_scatter": _update(1),
    "aten.scatter.src": _update(3), "aten.scatter.value": _update(3), "aten.scatter_add": _update(3),
    "npu.npu_scatter_nd_update": _update(2), "npu.npu_scatter_nd_update_": _update(2),
    "npu.npu_rms_norm": _rows_of("rms_norm"), "npu.npu_add_rms_norm": _rows_of("add_rms_norm"),
    "npu.npu_dynamic_quant": _rows_of("dynamic_quant"), "npu.npu_swiglu": _rows_of_result("swiglu"),
    "npu.npu_dequant_swiglu_quant": _rows_of_result("dequant_swiglu_quant"),
    "npu.npu_rotary_mul": _rotary, "npu.npu_interleave_rope": _interleave,
    "npu.npu_moe_gating_top_k": _gating, "npu.npu_moe_init_routing_v2": _init_routing,
    "npu.npu_moe_finalize_routing": _finalize,
    "npu.npu_moe_distribute_dispatch_v2": _exchange("moe_dispatch", 3),
    "npu.npu_moe_distribute_combine_v2": _exchange("moe_combine", 6),
    "_c10d_functional.all_gather_into_tensor": _collective("all_gather", lambda n, e: numel(n.args[0]) * e),
    "_c10d_functional.reduce_scatter_tensor": _collective("reduce_scatter", lambda n, e: numel(n) * e),
    "_c10d_functional.all_reduce": _collective("all_reduce", lambda n, e: numel(n) * e),
    "_c10d_functional.all_to_all_single": _collective("all_to_all", lambda n, e: numel(n) * e),
}

