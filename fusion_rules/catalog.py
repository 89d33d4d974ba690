"""The table of contents of the rules: which there are and in which order they run."""

from __future__ import annotations

from cannopy.fusion_rules.engine.rule import Rule
from cannopy.fusion_rules.lift import attention as lift_attention
from cannopy.fusion_rules.lift import rms_norm as lift_rms_norm
from cannopy.fusion_rules.lift import rotary as lift_rotary
from cannopy.fusion_rules.lower import add_rms_norm, rms_norm, rotary_mul
from cannopy.fusion_rules.rewrite import mla_prolog, sparse_mla

LIFT: tuple[Rule, ...] = (lift_rms_norm.RULE, *lift_rotary.RULES, lift_attention.RULE)
"""ATen spellings to dialect ops; they never change what is computed by more than the order of two roundings."""

REWRITE: tuple[Rule, ...] = (sparse_mla.RULE, mla_prolog.RULE)
"""Composites to fused ops; the MLA prolog needs the sparse attention to read its caches."""

LOWER: tuple[Rule, ...] = (add_rms_norm.RULE, rms_norm.RULE, rotary_mul.RULE)
"""Dialect ops to single device ops; the residual form of the norm comes before the plain one."""


def fusions() -> tuple[Rule, ...]:
    """Every rule that ends in a device op, in the order in which they run."""
    return (*REWRITE, *LOWER)
