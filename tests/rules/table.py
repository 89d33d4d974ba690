"""The four kinds of test that every rule has, as ``file::function``."""

from __future__ import annotations

from dataclasses import dataclass

SINGLE, ATTENTION, NORMS = "rules/test_single_ops.py", "rules/test_attention_rules.py", "rules/test_rms_norm.py"
GATING, EXPERTS, SWIGLU = "rules/test_moe_gating_top_k.py", "rules/test_moe_experts.py", "rules/test_swiglu.py"
COUNTS = "e2e/test_counts.py::test_counts_follow_the_layers"


@dataclass(frozen=True)
class Tests:
    """``exact``: fires on the exact form; ``model``: on a form cut from a real model; ``refuses``: each broken side
    condition, with its reason; ``numerics``: equal to the reference at a stated tolerance."""

    exact: str
    model: str
    refuses: str
    numerics: str


def _of(file: str, exact: str, model: str, refuses: str, numerics: str = "") -> Tests:
    """Functions of ``file``, or of the file that they name."""
    names = (exact, model, refuses, numerics or exact)
    return Tests(*(name if "::" in name else f"{file}::{name}" for name in names))


TABLE = {
    "lift_rms_norm": _of(NORMS, "test_rounding_before_or_after_gamma", "test_torch_rms_norm",
                         f"{SINGLE}::test_lift_rms_norm_refuses"),
    "lift_norm_scale": _of("rules/test_norm_scale.py", "test_fires", "test_fires_on_our_longcat_attention",
                           "test_refuses"),
    "lift_rotary": _of(SINGLE, "test_rotary", f"{ATTENTION}::test_the_whole_layer_fuses", "test_rotary_refuses"),
    "lift_rotary_half": _of(SINGLE, "test_rotary", COUNTS, "test_rotary_refuses"),
    "lift_rotary_apart": _of(SINGLE, "test_rotary", COUNTS, "test_another_permutation_of_the_pairs_stays_in_front"),
    "lift_attention": _of(SINGLE, "test_attention", f"{ATTENTION}::test_eager_attention_fuses_as_well",
                          "test_attention"),
    "sparse_flash_attention": _of(ATTENTION, "test_the_whole_layer_fuses", COUNTS,
                                  "test_a_mutant_is_refused_with_its_reason_and_stays_right"),
    "fused_infer_attention": _of("rules/test_fused_infer_attention.py", "test_fires_on_exact_forms",
                                 "rules/test_mla_prolog_dense.py::test_the_layer_is_prolog_attention_and_two_products",
                                 "test_refuses"),
    "kv_rmsnorm_rope_cache": _of("rules/test_kv_rmsnorm_rope_cache.py", "test_fires_on_both_kinds_of_cache",
                                 "test_fires_on_both_kinds_of_cache", "test_refuses"),
    "mla_prolog": _of(ATTENTION, "test_the_whole_layer_fuses", COUNTS,
                      "test_a_mutant_is_refused_with_its_reason_and_stays_right"),
    "moe_gating_top_k": _of(GATING, "test_fires_on_exact_forms", "test_fires_on_the_stock_router", "test_refuses"),
    "moe_experts": _of(EXPERTS, "test_fires_on_exact_forms", "test_fires_on_the_stock_block", "test_refuses"),
    "moe_finalize_add": _of("rules/test_moe_finalize_add.py", "test_fires_on_exact_forms",
                            "models/test_fusion_table.py::test_each_rule_applies_where_its_math_is", "test_refuses"),
    "swiglu": _of(SWIGLU, "test_merges_two_linears", "test_fires_on_the_stock_mlp", "test_refuses"),
    "add_rms_norm": _of(SINGLE, "test_add_rms_norm", COUNTS, "test_add_rms_norm"),
    "rms_norm": _of(NORMS, "test_rounding_before_or_after_gamma", COUNTS,
                    "test_gamma_stays_outside_where_the_op_would_round_before_it"),
    "rotary_mul": _of(SINGLE, "test_rotary", COUNTS, "test_rotary_refuses"),
    "interleave_rope": _of(SINGLE, "test_rotary", COUNTS, "test_rotary_refuses"),
}
