"""Each clause refuses a call that breaks it alone, in the check and in the CPU kernel, and says what is allowed."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch_npu  # noqa: F401  registers the npu schemas

from cannopy.backend.host import target
from cannopy.backend.host.kernels import register
from cannopy.fusion_rules.contracts import Clause, ContractError, check_call, checker, contract_names, load_contract
from cannopy.fusion_rules.contracts.model import Contract
from tests.contracts.examples import Example, examples
from tests.contracts.negatives import Negative, NoNegativeError, negative
from tests.contracts.operators import operator

OPS = sorted({load_contract(name).op for name in contract_names()})
MOST = 2**31
"""Elements of a call that a kernel is given as real, never touched memory."""


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    register()


def clauses(contract: Contract) -> list[tuple[Clause, bool]]:
    """Clauses of the device, then those of the CPU kernel."""
    return [*((c, False) for c in contract.clauses), *((c, True) for c in contract.host_clauses)]


@pytest.mark.parametrize("op", OPS)
def test_examples_are_legal(op: str) -> None:
    calls = list(examples(op))
    assert calls
    for example in calls:
        for product in example.products:
            assert [str(v) for v in check_call(op, (), example.call(), product)] == [], example.name


@pytest.mark.parametrize("op", OPS)
def test_each_clause_refuses_alone(op: str) -> None:
    for clause, host in clauses(load_contract(op)):
        found = negative(op, clause, host=host)
        violations = {v.clause: v for v in found.violations(host=host)}
        assert set(violations) == {clause.id, *found.others}
        _says_what_is_allowed(violations[clause.id].expected, clause, op)
        assert f"clause {clause.id};" in str(violations[clause.id])
        _kernel_refuses(found)


def _says_what_is_allowed(expected: str, clause: Clause, op: str) -> None:
    if isinstance(dtypes := clause.rules.get("dtype"), list):
        assert all(d in expected for d in dtypes), (op, clause.id)
    elif isinstance(allowed := clause.rules.get("in"), list):
        assert all(str(a) in expected for a in allowed), (op, clause.id)
    assert expected


def _kernel_refuses(found: Negative) -> None:
    if found.clause.graph or found.example.elements() > MOST:
        return
    with target.using(found.product), pytest.raises(ContractError) as caught:
        operator(found.op)(**found.example.call("cpu"))
    assert found.clause.id in {v.clause for v in caught.value.violations}


def test_a_clause_that_nothing_breaks_is_found() -> None:
    """A limit that others imply needs an entry of its own; left without, the generator fails and names it."""
    op = "npu_rms_norm"
    rank = next(c for c in load_contract(op).clauses if c.id == "input-rank")
    slack = Clause("slack", "input", "nowhere", rank.products, None, None, {"rank": list(range(1, 99))})
    with pytest.raises(NoNegativeError, match="slack"):
        negative(op, slack)


def test_limits_of_graphs_hold_in_graphs_only() -> None:
    call = next(iter(examples("npu_prefetch"))).set("dependency", None).call()
    assert [v.clause for v in check_call("npu_prefetch", (), call)] == ["dependency-in-graph"]
    assert check_call("npu_prefetch", (), call, graph=False) == []


def test_limits_end_with_a_cann_version() -> None:
    call = _paged().set("value", None).call()
    op = "npu_sparse_flash_attention"
    assert [v.clause for v in check_call(op, (), call)] == ["value-given"]
    assert [v.clause for v in check_call(op, (), call, cann="9.1.0")] == ["value-given"]
    assert [v.clause for v in check_call(op, (), call, cann="9.2.0.RC1")] == ["value-given"]
    assert check_call(op, (), call, cann="9.2.0") == []


def _paged() -> Example:
    return next(e for e in examples("npu_sparse_flash_attention") if e.name == "paged")


@pytest.mark.parametrize("op", OPS)
def test_graph_mode_is_what_torchair_converts(op: str) -> None:
    importlib.import_module("torch_npu.dynamo.torchair")  # makes the plain name importable
    importlib.import_module("torchair")
    converter = importlib.import_module("torchair._ge_concrete_graph.fx2ge_converter")._get_converter
    for name in (op, *load_contract(op).twins):
        assert load_contract(op).graph_mode == (converter(operator(name)) is not None), name


def test_an_op_without_converter_is_refused_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    op = "npu_swiglu"
    call = next(iter(examples(op))).sized("H", 46).call()
    eager_only = replace(load_contract(op), graph_mode=False)
    monkeypatch.setattr(checker, "load_contract", lambda name: eager_only)
    checker._broken.cache_clear()
    try:
        assert [v.clause for v in check_call(op, (), call)] == ["graph-mode"]
        assert check_call(op, (), call, graph=False) == []
    finally:
        checker._broken.cache_clear()
