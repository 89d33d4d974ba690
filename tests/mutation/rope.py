"""Mutations of rotary embeddings and of their tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import ROPE, Edit, NotHereError, Operator, calls, user


@dataclass
class Rope:
    """One rotation. ``tables``: the products with cos and sin; ``out`` the result."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    cos_products: list[fx.Node]
    sin_products: list[fx.Node]
    out: fx.Node
    half: bool
    parts: list[fx.Node]
    """The slices of x: first, second."""
    turned: fx.Node | None = None
    """cat(-x₂, x₁) of the half form."""


def ropes(p: Program) -> list[Rope]:
    """Every rotation, in both spellings."""
    return [*_halves(p), *_pairs(p)]


def halves(p: Program) -> list[Rope]:
    """Those that are spelled x·cos + cat(-x₂, x₁)·sin."""
    return _halves(p)


def _halves(p: Program) -> list[Rope]:
    found = []
    for neg in calls(p, aten.neg.default):
        cat = user(neg, aten.cat.default)
        if cat is None or not is_call(neg.args[0], aten.slice.Tensor):
            continue
        second, first = neg.args[0], cat.args[0][1]
        x = second.args[0]
        sin_product = user(cat, aten.mul.Tensor)
        out = user(sin_product, aten.add.Tensor)
        cos_product = next(a for a in out.args if a is not sin_product)
        sin = next(a for a in sin_product.args if a is not cat)
        cos = next(a for a in cos_product.args if a is not x)
        found.append(Rope(x, cos, sin, [cos_product], [sin_product], out, True, [first, second], cat))
    return found


def _pairs(p: Program) -> list[Rope]:
    found = []
    for out in calls(p, aten.cat.default):
        items: Any = out.args[0]
        if len(items) != 2 or not is_call(items[0], aten.sub.Tensor) or not is_call(items[1], aten.add.Tensor):
            continue
        fc, ss = items[0].args
        sc, fs = items[1].args
        if not all(is_call(m, aten.mul.Tensor) for m in (fc, ss, sc, fs)):
            continue
        first, second = fc.args[0], ss.args[0]
        found.append(Rope(first.args[0], fc.args[1], ss.args[1], [fc, sc], [fs, ss], out, False, [first, second]))
    return found


def _sign(e: Edit, r: Rope) -> None:
    if r.half:
        e.become(r.out, aten.sub.Tensor, r.cos_products[0], r.sin_products[0])
    else:
        first, second = r.out.args[0]  # type: ignore[misc]
        e.become(first, aten.add.Tensor, *first.args)
        e.become(second, aten.sub.Tensor, *second.args)


def _one_sign(e: Edit, r: Rope) -> None:
    """Only one of the two results has the other sign: no rotation."""
    if r.half:
        assert r.turned is not None
        neg = r.turned.args[0][0]  # type: ignore[index]
        e.bypass(neg, neg.args[0])
    else:
        index = e.rng.choice([0, 1])
        node = r.out.args[0][index]  # type: ignore[index]
        e.become(node, aten.add.Tensor if index == 0 else aten.sub.Tensor, *node.args)


def _swapped_tables(e: Edit, r: Rope) -> None:
    for product in r.cos_products:
        e.swap_input(product, r.cos, r.sin)
    for product in r.sin_products:
        e.swap_input(product, r.sin, r.cos)


def _one_table_swapped(e: Edit, r: Rope) -> None:
    product = e.rng.choice(r.cos_products)
    e.swap_input(product, r.cos, r.sin)


def _other_pairs(e: Edit, r: Rope) -> None:
    """Even and odd elements instead of halves, or the reverse."""
    size = shape(r.x)[-1]
    first, second = r.parts
    dim = first.args[1]
    bounds = [(0, size, 2), (1, size, 2)] if (first.args[2:] == (0, size // 2, 1)) else [(0, size // 2, 1), (
        size // 2, size, 1)]
    for node, (start, end, step) in zip((first, second), bounds, strict=True):
        e.become(node, aten.slice.Tensor, r.x, dim, start, end, step)


def _swapped_parts(e: Edit, r: Rope) -> None:
    first, second = r.parts
    a, b = first.args, second.args
    e.become(first, aten.slice.Tensor, *b)
    e.become(second, aten.slice.Tensor, *a)


def _shifted_parts(e: Edit, r: Rope) -> None:
    """The same part twice."""
    first, second = r.parts
    e.become(second, aten.slice.Tensor, *first.args)


def _turned_order(e: Edit, r: Rope) -> None:
    """cat(x₁, -x₂) instead of cat(-x₂, x₁)."""
    assert r.turned is not None
    a, b = r.turned.args[0]  # type: ignore[misc]
    e.become(r.turned, aten.cat.default, [b, a], r.turned.args[1])


def _out_order(e: Edit, r: Rope) -> None:
    if r.half:
        raise NotHereError
    a, b = r.out.args[0]  # type: ignore[misc]
    e.become(r.out, aten.cat.default, [b, a], r.out.args[1])


def _kept_interleaved(e: Edit, r: Rope) -> None:
    """The reference's layout: the rotated pairs are put back side by side."""
    if r.half:
        raise NotHereError
    a, b = r.out.args[0]  # type: ignore[misc]
    size = shape(r.out)
    stacked = e.before(r.out, aten.stack.default, [a, b], -1)
    flat = e.before(r.out, aten.reshape.default, stacked, list(size))
    e.bypass(r.out, flat)


def _frequencies(p: Program) -> list[fx.Node]:
    return list(calls(p, aten.cos.default))


def _other_base(e: Edit, cos: fx.Node) -> None:
    angles = cos.args[0]
    scaled = e.before(cos, aten.mul.Tensor, angles, e.factor())
    for node in list(angles.users):
        if node is not scaled:
            e.swap_input(node, angles, scaled)


def _cos_only_base(e: Edit, cos: fx.Node) -> None:
    e.swap_input(cos, cos.args[0], e.before(cos, aten.mul.Tensor, cos.args[0], e.factor()))


def _attention_factor(e: Edit, cos: fx.Node) -> None:
    factor = e.factor()
    sin = next(iter(calls(e.program, aten.sin.default)))
    for node in (cos, sin):
        e.after(node, aten.mul.Tensor, factor)


def _unequal_halves(e: Edit, cos: fx.Node) -> None:
    """cat(f, c·f): the halves of the tables differ."""
    cat = cos.args[0]
    if not is_call(cat, aten.cat.default):
        raise NotHereError
    a, _ = cat.args[0]
    e.become(cat, aten.cat.default, [a, e.before(cat, aten.mul.Tensor, a, e.factor())], cat.args[1])


def _interleaved_tables(e: Edit, cos: fx.Node) -> None:
    """repeat_interleave(f, 2) instead of cat(f, f)."""
    cat = cos.args[0]
    if not is_call(cat, aten.cat.default):
        raise NotHereError
    a, _ = cat.args[0]
    stacked = e.before(cat, aten.stack.default, [a, a], -1)
    e.bypass(cat, e.before(cat, aten.reshape.default, stacked, list(shape(cat))))


def _table_of_first_row(e: Edit, r: Rope) -> None:
    name = e.rng.choice(["cos", "sin"])
    table, products = getattr(r, name), getattr(r, f"{name}_products")
    dims = [d for d in range(len(shape(table)) - 1) if shape(table)[d] > 1]
    if not dims:
        raise NotHereError
    row = e.before(products[0], aten.slice.Tensor, table, e.rng.choice(dims), 0, 1)
    _reread(e, products, table, row)


def _table_of_one_angle(e: Edit, r: Rope) -> None:
    name = e.rng.choice(["cos", "sin"])
    table, products = getattr(r, name), getattr(r, f"{name}_products")
    one = e.before(products[0], aten.slice.Tensor, table, len(shape(table)) - 1, 0, 1)
    _reread(e, products, table, one)


def _both_tables_of_first_row(e: Edit, r: Rope) -> None:
    """Every token is rotated by the position of the first."""
    for table, products in ((r.cos, r.cos_products), (r.sin, r.sin_products)):
        dims = [d for d in range(len(shape(table)) - 1) if shape(table)[d] > 1]
        if not dims:
            raise NotHereError
        _reread(e, products, table, e.before(_first(products), aten.slice.Tensor, table, dims[-1], 0, 1))


def _table_per_head(e: Edit, r: Rope) -> None:
    size = [*shape(r.x)[:-1], shape(r.cos)[-1]]
    table = e.argument(e.noise(*size, scale=0.3, dtype=dtype(r.cos)))
    _reread(e, r.cos_products, r.cos, table)


def _table_expanded(e: Edit, r: Rope) -> None:
    """The table is materialised for every head: the same function."""
    for table, products in ((r.cos, r.cos_products), (r.sin, r.sin_products)):
        size = [*shape(r.x)[:-1], shape(table)[-1]]
        _reread(e, products, table, e.before(_first(products), aten.expand.default, table, size))


def _other_positions(e: Edit, r: Rope) -> None:
    """This rotation uses other angles than its partner."""
    factor = e.factor()
    for table, products in ((r.cos, r.cos_products), (r.sin, r.sin_products)):
        _reread(e, products, table, e.before(_first(products), aten.mul.Tensor, table, factor))


def _first(nodes: list[fx.Node]) -> fx.Node:
    order = {n: i for i, n in enumerate(nodes[0].graph.nodes)}
    return min(nodes, key=order.__getitem__)


def _reread(e: Edit, products: list[fx.Node], old: fx.Node, new: fx.Node) -> None:
    first = _first(products)
    if new.op != "placeholder":
        first.prepend(new)
    for product in products:
        e.swap_input(product, old, new)


def _dropped(e: Edit, r: Rope) -> None:
    if not r.half:
        raise NotHereError
    e.bypass(r.out, r.x)


def _only_cos(e: Edit, r: Rope) -> None:
    if not r.half:
        raise NotHereError
    e.bypass(r.out, r.cos_products[0])


def _input_scaled(e: Edit, r: Rope) -> None:
    scaled = e.after(r.x, aten.mul.Tensor, e.factor(), users=list(r.x.users))
    del scaled


def _fp32_rotation(e: Edit, r: Rope) -> None:
    """The rotation in fp32, rounded at the end."""
    if not r.half or dtype(r.x) == torch.float32:
        raise NotHereError
    narrow = dtype(r.x)
    for product in (*r.cos_products, *r.sin_products):
        for a in list(product.all_input_nodes):
            e.swap_input(product, a, e.before(product, aten._to_copy.default, a, dtype=torch.float32))
        e.editor.refresh(product)
    e.editor.refresh(r.out)
    e.after(r.out, aten._to_copy.default, dtype=narrow)


def _partial(last: bool) -> Any:
    """Only one half of the rotated dims is rotated, by the first half of the angles; the rest passes through."""
    def apply(e: Edit, r: Rope) -> None:
        if not r.half:
            raise NotHereError
        size, rank = shape(r.x)[-1], len(shape(r.x))
        keep = size // 2
        start = keep if last else 0
        with e.editor.before(r.out):
            def cut(node: fx.Node, start: int, end: int) -> fx.Node:
                return e.mark(e.editor.call(aten.slice.Tensor, node, len(shape(node)) - 1, start, end, 1))

            x, rest = cut(r.x, start, start + keep), cut(r.x, keep - start, size - start)
            tables = []
            for table in (r.cos, r.sin):
                quarter = cut(table, 0, keep // 2)
                tables.append(e.mark(e.editor.call(aten.cat.default, [quarter, quarter], len(shape(table)) - 1)))
            turned = e.editor.call(aten.cat.default, [e.editor.call(aten.neg.default, cut(x, keep // 2, keep)),
                                                      cut(x, 0, keep // 2)], rank - 1)
            rotated = e.editor.call(aten.add.Tensor, e.editor.call(aten.mul.Tensor, x, tables[0]),
                                    e.editor.call(aten.mul.Tensor, turned, tables[1]))
            whole = [rest, rotated] if last else [rotated, rest]
            joined = e.mark(e.editor.call(aten.cat.default, whole, rank - 1))
        e.bypass(r.out, joined)

    return apply


def _as_pairs(e: Edit, r: Rope) -> None:
    """The half form spelled as pairs: cat(x₁c - x₂s, x₂c + x₁s) with one half of the tables."""
    if not r.half:
        raise NotHereError
    size, rank = shape(r.x)[-1], len(shape(r.x))
    with e.editor.before(r.out):
        def cut(node: fx.Node, start: int, end: int) -> fx.Node:
            return e.mark(e.editor.call(aten.slice.Tensor, node, len(shape(node)) - 1, start, end, 1))

        cos, sin = cut(r.cos, 0, size // 2), cut(r.sin, 0, size // 2)
        first, second = r.parts

        def times(a: fx.Node, b: fx.Node) -> fx.Node:
            return e.mark(e.editor.call(aten.mul.Tensor, a, b))

        low = e.editor.call(aten.sub.Tensor, times(first, cos), times(second, sin))
        high = e.editor.call(aten.add.Tensor, times(second, cos), times(first, sin))
        whole = e.mark(e.editor.call(aten.cat.default, [low, high], rank - 1))
    e.bypass(r.out, whole)


def _rotated_by_constant(e: Edit, r: Rope) -> None:
    angle = e.rng.uniform(0.3, 1.2)
    for table, products, value in ((r.cos, r.cos_products, math.cos(angle)), (r.sin, r.sin_products, math.sin(angle))):
        full = e.before(_first(products), aten.full.default, [shape(table)[-1]], value, dtype=dtype(table))
        _reread(e, products, table, full)


TABLES = ("cos", "sin")
OPERATORS = (
    Operator("rope_opposite_sign", ROPE, ropes, _sign, words=("sub", "add", "sign")),
    Operator("rope_one_sign", ROPE, ropes, _one_sign, words=("neg", "sub", "add")),
    Operator("rope_tables_swapped", ROPE, ropes, _swapped_tables, legal=True),
    Operator("rope_one_table_swapped", ROPE, ropes, _one_table_swapped, words=TABLES),
    Operator("rope_other_pairs", ROPE, ropes, _other_pairs, words=("rotated p", "interleaved", "halves", "even")),
    Operator("rope_parts_swapped", ROPE, ropes, _swapped_parts, words=("rotated p", "slice", "sub")),
    Operator("rope_same_part_twice", ROPE, ropes, _shifted_parts, words=("rotated p", "slice")),
    Operator("rope_turned_order", ROPE, halves, _turned_order, words=("neg", "slice", "cat", "rotated p")),
    Operator("rope_result_order", ROPE, ropes, _out_order, words=("sub", "add", "cat")),
    Operator("rope_stays_interleaved", ROPE, ropes, _kept_interleaved, words=("cat", "stack", "interleaved")),
    Operator("rope_other_base", ROPE, _frequencies, _other_base, legal=True),
    Operator("rope_base_of_cos", ROPE, _frequencies, _cos_only_base, legal=True),
    Operator("rope_attention_factor", ROPE, _frequencies, _attention_factor, legal=True),
    Operator("rope_unequal_table_halves", ROPE, _frequencies, _unequal_halves, words=TABLES),
    Operator("rope_interleaved_tables", ROPE, _frequencies, _interleaved_tables, words=TABLES),
    Operator("rope_table_of_first_token", ROPE, ropes, _table_of_first_row, words=TABLES),
    Operator("rope_tables_of_first_token", ROPE, ropes, _both_tables_of_first_row, words=TABLES),
    Operator("rope_table_of_one_angle", ROPE, ropes, _table_of_one_angle, words=TABLES),
    Operator("rope_table_per_head", ROPE, ropes, _table_per_head, words=TABLES),
    Operator("rope_table_expanded", ROPE, ropes, _table_expanded, legal=True, same=True),
    Operator("rope_angles_differ", ROPE, ropes, _other_positions, words=TABLES),
    Operator("rope_constant_angle", ROPE, ropes, _rotated_by_constant, words=TABLES),
    Operator("rope_dropped", ROPE, ropes, _dropped, words=("rotary", "index_query", "cat")),
    Operator("rope_without_sin", ROPE, ropes, _only_cos, words=("add",)),
    Operator("rope_input_scaled", ROPE, ropes, _input_scaled, words=("mul",)),
    Operator("rope_fp32", ROPE, ropes, _fp32_rotation, words=("dtype", "float32", "_to_copy"), same=True),
    Operator("rope_partial_last", ROPE, ropes, _partial(True), words=("rotary", "layout", "slice", *TABLES)),
    Operator("rope_partial", ROPE, ropes, _partial(False), words=("rotary", "layout", "slice", *TABLES)),
    Operator("rope_half_as_pairs", ROPE, ropes, _as_pairs, legal=True, same=True),
)
