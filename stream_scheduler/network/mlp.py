"""Dense MLP and mixture of experts of one layer."""

from __future__ import annotations

from cannopy.stream_scheduler.network.builder import Builder, Scene, linear
from cannopy.stream_scheduler.network.model import Experts

_GROUPED = {"bf16": "grouped_matmul_bf16", "int8": "grouped_matmul_int8", "int4": "grouped_matmul_w4a8"}


def gated(b: Builder, s: Scene, label: str, matrix: str, x: str, m: float, width: float) -> str:
    """down(silu(gate(x)) · up(x)) with merged gate and up; int8 leaves the first product in int32."""
    hidden = s.model.hidden
    up = linear(b, s, f"{label}_gate_up", matrix, x, m, hidden, 2 * width, int32=True)
    act = activation(b, s, label, matrix, up, m, width)
    return linear(b, s, f"{label}_down", matrix, act, m, width, hidden, quantised=True)


def activation(b: Builder, s: Scene, label: str, matrix: str, x: str, m: float, width: float) -> str:
    """SwiGLU, with dequantisation before and quantisation after it where the matmuls are int8."""
    name = "dequant_swiglu_quant" if s.is_int8(matrix) else "swiglu"
    return b.call(f"{label}_act", name, x, rows=m, width=width)


def dense(b: Builder, s: Scene, x: str, label: str = "mlp") -> str:
    """Dense MLP: whole, cut by the attention group (all-reduce), or shared by data-parallel dies (all-gather before,
    reduce-scatter after)."""
    T, hidden = s.tokens, s.model.hidden
    tp, cut = 1 if s.same > 1 else s.parallel.dense_tp, s.cut("dense_tp")
    if cut > 1:
        out = gated(b, s, label, "dense", x, T, s.model.dense_width / cut)
        return b.call(f"{label}_all_reduce", "all_reduce", out, ranks=cut, bytes_per_rank=2 * T * hidden)
    if tp > 1:
        x = b.call(f"{label}_all_gather", "all_gather", x, ranks=tp, bytes_per_rank=2 * T * hidden)
    out = gated(b, s, label, "dense", x, T * tp, s.model.dense_width / tp)
    if tp > 1:
        return b.call(f"{label}_reduce_scatter", "reduce_scatter", out, ranks=tp, bytes_per_rank=2 * T * hidden)
    return out


def moe(b: Builder, s: Scene, x: str) -> str:
    """Router, experts and shared expert; the name of the task that has their sum."""
    e, T, hidden = _experts(s), s.tokens, s.model.hidden
    logits = b.call("router_cast", "elementwise", x, elements=T * hidden, bytes=3)
    logits = b.call("router", "fp32_matmul", logits, m=T, k=hidden, n=e.targets)
    picked = b.call("gating", "moe_gating_top_k", logits, tokens=T, experts=e.targets, top_k=e.top_k)
    if s.parallel.ep > 1 or s.parallel.moe_tp == 1:
        return _spread(b, s, x, picked)
    return _cut(b, s, x, picked)


def _experts(s: Scene) -> Experts:
    if s.model.experts is None:
        raise ValueError(f"{s.model.title} has no experts")
    return s.model.experts


def _spread(b: Builder, s: Scene, x: str, picked: str) -> str:
    """Experts spread over dies: dispatch, grouped matmuls, combine. The shared expert runs in three stages that wait
    for the router, the dispatch and the first grouped matmul, as experts place it. Dies that share the heads of the
    same tokens send a part of them each and gather the sums."""
    e, T, hidden, ep = _experts(s), s.tokens, s.model.hidden, s.parallel.ep
    int8 = s.is_int8("experts")
    sent = _send(b, s, x, picked)
    shared = _shared_up(b, s, x, picked)
    rows = max(1.0, s.group_tokens * e.top_k * (e.experts / ep) / e.targets)
    if int8 and not (e.dispatch_int8 and _by_dispatch(s)):
        sent = b.call("experts_quant", "dynamic_quant", sent, rows=rows, width=hidden)
    sizes = {"tokens": s.group_tokens, "top_k": e.top_k, "experts": e.targets, "local_experts": e.experts / ep}
    kernel = _GROUPED[s.dtype("experts")]
    up = (b.call_int32 if int8 else b.call)("experts_gate_up", kernel, sent, k=hidden, n=2 * e.width, **sizes)
    shared = _shared_act(b, s, shared, sent)
    act = activation(b, s, "experts", "experts", up, rows, e.width)
    out = b.call("experts_down", kernel, act, k=e.width, n=hidden, **sizes)
    shared = _shared_down(b, s, shared, up)
    out = _return(b, s, out, picked, rows)
    if s.same > 1:
        out = b.call("experts_all_gather", "all_gather", out, ranks=s.same, bytes_per_rank=2 * T * hidden / s.same)
    if not shared:
        return out
    return b.call("shared_add", "elementwise", out, shared, elements=T * hidden, inputs=2)


def _by_dispatch(s: Scene) -> bool:
    """Decode sends rows with dispatch and combine; prefill routes, exchanges and routes again."""
    return s.parallel.ep > 1 and s.load.phase == "decode"


def _send(b: Builder, s: Scene, x: str, picked: str) -> str:
    """Token rows at the dies of their experts, sorted by expert."""
    e, hidden, ep = _experts(s), s.model.hidden, s.parallel.ep
    tokens = s.tokens / s.same
    if _by_dispatch(s):
        return b.call("dispatch", "moe_dispatch", x, picked, tokens=tokens, top_k=e.top_k, hidden=hidden, ranks=ep,
                      payload_bytes=1 if s.is_int8("experts") and e.dispatch_int8 else 2)
    sent = _route(b, s, x, picked, tokens)
    if ep == 1:
        return sent
    counts = b.call("experts_counts", "all_to_all", sent, ranks=ep, bytes_per_rank=8 * e.experts)
    sent = b.call("experts_send", "all_to_all", sent, counts, ranks=ep, bytes_per_rank=2 * tokens * e.top_k * hidden)
    return b.call("experts_reroute", "copy", sent, elements=tokens * e.top_k * hidden)


def _return(b: Builder, s: Scene, x: str, picked: str, rows: float) -> str:
    """Expert rows at the dies of their tokens, weighted and summed."""
    e, hidden, ep = _experts(s), s.model.hidden, s.parallel.ep
    tokens = s.tokens / s.same
    if _by_dispatch(s):
        return b.call("combine", "moe_combine", x, picked, tokens=tokens, top_k=e.top_k, hidden=hidden, ranks=ep,
                      payload_bytes=2)
    if ep > 1:
        x = b.call("experts_order", "copy", x, elements=rows * hidden)
        x = b.call("experts_return", "all_to_all", x, ranks=ep, bytes_per_rank=2 * tokens * e.top_k * hidden)
    return b.call("finalize", "moe_finalize_routing", x, picked, tokens=tokens, top_k=e.top_k, hidden=hidden)


def _route(b: Builder, s: Scene, x: str, picked: str, tokens: float) -> str:
    e = _experts(s)
    return b.call("init_routing", "moe_init_routing", x, picked, tokens=tokens, top_k=e.top_k, hidden=s.model.hidden)


def _shared_up(b: Builder, s: Scene, x: str, picked: str) -> str:
    width = _experts(s).shared_width
    if not width:
        return ""
    with b.stream("shared"):
        if s.is_int8("shared"):
            x = b.call("shared_gate_up_quant", "dynamic_quant", x, b.order(picked), rows=s.tokens, width=s.model.hidden)
            return b.call_int32("shared_gate_up", "int8_matmul", x, m=s.tokens, k=s.model.hidden, n=2 * width)
        return b.call("shared_gate_up", "bf16_matmul", x, b.order(picked), m=s.tokens, k=s.model.hidden, n=2 * width)


def _shared_act(b: Builder, s: Scene, up: str, sent: str) -> str:
    if not up:
        return ""
    name = "dequant_swiglu_quant" if s.is_int8("shared") else "swiglu"
    with b.stream("shared"):
        return b.call("shared_act", name, up, b.order(sent), rows=s.tokens, width=_experts(s).shared_width)


def _shared_down(b: Builder, s: Scene, act: str, up: str) -> str:
    if not act:
        return ""
    kernel = "int8_matmul" if s.is_int8("shared") else "bf16_matmul"
    with b.stream("shared"):
        return b.call("shared_down", kernel, act, b.order(up), m=s.tokens, k=_experts(s).shared_width, n=s.model.hidden)


def _cut(b: Builder, s: Scene, x: str, picked: str) -> str:
    """Every expert cut in width over ``moe_tp`` dies. They hold the same tokens where heads are cut as well, and the
    sums are all-reduced; data-parallel dies gather their tokens first and scatter the sums."""
    e, own, hidden, tp = _experts(s), s.tokens, s.model.hidden, s.parallel.moe_tp
    apart = s.same == 1
    T = own * tp if apart else own
    if apart:
        x = b.call("moe_all_gather", "all_gather", x, ranks=tp, bytes_per_rank=2 * own * hidden)
        picked = b.call("picked_all_gather", "all_gather", picked, ranks=tp, bytes_per_rank=8 * own * e.top_k)
    sent = _route(b, s, x, picked, T)
    rows = max(1.0, T * e.top_k * e.experts / e.targets)
    if s.is_int8("experts"):
        sent = b.call("experts_quant", "dynamic_quant", sent, rows=rows, width=hidden)
    sizes = {"tokens": T, "top_k": e.top_k, "experts": e.targets, "local_experts": e.experts}
    kernel = _GROUPED[s.dtype("experts")]
    first = b.call_int32 if s.is_int8("experts") else b.call
    up = first("experts_gate_up", kernel, sent, k=hidden, n=2 * e.width / tp, **sizes)
    act = activation(b, s, "experts", "experts", up, rows, e.width / tp)
    out = b.call("experts_down", kernel, act, k=e.width / tp, n=hidden, **sizes)
    out = b.call("finalize", "moe_finalize_routing", out, tokens=T, top_k=e.top_k, hidden=hidden)
    if e.shared_width:
        shared = gated(b, s, "shared", "shared", x, T, e.shared_width / tp)
        out = b.call("shared_add", "elementwise", out, shared, elements=T * hidden, inputs=2)
    if apart:
        return b.call("moe_reduce_scatter", "reduce_scatter", out, ranks=tp, bytes_per_rank=2 * own * hidden)
    return b.call("moe_all_reduce", "all_reduce", out, ranks=tp, bytes_per_rank=2 * T * hidden)
