"""One step of a model on one die as a schedule: embedding, layers, head, and the drafts of multi-token prediction."""

from __future__ import annotations

from cannopy.stream_scheduler.network.attention import attention
from cannopy.stream_scheduler.network.builder import Builder, Scene, linear
from cannopy.stream_scheduler.network.mlp import dense, moe
from cannopy.stream_scheduler.network.model import Model
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.network.regions import mark_super_kernels
from cannopy.stream_scheduler.network.setting import Load, Parallel, Placement, Quantisation, SettingError
from cannopy.stream_scheduler.simulator import Schedule


def build(model: Model, load: Load, parallel: Parallel, quant: Quantisation, placement: Placement,
          pricing: Pricing) -> Schedule:
    """The kernels of one step. Decode runs the main model once and ``next_n`` drafts after it, each a graph of its own.

    `SettingError` when the layout does not fit, or drafts are asked of a model that has none.
    """
    parallel.check(model)
    if load.next_n and model.draft == "none":
        raise SettingError(f"{model.title} has no draft layer; next_n is 0")
    scene = Scene(model, load, parallel, quant)
    b = Builder(pricing, placement)
    x = _embed(b, scene, "")
    for index in range(model.layers):
        with b.layer(index, f"{index}."):
            x = _longcat(b, scene, x, index) if model.family == "longcat" else _layer(b, scene, x, index)
    x = _head(b, scene, x)
    for draft in range(load.next_n if load.phase == "decode" else 0):
        x = _draft(b, scene, x, draft)
    tasks = mark_super_kernels(b.tasks) if placement.super_kernel else b.tasks
    return Schedule(tuple(tasks), b.resolve(), 1 + (load.next_n if load.phase == "decode" else 0))


def _norm(b: Builder, s: Scene, label: str, *x: str) -> str:
    return b.call(label, "add_rms_norm", *x, rows=s.tokens, width=s.model.hidden)


def _layer(b: Builder, s: Scene, x: str, index: int) -> str:
    """Attention, then a dense MLP or experts."""
    attended = attention(b, s, _norm(b, s, "input_norm", x))
    x = _norm(b, s, "post_norm", attended)
    if s.model.experts is None or index < s.model.dense_layers:
        return dense(b, s, x)
    return moe(b, s, x)


def _longcat(b: Builder, s: Scene, x: str, index: int) -> str:
    """Two attentions and two dense MLPs; the experts start after the first attention and are added at the end.

    Prefetches as the expert-written model has them: classifier and gate_up after o_proj, down before gate_up, the
    prolog of the second attention after gate_up, of the next layer after down.
    """
    p = b.placement
    first = attention(b, s, _norm(b, s, "input_norm_0", x))
    b.prefetch("router", first)
    b.prefetch("mlp_0_gate_up", first)
    normed = _norm(b, s, "post_norm_0", first)
    with b.stream("moe", p.side_cores):
        routed = moe(b, s, normed)
    with b.stream("main", p.main_cores):
        b.prefetch("mlp_0_down", normed)
        out = dense(b, s, normed, "mlp_0")
        b.prefetch("mla_prolog.1", f"{index}.mlp_0_gate_up")
        second = attention(b, s, _norm(b, s, "input_norm_1", out))
        b.prefetch("mlp_1_gate_up", second)
        normed = _norm(b, s, "post_norm_1", second)
        b.prefetch("mlp_1_down", normed)
        out = dense(b, s, normed, "mlp_1")
        b.prefetch_next(f"{index + 1}.mla_prolog", out)
    return b.call("join_add", "elementwise", out, routed, elements=s.tokens * s.model.hidden, inputs=2)


def _embed(b: Builder, s: Scene, x: str) -> str:
    """Lookup in a table that a group shares: ids are gathered and rows scattered, or added where ids are the same."""
    T, hidden, tp = s.tokens, s.model.hidden, s.parallel.embed_tp
    if tp > 1 and s.same > 1:
        x = b.call("embedding", "embedding", x, tokens=T, hidden=hidden)
        return b.call("embed_all_reduce", "all_reduce", x, ranks=tp, bytes_per_rank=2 * T * hidden)
    if tp > 1:
        x = b.call("embed_all_gather", "all_gather", x, ranks=tp, bytes_per_rank=8 * T)
    x = b.call("embedding", "embedding", x, tokens=T * tp, hidden=hidden)
    if tp > 1:
        x = b.call("embed_reduce_scatter", "reduce_scatter", x, ranks=tp, bytes_per_rank=2 * T * hidden)
    return x


def _head(b: Builder, s: Scene, x: str) -> str:
    """Norm, output projection, argmax. Prefill needs the last token of each sequence only."""
    T = s.load.sequences if s.load.phase == "prefill" else s.tokens
    hidden, vocab, tp, cut = s.model.hidden, s.model.vocab, s.parallel.lm_head_tp, s.cut("lm_head_tp")
    x = _norm(b, s, "final_norm", x)
    if cut > 1 or s.same > 1:
        x = b.call("lm_head", "bf16_matmul", x, m=T, k=hidden, n=vocab / cut)
        if cut > 1:
            x = b.call("lm_head_all_gather", "all_gather", x, ranks=cut, bytes_per_rank=2 * T * vocab / cut)
    else:
        if tp > 1:
            x = b.call("lm_head_all_gather", "all_gather", x, ranks=tp, bytes_per_rank=2 * T * hidden)
        x = b.call("lm_head", "bf16_matmul", x, m=T * tp, k=hidden, n=vocab / tp)
        if tp > 1:
            x = b.call("lm_head_all_to_all", "all_to_all", x, ranks=tp, bytes_per_rank=2 * T * vocab)
    return b.call("argmax", "reduce", x, rows=T, width=vocab)


def _draft(b: Builder, s: Scene, x: str, index: int) -> str:
    """One draft step over the same window of tokens: embedding and hidden state merged, one layer, head."""
    T, hidden = s.tokens, s.model.hidden
    with b.layer(None, f"draft{index}."):
        embedded = _embed(b, s, x)
        parts = [b.call(f"{label}_norm", "rms_norm", y, rows=T, width=hidden) for label, y in
                 (("embedding", embedded), ("hidden", x))]
        merged = b.call("merge_cat", "cat", *parts, elements=2 * T * hidden)
        merged = linear(b, s, "eh_proj", "eh_proj", merged, T, 2 * hidden, hidden)
        out = _norm(b, s, "post_norm", attention(b, s, _norm(b, s, "input_norm", merged)))
        out = moe(b, s, out) if s.model.draft == "layer" else dense(b, s, out)
        return _head(b, s, out)
