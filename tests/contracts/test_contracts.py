"""Contract files: complete, true to the op schemas and to the boundaries in the documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401  registers the npu schemas

from cannopy.fusion_rules.contracts import (
    PRODUCTS,
    ContractError,
    ContractFileError,
    check_call,
    contract_names,
    demand,
    load_contract,
    parse_contract,
    value_error,
)
from cannopy.fusion_rules.contracts.model import REQUIRED
from tests.contracts.calls import (
    FP32,
    INT8,
    INT32,
    LEGAL,
    attention_bsnd,
    attention_paged,
    batched,
    combine,
    dispatch,
    finalize,
    grouped,
    prolog,
    t,
)
from tests.contracts.operators import operator

OPS = sorted({load_contract(name).op for name in contract_names()})
VARIANTS = [(op, variant) for op in LEGAL for variant in LEGAL[op]]


def test_every_contract_has_legal_calls() -> None:
    assert sorted(LEGAL) == OPS


@pytest.mark.parametrize("name", contract_names())
def test_arguments_are_those_of_the_schema(name: str) -> None:
    schema = operator(name)._schema
    expected = {a.name: a.default_value if a.has_default_value() else REQUIRED for a in schema.arguments}
    assert list(load_contract(name).arguments.items()) == list(expected.items())


@pytest.mark.parametrize("name", contract_names())
def test_mutated_arguments_are_those_of_the_schema(name: str) -> None:
    schema = getattr(torch.ops.npu, name).default._schema
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if written:
        assert load_contract(name).mutates == written


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_legal_calls_pass(op: str, variant: str) -> None:
    assert check_call(op, (), LEGAL[op][variant]()) == []


TND_KEYS = {
    "key": t(9, 1, 512),
    "value": t(9, 1, 512),
    "key_rope": t(9, 1, 64),
    "layout_kv": "TND",
    "actual_seq_lengths_kv": t(2, dtype=INT32),
}

# Limits straight from the documents: what is still legal and what no longer is.
BOUNDARIES: list[tuple[str, dict[str, Any], str | None]] = [
    ("npu_transpose_batchmatmul", batched(input=t(6, 127, 512), weight=t(127, 512, 128)), None),
    ("npu_transpose_batchmatmul", batched(input=t(6, 128, 512), weight=t(128, 512, 128)), "kb-range"),
    ("npu_transpose_batchmatmul", batched(input=t(128, 6, 512), weight=t(128, 512, 128), perm_x1=None), None),
    ("npu_transpose_batchmatmul", batched(perm_y=[0, 1, 2]), "perm-y"),
    *[("npu_mla_prolog_v3", prolog(heads=n), None) for n in (1, 2, 4, 8, 16, 32, 64, 128)],
    ("npu_mla_prolog_v3", prolog(kv_cache=t(3, 16, 1, 512), kr_cache=t(3, 16, 1, 64)), None),
    ("npu_mla_prolog_v3", prolog(kv_cache=t(3, 1024, 1, 512), kr_cache=t(3, 1024, 1, 64)), None),
    ("npu_mla_prolog_v3", prolog(kv_cache=t(3, 24, 1, 512), kr_cache=t(3, 24, 1, 64)), "block-size-multiple"),
    ("npu_mla_prolog_v3", prolog(kv_cache=t(3, 1040, 1, 512), kr_cache=t(3, 1040, 1, 64)), "block-size-max"),
    ("npu_mla_prolog_v3", prolog(token_x=t(6, 1024, dtype=FP32)), "token-x-dtype"),
    ("npu_mla_prolog_v3", prolog(cache_index=t(6, dtype=INT32)), "cache-index-dtype"),
    ("npu_mla_prolog_v3", prolog(kr_cache=t(3, 64, 128).transpose(1, 2).unsqueeze(2)), "kr-cache-contiguous"),
    ("npu_sparse_flash_attention", attention_paged(attention_mode=0), "attention-mode"),
    ("npu_sparse_flash_attention", attention_paged(sparse_block_size=3), "sparse-block-power"),
    ("npu_sparse_flash_attention", attention_bsnd() | TND_KEYS, "layout-same"),
    ("npu_moe_finalize_routing", finalize(scales=t(6, 4, dtype=FP32)), None),
    ("npu_moe_finalize_routing", finalize(scales=t(6, 4, dtype=torch.float16)), "scales-dtype"),
    ("npu_moe_finalize_routing", finalize(skip1=None), "skip2-needs-skip1"),
    ("npu_moe_distribute_dispatch_v2", dispatch(x=t(512, 8192), expert_ids=t(512, 16, dtype=INT32)), None),
    ("npu_moe_distribute_dispatch_v2", dispatch(x=t(513, 1024), expert_ids=t(513, 4, dtype=INT32)), "bs"),
    ("npu_moe_distribute_dispatch_v2", dispatch(x=t(6, 1016)), "h"),
    ("npu_moe_distribute_dispatch_v2", dispatch(ep_world_size=768, moe_expert_num=768), None),
    ("npu_moe_distribute_dispatch_v2", dispatch(moe_expert_num=18), "experts-divide"),
    ("npu_moe_distribute_combine_v2", combine(expand_x=t(95, 1024)), "rows"),
    ("npu_grouped_matmul", grouped(FP32), None),
    ("npu_grouped_matmul", grouped(weight=[t(4, 32, 64).transpose(1, 2)]), None),
    ("npu_grouped_matmul", grouped(split_item=0), "split-grouped"),
    ("npu_grouped_matmul", grouped(x=[t(12, 64, dtype=FP32)]), "weight-dtype"),
]


@pytest.mark.parametrize(("op", "call", "clause"), BOUNDARIES)
def test_documented_boundaries(op: str, call: dict[str, Any], clause: str | None) -> None:
    broken = [v.clause for v in check_call(op, (), call)]
    if clause is None:
        assert broken == []
    else:
        assert clause in broken


def test_products_differ() -> None:
    call = LEGAL["npu_lightning_indexer"]["paged"]()
    call["weights"] = t(6, 8, dtype=FP32)
    assert check_call("npu_lightning_indexer", (), call, "atlas-a2") == []
    assert [v.clause for v in check_call("npu_lightning_indexer", (), call, "atlas-950")] == ["weights-dtype-950"]
    refused = check_call("npu_transpose_batchmatmul", (), batched(), "atlas-950")
    assert [v.clause for v in refused] == ["products"]


def test_host_limits_are_asked_for() -> None:
    call = prolog(weight_quant_mode=1, weight_uq_qr=t(1536, 768, dtype=INT8))
    assert check_call("npu_mla_prolog_v3", (), call) == []
    assert [v.clause for v in check_call("npu_mla_prolog_v3", (), call, host=True)] == ["host-weight-quant"]


def test_twins_share_a_contract_and_keep_their_name() -> None:
    assert load_contract("npu_mla_prolog_v3_functional") is load_contract("npu_mla_prolog_v3")
    with pytest.raises(ContractError, match="npu_mla_prolog_v3_functional: argument 'weight_uk'"):
        demand("npu_mla_prolog_v3_functional", (), prolog(weight_uk=t(4, 128, 256)))


def test_positional_and_keyword_arguments_mean_the_same() -> None:
    assert check_call("npu_rms_norm", (t(6, 32), t(31)), {}) == check_call(
        "npu_rms_norm", (t(6, 32),), {"gamma": t(31)}
    )


def test_a_violation_reads_well() -> None:
    (violation,) = check_call("npu_transpose_batchmatmul", (), batched(input=t(6, 128, 512), weight=t(128, 512, 128)))
    assert str(violation) == (
        "npu_transpose_batchmatmul: argument 'input' must be such that K * B is at most 65535, found K * B = 65536 "
        "[clause kb-range; op-plugin doc of npu_transpose_batchmatmul]"
    )


def test_misuse_is_an_error_of_its_own() -> None:
    with pytest.raises(KeyError, match="no hardware contract for 'npu_nothing'"):
        check_call("npu_nothing", (), {})
    with pytest.raises(ValueError, match="unknown product 'atlas-a9'"):
        check_call("npu_swiglu", (t(2, 2),), {}, "atlas-a9")
    with pytest.raises(TypeError, match="has no argument 'axis'"):
        check_call("npu_swiglu", (t(2, 2),), {"axis": 1})
    with pytest.raises(TypeError, match="needs argument 'gamma'"):
        check_call("npu_rms_norm", (t(2, 2),), {})
    with pytest.raises(TypeError, match="twice"):
        check_call("npu_swiglu", (t(2, 2),), {"input": t(2, 2)})
    with pytest.raises(KeyError, match="no value rule 'nothing'"):
        value_error("npu_scatter_nd_update", "nothing", "")


def test_fake_tensors_are_checked_like_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(6, 32, dtype=torch.bfloat16)
        assert check_call("npu_rms_norm", (fake, torch.empty(32, dtype=torch.bfloat16)), {}) == []
        assert [v.clause for v in check_call("npu_rms_norm", (fake, torch.empty(31)), {})] == ["gamma-shape"]


MINIMAL = """
op: npu_x
products: [atlas-a3]
ge_type: X
source: nowhere
arguments: {a: required}
clauses:
"""


@pytest.mark.parametrize(
    ("clause", "message"),
    [
        ("{id: c, argument: a, dtyp: [float32]}", "unknown key 'dtyp'"),
        ("{id: c, argument: a}", "at least one of"),
        ("{id: c, argument: b, required: true}", "no argument"),
        ("{id: c, argument: a, max: '__import__(1)'}", "Call is not allowed"),
        ("{id: c, argument: a, max: 'a.__class__'}", "Attribute is not allowed"),
        ("{id: c, argument: a, max: 'lambda: 1'}", "Lambda is not allowed"),
        ("{id: c, argument: a, max: '1 +'}", "not an expression"),
        ("{id: c, argument: a, products: [atlas-a7], required: true}", "unknown product 'atlas-a7'"),
    ],
)
def test_malformed_files_are_refused(clause: str, message: str) -> None:
    with pytest.raises(ContractFileError, match=message):
        parse_contract(f"{MINIMAL}  - {clause}\n", "npu_x.yaml")


def test_ids_are_unique() -> None:
    twice = "  - {id: c, argument: a, required: true}\n" * 2
    with pytest.raises(ContractFileError, match="used twice"):
        parse_contract(MINIMAL + twice, "npu_x.yaml")


def test_all_products_are_known_names() -> None:
    assert PRODUCTS == ("atlas-a2", "atlas-a3", "atlas-950")
