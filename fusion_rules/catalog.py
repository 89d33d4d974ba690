"""The table of contents of the rules: which there are and in which order they run."""

from __future__ import annotations

from cannopy.fusion_rules.engine.rule import Rule
from cannopy.fusion_rules.lift import attention as lift_attention
from cannopy.fusion_rules.lift import attention_written as lift_attention_written
from cannopy.fusion_rules.lift import norm_scale as lift_norm_scale
from cannopy.fusion_rules.lift import rms_norm as lift_rms_norm
from cannopy.fusion_rules.lift import rotary as lift_rotary
from cannopy.fusion_rules.lift import rotary_pairs as lift_rotary_pairs
from cannopy.fusion_rules.lower import add_rms_norm, interleave_rope, rms_norm, rotary_mul
from cannopy.fusion_rules.rewrite import (
    fused_infer_attention,
    kv_rmsnorm_rope_cache,
    mla_prolog,
    mla_prolog_dense,
    mla_prolog_rows,
    moe_experts,
    moe_experts_batched,
    moe_finalize_add,
    moe_gating_top_k,
    sparse_flash_attention,
    sparse_flash_attention_packed,
    swiglu,
)

LIFT: tuple[Rule, ...] = (
    *lift_rms_norm.RULES,
    *lift_norm_scale.RULES,
    *lift_rotary.RULES,
    *lift_rotary_pairs.RULES,
    lift_attention.RULE,
    lift_attention_written.RULE,
)
"""ATen spellings to dialect ops. Pairs that a rule has taken apart for rotary_mul are not put together by the one for
`lift_rotary_apart`, which ran before."""

REWRITE: tuple[Rule, ...] = (
    sparse_flash_attention.RULE,
    sparse_flash_attention_packed.RULE,
    fused_infer_attention.RULE,
    mla_prolog.RULE,
    mla_prolog_dense.RULE,
    mla_prolog_rows.RULE,
    kv_rmsnorm_rope_cache.RULE,
    *moe_gating_top_k.RULES,
    *moe_experts.RULES,
    *moe_experts_batched.RULES,
    moe_finalize_add.RULE,
    *swiglu.RULES,
)
"""Composites to fused ops. The MLA prolog needs the fused attention to read its caches; where it takes none of the key
side, that is for the rule behind it. The experts read the ids of the fused router, what is added to their
result is known after them, and their own gate and up products are theirs before `swiglu` looks for pairs of linears."""

LOWER: tuple[Rule, ...] = (add_rms_norm.RULE, rms_norm.RULE, rotary_mul.RULE, interleave_rope.RULE)
"""Dialect ops to single device ops; the residual form of the norm comes before the plain one."""


def fusions() -> tuple[Rule, ...]:
    """Every rule that ends in a device op, in the order in which they run; variants share a name."""
    return (*REWRITE, *LOWER)


def groups() -> dict[str, tuple[Rule, ...]]:
    """The fusions by name, in the order in which they run."""
    found: dict[str, tuple[Rule, ...]] = {}
    for rule in fusions():
        found[rule.name] = (*found.get(rule.name, ()), rule)
    return found
