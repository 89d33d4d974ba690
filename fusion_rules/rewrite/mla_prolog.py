"""The low-rank chains of MLA with norms, rotation and cache write  →  npu_mla_prolog_v3.

    q_c = rms(x W_DQ) γ_q;  q = q_c W_UQ;  query = q_nope W_UK;  query_rope = rope(q_pe)
    c, r = x W_DKV;  latent cache[slot] = rms(c) γ_kv;  rope cache[slot] = rope(r)

It matches upwards from the sparse attention, whose queries and caches the op produces. The cache becomes a graph input
in block form and is updated in place; the normalised q_c stays available (the indexer reads it).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Literal, Number, Op, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import INTERLEAVED, RESHAPE, SWAP_HEADS, computed_weight, wrong_shape
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.lift.halves import doubled
from cannopy.fusion_rules.rewrite import positions
from cannopy.fx_passes import rebind
from cannopy.fx_passes.graph import aten, shape
from cannopy.fx_passes.weight_plan import derived, preview, why_not_weight


def _norm(x: Pattern, prefix: str) -> Op:
    return op("cannopy::rms_norm", x, Any(f"gamma_{prefix}"), Number(f"eps_{prefix}"),
              name=f"norm_{prefix}")


def _part(x: Pattern, prefix: str) -> Op:
    return op(aten.slice.Tensor, x, Number(f"{prefix}_dim"), Number(f"{prefix}_start"), Number(f"{prefix}_end"),
              Literal(1))


def _rotated(x: Pattern, name: str) -> Op:
    return op("cannopy::rotary", x, Any("cos"), Any("sin"), INTERLEAVED, name=name)


def _tokens(x: Pattern) -> Pattern:
    """[B, N, S, D] → [T, N, D]."""
    return Through(op(aten.permute.default, x, SWAP_HEADS), over=RESHAPE)


_heads = op(
    aten.permute.default,
    op(aten.reshape.default, op(aten.linear.default, Through(_norm(op(aten.linear.default, Any("x_q"), Any("w_dq")),
       "cq"), over=RESHAPE), Any("w_uq")), Any()),
    SWAP_HEADS,
    name="heads",
)
_kv = op(aten.linear.default, Any("x_kv"), Any("w_dkv"), name="kv")


def _written(prefix: str, value: Pattern) -> Pattern:
    return Through(op(aten.index_copy.default, Any(f"{prefix}_cache"), Literal(2), Any("index"),
                      Through(value, over=RESHAPE, name=f"{prefix}_value"), name=f"{prefix}_new"), over=RESHAPE)


KEY = _written("latent", _norm(_part(_kv, "latent"), "ckv"))

PATTERN = op(
    "npu::npu_sparse_flash_attention",
    _tokens(op(aten.matmul.default, _part(_heads, "nope"), Any("w_uk"), name="absorbed")),
    KEY,
    KEY,
    Any("picks"),
    Number("scale"),
    rest=True,
    query_rope=_tokens(_rotated(_part(_heads, "pe"), "q_rotated")),
    key_rope=_written("rope", _rotated(Through(_part(_kv, "rope"), over=RESHAPE, name="k_pe"), "k_rotated")),
)


def _same_input(match: Match) -> fx.Node | None:
    """The hidden states that both chains read, looking through reshapes; None when they differ."""
    found = []
    for name in ("x_q", "x_kv"):
        node = match[name]
        while isinstance(node, fx.Node) and node.target is aten.reshape.default:
            node = node.args[0]
        found.append(node)
    return found[0] if found[0] is found[1] else None


def sizes(match: Match) -> dict[str, int]:
    """B, N, S, the split of q's head (nope, rope), the latent rank and the cache length."""
    batch, heads, queries, width = shape(match["heads"])
    cache = shape(match["latent_new"])
    rope = shape(match["rope_new"])[3]
    return {"B": batch, "N": heads, "S": queries, "nope": width - rope, "rope": rope, "rank": cache[3], "L": cache[2]}


def _layout(match: Match) -> Refusal | None:
    s = sizes(match)
    rank, width = s["rank"], s["nope"] + s["rope"]
    parts = {
        "nope": (3, 0, s["nope"]),
        "pe": (3, s["nope"], width),
        "latent": (len(shape(match["kv"])) - 1, 0, rank),
        "rope": (len(shape(match["kv"])) - 1, rank, rank + s["rope"]),
    }
    for name, wanted in parts.items():
        found = tuple(match[f"{name}_{k}"] for k in ("dim", "start", "end"))
        if found != wanted:
            return Refusal(f"the {name} part is (dim, start, end) = {found}, expected {wanted}", match["heads"],
                           "constant", f"(dim, start, end) = {wanted}", str(found),
                           f"split off the {name} part as DeepSeek does: without position first, rotated part last")
    batch, queries = s["B"], s["S"]
    for name, size in (
        ("latent_new", (batch, 1, s["L"], rank)),  # what is written has the same rows, one per token and request
        ("rope_new", (batch, 1, s["L"], s["rope"])),
        ("k_pe", (batch, 1, queries, s["rope"])),
    ):
        if shape(match[name]) != size:
            return wrong_shape(name, match[name], str(list(size)))
    for name in ("cos", "sin"):
        table = shape(match[name])
        if len(table) != 4 or table[1:] != (1, queries, s["rope"] // 2) or table[0] not in (1, batch):
            expected = f"[1 or {batch}, 1, {queries}, {s['rope'] // 2}]"
            return wrong_shape(name, match[name], expected)
    return None


def _caches(match: Match, ctx: Context) -> tuple[int, Refusal | None]:
    s = sizes(match)
    block = positions.block_size(s["L"], ctx.block_size)
    if isinstance(block, str):
        return 0, positions.block_refusal(block, match["latent_new"], s["L"])
    for prefix in ("latent", "rope"):
        cache = match[f"{prefix}_cache"]
        view = _block_view(match, prefix, block)
        reason = rebind.why_not(ctx.program, cache, view)
        if reason is None and rebind.write_of(cache) is None:
            reason = f"{cache.name} is not written back"
        if reason is not None:
            return block, Refusal(f"{prefix} cache: {reason}", match[f"{prefix}_new"], "cache",
                                  "a cache that is a graph input, written once and read after that", reason,
                                  "pass a static cache and write it once per call, before the attention reads it")
    return block, None


def _block_view(match: Match, prefix: str, block: int) -> list[int]:
    s = sizes(match)
    return [s["B"] * s["L"] // block, block, 1, shape(match[f"{prefix}_new"])[-1]]


WEIGHTS = {
    "weight_dq": ("w_dq", "w[0].t()"),
    "weight_uq_qr": ("w_uq", "w[0].t()"),
    "weight_dkv_kr": ("w_dkv", "w[0].t()"),
}


def check(match: Match, ctx: Context) -> Refusal | None:
    """Both chains read one input, the caches are graph inputs written back, sizes and dtypes are in the contract."""
    if _same_input(match) is None:
        return Refusal("the query and the key/value chain read different hidden states", match["kv"], "operand",
                       "one input for both chains", f"{describe(match['x_q'])} and {describe(match['x_kv'])}",
                       f"let both projections read {match['x_q'].name}")
    refusal = _layout(match)
    if refusal is not None:
        return refusal
    block, refusal = _caches(match, ctx)
    if refusal is not None:
        return refusal
    for name in ("w_dq", "w_uq", "w_dkv", "w_uk"):
        reason = why_not_weight(ctx.program, match[name])
        if reason is not None:
            return computed_weight(name, match["heads"], reason)
    return _illegal(match, ctx, block)


def _illegal(match: Match, ctx: Context, block: int) -> Refusal | None:
    s, editor = sizes(match), ctx.editor
    x = _same_input(match)
    assert x is not None
    tokens = s["B"] * s["S"]

    def fake(*size: int, like: fx.Node) -> torch.Tensor:
        return editor.empty(size, like.meta["val"].dtype)

    weights = {k: preview(editor, [match[n]], recipe) for k, (n, recipe) in WEIGHTS.items()}
    args = (
        fake(tokens, shape(x)[-1], like=x), weights["weight_dq"], weights["weight_uq_qr"], match["w_uk"].meta["val"],
        weights["weight_dkv_kr"], match["gamma_cq"].meta["val"], match["gamma_ckv"].meta["val"],
        fake(tokens, s["rope"], like=match["sin"]), fake(tokens, s["rope"], like=match["cos"]),
        *(fake(*_block_view(match, p, block), like=match[f"{p}_cache"]) for p in ("latent", "rope")),
    )
    kwargs = _attributes(match) | {"cache_index": editor.empty([tokens], torch.int64)}
    names = {"token_x": x, "weight_uk": match["w_uk"], "rmsnorm_gamma_cq": match["gamma_cq"],
             "rmsnorm_gamma_ckv": match["gamma_ckv"], "rope_sin": match["sin"], "rope_cos": match["cos"],
             "kv_cache": match["latent_cache"], "kr_cache": match["rope_cache"]}
    return illegal("npu_mla_prolog_v3", args, kwargs, match["kv"], ctx, names | {k: match[n] for k, (n, _) in
                                                                                WEIGHTS.items()})


def _attributes(match: Match) -> dict[str, object]:
    return {"rmsnorm_epsilon_cq": float(match["eps_cq"]), "rmsnorm_epsilon_ckv": float(match["eps_ckv"]),
            "cache_mode": "PA_BSND", "query_norm_flag": True}


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op, let the attention read its queries and caches, and the indexer its normalised q_c."""
    s, editor = sizes(match), ctx.editor
    block = positions.block_size(s["L"], ctx.block_size)
    x = _same_input(match)
    assert isinstance(block, int)
    assert x is not None
    tokens = s["B"] * s["S"]
    for prefix in ("latent", "rope"):
        rebind.rebind(ctx.program, editor, match[f"{prefix}_cache"], _block_view(match, prefix, block))
    weights = {k: derived(ctx.program, editor, k, [match[n]], recipe, nz=True) for k, (n, recipe) in WEIGHTS.items()}
    out = editor.call(
        torch.ops.npu.npu_mla_prolog_v3_functional.default,
        editor.reshape(x, [tokens, shape(x)[-1]]),
        weights["weight_dq"], weights["weight_uq_qr"], match["w_uk"], weights["weight_dkv_kr"],
        match["gamma_cq"], match["gamma_ckv"],
        *(_table(match, ctx, name) for name in ("sin", "cos")),
        match["latent_cache"], match["rope_cache"],
        cache_index=positions.slots(ctx, match["index"], s["B"], s["L"]),
        **_attributes(match),
    )
    query, query_rope, normed, latent, rope = (editor.call(operator.getitem, out, i) for i in (0, 1, 3, 5, 6))
    attention = match.anchor
    attention.args = (query, *attention.args[1:])
    attention.kwargs = {**attention.kwargs, "query_rope": query_rope}
    rebind.update(editor, match["latent_cache"], match["latent_new"], latent)
    rebind.update(editor, match["rope_cache"], match["rope_new"], rope)
    editor.replace(match["norm_cq"], editor.reshape(normed, shape(match["norm_cq"])))


def _table(match: Match, ctx: Context, name: str) -> fx.Node:
    """cos or sin as [T, 64]: both halves, one row per token."""
    s, editor = sizes(match), ctx.editor
    whole = doubled(ctx, match[name])
    if shape(whole)[0] != s["B"]:
        whole = editor.call(aten.expand.default, whole, [s["B"], 1, s["S"], s["rope"]])
    return editor.reshape(whole, [s["B"] * s["S"], s["rope"]])


RULE = Rule(
    name="mla_prolog",
    equation="rms(x W_DQ) W_UQ (W_UK | rope), cache[slot] = rms(x W_DKV) | rope  →  mla_prolog_v3(x, caches, slot)",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    kernel="npu_mla_prolog_v3",
    near=4,
)
