"""Mutations of gated MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import EXPERTS, MLP, Edit, NotHereError, Operator, calls, user


@dataclass
class Glu:
    """silu(gate) · up."""

    silu: fx.Node
    product: fx.Node
    gate: fx.Node
    up: fx.Node


def glus(p: Program) -> list[Glu]:
    """Every gated product, of MLPs and of experts."""
    found = []
    for silu in calls(p, aten.silu.default):
        product = user(silu, aten.mul.Tensor)
        if product is not None:
            up = next(a for a in product.args if a is not silu)
            found.append(Glu(silu, product, silu.args[0], up))
    return found


def mlps(p: Program) -> list[Glu]:
    """Those of two linears."""
    return [g for g in glus(p) if is_call(g.gate, aten.linear.default)]


def halves(p: Program) -> list[Glu]:
    """Those of experts: two halves of one product."""
    return [g for g in glus(p) if is_call(g.gate, aten.slice.Tensor)]


def _swap(e: Edit, g: Glu) -> None:
    e.become(g.silu, aten.silu.default, g.up)
    if [*g.silu.graph.nodes].index(g.up) > [*g.silu.graph.nodes].index(g.silu):
        g.up.append(g.silu)
    e.become(g.product, aten.mul.Tensor, g.silu, g.gate)


def _commuted(e: Edit, g: Glu) -> None:
    e.become(g.product, aten.mul.Tensor, g.up, g.silu)


def _activation(target: Any, **kwargs: Any) -> Any:
    def apply(e: Edit, g: Glu) -> None:
        e.become(g.silu, target, g.gate, **kwargs)

    return apply


def _on_product(e: Edit, g: Glu) -> None:
    """silu(gate · up)."""
    e.become(g.product, aten.mul.Tensor, g.gate, g.up)
    e.after(g.product, aten.silu.default)
    e.mark(g.silu)


def _both_activated(e: Edit, g: Glu) -> None:
    e.swap_input(g.product, g.up, e.before(g.product, aten.silu.default, g.up))


def _summed(e: Edit, g: Glu) -> None:
    e.become(g.product, aten.add.Tensor, g.silu, g.up)


def _up_plus_one(e: Edit, g: Glu) -> None:
    e.swap_input(g.product, g.up, e.before(g.product, aten.add.Tensor, g.up, 1.0))


def _alpha(e: Edit, g: Glu) -> None:
    """gate · sigmoid(1.702 · gate), GPT-OSS."""
    scaled = e.before(g.silu, aten.mul.Tensor, g.gate, 1.702)
    gate = e.before(g.silu, aten.sigmoid.default, scaled)
    e.become(g.silu, aten.mul.Tensor, g.gate, gate)


def _spelled_out(e: Edit, g: Glu) -> None:
    gate = e.before(g.silu, aten.sigmoid.default, g.gate)
    e.become(g.silu, aten.mul.Tensor, *e.rng.choice([(g.gate, gate), (gate, g.gate)]))


def _clamp(where: str) -> Any:
    def apply(e: Edit, g: Glu) -> None:
        node: fx.Node = getattr(g, where)
        limit = e.typical(node)
        reader = g.silu if where == "gate" else g.product
        if where == "product":
            e.after(node, aten.clamp.default, -limit, limit)
            return
        e.swap_input(reader, node, e.before(reader, aten.clamp.default, node, -limit, limit))

    return apply


def _fp32(e: Edit, g: Glu) -> None:
    if dtype(g.gate) == torch.float32:
        raise NotHereError
    narrow = dtype(g.product)
    e.swap_input(g.silu, g.gate, e.before(g.silu, aten._to_copy.default, g.gate, dtype=torch.float32))
    e.swap_input(g.product, g.up, e.before(g.product, aten._to_copy.default, g.up, dtype=torch.float32))
    e.editor.refresh(g.silu)
    e.editor.refresh(g.product)
    e.after(g.product, aten._to_copy.default, dtype=narrow)


def _silu_fp32(e: Edit, g: Glu) -> None:
    """Only the activation in fp32."""
    if dtype(g.gate) == torch.float32:
        raise NotHereError
    narrow = dtype(g.silu)
    e.swap_input(g.silu, g.gate, e.before(g.silu, aten._to_copy.default, g.gate, dtype=torch.float32))
    e.editor.refresh(g.silu)
    e.after(g.silu, aten._to_copy.default, dtype=narrow)


def _rounded_inside(e: Edit, g: Glu) -> None:
    if dtype(g.silu) == torch.float16:
        raise NotHereError
    half = e.before(g.product, aten._to_copy.default, g.silu, dtype=torch.float16)
    e.swap_input(g.product, g.silu, e.before(g.product, aten._to_copy.default, half, dtype=dtype(g.silu)))


def _up_first_column(e: Edit, g: Glu) -> None:
    rank = len(shape(g.up))
    e.swap_input(g.product, g.up, e.before(g.product, aten.slice.Tensor, g.up, rank - 1, 0, 1))


def _up_first_row(e: Edit, g: Glu) -> None:
    dims = [d for d in range(len(shape(g.up)) - 1) if shape(g.up)[d] > 1]
    if not dims:
        raise NotHereError
    e.swap_input(g.product, g.up, e.before(g.product, aten.slice.Tensor, g.up, dims[-1], 0, 1))


def _gate_first_column(e: Edit, g: Glu) -> None:
    rank = len(shape(g.gate))
    e.swap_input(g.silu, g.gate, e.before(g.silu, aten.slice.Tensor, g.gate, rank - 1, 0, 1))


def _gate_reversed(e: Edit, g: Glu) -> None:
    e.swap_input(g.silu, g.gate, e.before(g.silu, aten.flip.default, g.gate, [-1]))


def _gate_zero(e: Edit, g: Glu) -> None:
    """gate ≡ 0, so the result is 0 whatever up is; a swapped kernel gives silu(up) · 0 as well, a summed one not."""
    e.swap_input(g.silu, g.gate, e.before(g.silu, aten.mul.Tensor, g.gate, 0.0))


def _other_input(e: Edit, g: Glu) -> None:
    linear: fx.Node = e.rng.choice([g.gate, g.up])
    x: Any = linear.args[0]
    e.swap_input(linear, x, e.before(linear, aten.mul.Tensor, x, e.factor()))


def _bias_on(both: bool) -> Any:
    def apply(e: Edit, g: Glu) -> None:
        linears = [g.gate, g.up] if both else [e.rng.choice([g.gate, g.up])]
        for linear in linears:
            bias = e.argument(e.noise(shape(linear)[-1], dtype=dtype(linear)))
            e.become(linear, aten.linear.default, *linear.args, bias)

    return apply


def _constant_bias(e: Edit, g: Glu) -> None:
    """Biases that are parameters."""
    for linear in (g.gate, g.up):
        bias = e.argument(e.noise(shape(linear)[-1], dtype=dtype(linear)))
        _owned(e, bias)
        e.become(linear, aten.linear.default, *linear.args, bias)


def _owned(e: Edit, node: fx.Node) -> None:
    from dataclasses import replace

    specs = e.program.inputs
    i = next(i for i, s in enumerate(specs) if s.name == node.name)
    specs[i] = replace(specs[i], kind="parameter", source=f"self.{node.name}")


def _weight_shared(e: Edit, g: Glu) -> None:
    """Gate and up have the same weight."""
    if shape(g.gate.args[1]) != shape(g.up.args[1]):  # type: ignore[arg-type]
        raise NotHereError
    e.become(g.up, aten.linear.default, g.up.args[0], g.gate.args[1])


def _weight_computed(e: Edit, g: Glu) -> None:
    linear: fx.Node = e.rng.choice([g.gate, g.up])
    weight: Any = linear.args[1]
    e.swap_input(linear, weight, e.before(linear, aten.mul.Tensor, weight, e.factor()))


def _weight_first_row(e: Edit, g: Glu) -> None:
    linear: fx.Node = e.rng.choice([g.gate, g.up])
    weight: Any = linear.args[1]
    row = e.before(linear, aten.slice.Tensor, weight, 0, 0, 1)
    e.swap_input(linear, weight, row)


def _weight_expanded(e: Edit, g: Glu) -> None:
    linear: fx.Node = e.rng.choice([g.gate, g.up])
    weight: Any = linear.args[1]
    row = e.before(linear, aten.slice.Tensor, weight, 0, 0, 1)
    e.swap_input(linear, weight, e.before(linear, aten.expand.default, row, list(shape(weight))))


def _weight_used_twice(e: Edit, g: Glu) -> None:
    """The gate's weight is read by something else as well."""
    other = e.before(g.gate, aten.sum.dim_IntList, g.gate.args[1], [1])
    e.returned(other)


BOTH = (*MLP, *EXPERTS)
ACT = ("silu", "SiLU", "activation")
OPERATORS = (
    Operator("mlp_gate_and_up_swapped", MLP, mlps, _swap, legal=True),
    Operator("glu_halves_swapped", BOTH, halves, _swap, words=ACT),
    Operator("glu_commuted", BOTH, glus, _commuted, legal=True, same=True),
    Operator("glu_gelu", BOTH, glus, _activation(aten.gelu.default), words=("gelu",)),
    Operator("glu_gelu_tanh", BOTH, glus, _activation(aten.gelu.default, approximate="tanh"), words=("gelu",)),
    Operator("glu_relu", BOTH, glus, _activation(aten.relu.default), words=("relu",)),
    Operator("glu_sigmoid", BOTH, glus, _activation(aten.sigmoid.default), words=("sigmoid",)),
    Operator("glu_tanh", BOTH, glus, _activation(aten.tanh.default), words=("tanh",)),
    Operator("glu_hardswish", BOTH, glus, _activation(aten.hardswish.default), words=("hardswish",)),
    Operator("glu_activation_dropped", BOTH, glus, _activation(aten.mul.Tensor), words=("mul",)),
    Operator("glu_activation_on_product", BOTH, glus, _on_product, words=("silu", "mul")),
    Operator("glu_both_activated", BOTH, glus, _both_activated, words=ACT),
    Operator("glu_sum", BOTH, glus, _summed, words=("add",)),
    Operator("glu_up_plus_one", BOTH, glus, _up_plus_one, words=("add",)),
    Operator("glu_alpha", BOTH, glus, _alpha, words=("sigmoid", "mul")),
    Operator("glu_silu_spelled_out", BOTH, glus, _spelled_out, legal=True, same=True),
    Operator("glu_gate_clamped", BOTH, glus, _clamp("gate"), words=("clamp",)),
    Operator("glu_up_clamped", BOTH, glus, _clamp("up"), words=("clamp",)),
    Operator("glu_result_clamped", BOTH, mlps, _clamp("product"), legal=True),
    Operator("glu_fp32", BOTH, glus, _fp32, legal=True, same=True),
    Operator("glu_silu_fp32", BOTH, glus, _silu_fp32, legal=True, same=True),
    Operator("glu_rounded_to_fp16", BOTH, glus, _rounded_inside, words=("float16", "_to_copy"), same=True),
    Operator("glu_up_first_column", BOTH, glus, _up_first_column, words=("slice", "first half")),
    Operator("glu_up_first_row", BOTH, glus, _up_first_row, words=("slice", "first half")),
    Operator("glu_gate_first_column", BOTH, glus, _gate_first_column, words=("slice", "first half")),
    Operator("glu_gate_reversed", BOTH, glus, _gate_reversed, words=("flip",)),
    Operator("glu_gate_zero", BOTH, glus, _gate_zero, words=("mul",)),
    Operator("mlp_inputs_differ", MLP, mlps, _other_input, words=("x", "mul")),
    Operator("mlp_one_bias", MLP, mlps, _bias_on(False), words=("bias", "parameters")),
    Operator("mlp_biases_are_arguments", MLP, mlps, _bias_on(True), words=("bias", "parameters")),
    Operator("mlp_biases", MLP, mlps, _constant_bias, legal=True),
    Operator("mlp_weight_shared", MLP, mlps, _weight_shared, words=("other readers", "also read")),
    Operator("mlp_weight_computed", MLP, mlps, _weight_computed, words=("weight", "parameters")),
    Operator("mlp_weight_first_row", MLP, mlps, _weight_first_row, words=("weight", "parameters")),
    Operator("mlp_weight_expanded", MLP, mlps, _weight_expanded, words=("weight", "parameters")),
    Operator("mlp_weight_read_elsewhere", MLP, mlps, _weight_used_twice, legal=True),
)
