"""softmax(mask(q · kᵀ · scale)) · v in any batched spelling  →  cannopy::attention(q, k, v, mask, scale).

Einsum, heads in groups of queries, repeated keys and values, products of fp32 copies, masks of any rank that are added,
filled in or selected. Rows are followed through reshapes and permutes by their numbers, so a spelling counts by what
it computes: row (b, n, s) of the scores is query s of head n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Literal, Number, Op, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import CAST, RESHAPE
from cannopy.fusion_rules.engine.stop import describe, short
from cannopy.fusion_rules.lift.attention import UNSEEN, added_refusal
from cannopy.fusion_rules.lift.moves import MOVES, Moves, moves_of, narrowed
from cannopy.fx_passes.affine import very_negative
from cannopy.fx_passes.graph import aten, dtype, is_call, shape, truncates
from cannopy.fx_passes.normalise.constants import constant

PRODUCT = (aten.matmul.default, aten.bmm.default)
WEIGHTS = op(aten._softmax.default, Any("scores"), Number("dim"), Literal(False), name="softmax")


def _flat(scores: object) -> str | None:
    """What ``scores`` are instead of one row of keys per batch, head and query."""
    return None if isinstance(scores, fx.Node) and len(shape(scores)) == 4 else describe(scores)


SOFTMAX = op(aten._softmax.default, Any("scores", where=_flat, wants="scores [B, N, S, T]"), Literal(-1),
             Literal(False))
PATTERN = Op(PRODUCT, (Through(WEIGHTS, over=(*CAST, *MOVES), name="weights"), Any("values")))


@dataclass(frozen=True)
class Mask:
    """``node`` is added to the scores (``fill`` None), or it is True where ``fill`` stands for a score: hidden keys
    with ``hides``, all others without."""

    node: fx.Node
    fill: float | None = None
    hides: bool = False


@dataclass(frozen=True)
class Matrices:
    """The second operand of a product: the last two dims of ``node``, the other way round when ``swapped``.

    The other dims are broadcast to ``batch``, which is that of the product in order.
    """

    node: fx.Node
    batch: tuple[int, ...]
    swapped: bool = False

    def emit(self, ctx: Context, node: fx.Node, lead: list[int], swap: bool) -> fx.Node:
        """``node``, which is `node` or what it was cast from, as [*lead, rows, columns], with ``swap`` transposed."""
        node = ctx.editor.reshape(node, [*lead, *shape(node)[-2:]])
        return ctx.editor.call(aten.permute.default, node, [0, 1, 3, 2]) if swap is not self.swapped else node


@dataclass(frozen=True)
class Written:
    """``product`` of queries and keys, ``before`` it becomes scores and ``after`` the softmax what moves rows.

    ``keys`` and ``values`` are matrices of the second operands of the products, ``kv_heads`` per request; ``narrow``:
    operands that are fp32 copies count as what they are copies of, and the result is rounded again.
    """

    product: fx.Node
    keys: Matrices
    values: Matrices
    before: Moves
    after: Moves
    mask: Mask | None
    scale: float
    kv_heads: int
    narrow: bool


def _written(match: Match) -> Written | Refusal:
    softmax, anchor = match["softmax"], match.anchor
    size = shape(softmax)
    if match["dim"] not in (-1, len(size) - 1):
        return Refusal(f"the softmax is over dim {match['dim']}, not over the keys", softmax, "constant",
                       "the last dim, -1", str(match["dim"]), "take the softmax over the last dim: softmax(-1)")
    mask, scale, scores, product = _scores(match["scores"])
    if not is_call(product, *PRODUCT):
        return _no_product(product)
    if len(size) not in (4, 5) or shape(scores) != size:
        return _refusal("the scores are not a product of queries and keys over [batch, heads, queries, keys]", softmax)
    if not all(_by_rows(p) for p in (product, anchor)):
        return _refusal("the first operand of a product has not the rows of its result", anchor)
    before, after = moves_of(scores, product), moves_of(match["weights"], softmax)
    if before is None or after is None or shape(product)[-1] != size[-1]:
        return _refusal("the keys of a query are not one row of the scores", softmax)
    batch, heads = size[0], math.prod(size[1:-2])
    rows = before.rows(shape(product)).view(batch, heads, size[-2])
    weights = torch.empty(rows.numel(), dtype=torch.long)
    weights[after.rows(size).flatten()] = torch.arange(rows.numel())
    numbers = (rows // shape(product)[-2], weights.view(rows.shape) // shape(match["weights"])[-2])
    for keys, values in (_repeated(product, anchor), (_plain(product), _plain(anchor))):
        counts = _heads(keys, numbers[0]), _heads(values, numbers[1])
        if counts[0] and counts[0] == counts[1]:
            return _typed(Written(product, keys, values, before, after, mask, scale, counts[0], False), anchor)
    return _refusal("keys and values are not one matrix for each head, or for each group of heads", anchor)


def _by_rows(product: fx.Node) -> bool:
    """Whether the product has one row for each row of its first operand, whose batch is not broadcast."""
    first, second = (shape(cast(fx.Node, a)) for a in product.args)
    return len(first) > 1 and len(second) > 1 and first[:-1] == shape(product)[:-1]


def _typed(found: Written, anchor: fx.Node) -> Written | Refusal:
    nodes = [cast(fx.Node, found.product.args[0]), found.keys.node, found.values.node]
    kinds = {dtype(narrowed(n)) for n in nodes}
    if len(kinds) == 1 and (dtype(anchor) in kinds or _rounded(anchor, kinds)):
        return replace(found, narrow=True)
    if {dtype(n) for n in nodes} == {dtype(anchor)}:
        return found
    return _refusal("q, k, v and the result are not of one dtype", anchor)


def _rounded(node: fx.Node, kinds: set[torch.dtype]) -> bool:
    """Whether everything that reads ``node`` casts it to one of ``kinds``, behind moves or not."""
    return all(dtype(u) in kinds if is_call(u, *CAST) else is_call(u, *MOVES) and _rounded(u, kinds)
               for u in node.users)


def _refusal(reason: str, node: fx.Node) -> Refusal:
    return Refusal(reason, node, "operand", "softmax(q kᵀ · scale + mask) v over [batch, heads, queries, keys]",
                   describe(node), "write the attention with F.scaled_dot_product_attention")


def _no_product(node: fx.Node) -> Refusal:
    """The refusal of ``node``, which stands where the product of queries and keys must."""
    expected, remedy = "a product of queries and keys, times a number, and a mask on it", ""
    what = f"found {describe(node)}"
    fill = _fill(node)
    if fill is not None and very_negative(fill):
        what, remedy = "a second mask is put on them", "put the masks together before they are put on the scores"
    elif fill is not None:
        what, expected = f"hidden keys get the score {fill:g} and keep a weight", "-inf or the lowest number of a dtype"
        remedy = "hide keys with scores.masked_fill(hidden, float('-inf'))"
    elif is_call(node, aten.mul.Tensor, aten.div.Tensor):
        what, expected = f"they are scaled by {describe(node.args[1])}", "a finite number as factor"
        number = not isinstance(node.args[1], fx.Node)
        remedy = "scale by a finite number that is not 0" if number else "scale the queries by it instead"
    return Refusal(f"the scores are not a product of queries and keys: {what}", node, "operation", expected,
                   describe(node), remedy or f"leave out {short(node.target)}: the fused attention has nothing like it")


def _fill(node: fx.Node) -> float | None:
    """The number that ``node`` puts in place of hidden scores."""
    if is_call(node, aten.masked_fill.Scalar):
        return float(cast(float, node.args[2]))
    if not is_call(node, aten.where.self):
        return None
    return next((float(n) for a in node.args[1:] if (n := constant(a)) is not None), None)


def _scores(node: fx.Node) -> tuple[Mask | None, float, fx.Node, fx.Node]:
    """(mask, factor, what the mask is put on, the innermost value) of what the softmax reads."""
    kinds = []
    while is_call(node, *CAST) and not truncates(node):
        kinds.append(dtype(node))
        node = cast(fx.Node, node.args[0])
    node, mask = _masked(node)
    if mask is not None and mask.fill is not None:
        for kind in reversed(kinds):  # the lowest number of fp32 is -inf in bf16
            mask = replace(mask, fill=torch.tensor(mask.fill, dtype=torch.float64).to(kind).item())
    scale, product = _unscaled(node)
    return mask, scale, node, product


def _unscaled(node: fx.Node) -> tuple[float, fx.Node]:
    """(factor, what is multiplied by it), behind casts and moves."""
    scale = 1.0
    while (is_call(node, *CAST, *MOVES) and not truncates(node)) or _factor(node):
        scale *= _factor(node) or 1.0
        node = cast(fx.Node, node.args[0])
    return scale, node


def _factor(node: fx.Node) -> float | None:
    """What ``node`` multiplies by; None where it is no multiplication, or by zero or by what is not finite."""
    if not is_call(node, aten.mul.Tensor, aten.div.Tensor) or not isinstance(node.args[1], int | float):
        return None
    number = float(node.args[1])
    if not number or not math.isfinite(number):
        return None
    return number if is_call(node, aten.mul.Tensor) else 1.0 / number


def _masked(node: fx.Node) -> tuple[fx.Node, Mask | None]:
    """(the scores, the mask on them)"""
    if is_call(node, aten.masked_fill.Scalar):
        scores, hidden, fill = cast("tuple[fx.Node, fx.Node, float]", node.args)
        return (scores, Mask(hidden, float(fill), True)) if very_negative(fill) else (node, None)
    if is_call(node, aten.where.self):
        condition, first, second = cast("tuple[fx.Node, fx.Node, fx.Node]", node.args)
        for scores, other, hides in ((first, second, False), (second, first, True)):
            value = constant(other)
            if value is not None and very_negative(value):
                return scores, Mask(condition, float(value), hides)
        return node, None
    if is_call(node, aten.add.Tensor) and all(isinstance(a, fx.Node) for a in node.args) and not node.kwargs:
        scores, mask = sorted(cast("list[fx.Node]", node.args), key=lambda n: (
            -math.prod(shape(n)), not is_call(_unscaled(n)[1], *PRODUCT)))
        return scores, Mask(mask)
    return node, None


def _plain(product: fx.Node) -> Matrices:
    """The second operand of ``product``."""
    return Matrices(cast(fx.Node, product.args[1]), shape(product)[:-2])


def _repeated(*products: fx.Node) -> tuple[Matrices, ...]:
    """The second operands of ``products``, or what they repeat for a group of heads."""
    return tuple(_source(product) or _plain(product) for product in products)


def _source(product: fx.Node) -> Matrices | None:
    node, batch = cast(fx.Node, product.args[1]), shape(product)[:-2]
    last = list(range(len(shape(node))))
    swapped = is_call(node, aten.permute.default) and node.args[1] == [*last[:-2], last[-1], last[-2]]
    inner = cast(fx.Node, node.args[0]) if swapped else node
    wide = inner.args[0] if is_call(inner, *RESHAPE) else inner
    if not is_call(wide, aten.expand.default):
        return None
    source, size = cast(fx.Node, cast(fx.Node, wide).args[0]), shape(cast(fx.Node, wide))
    kept = shape(source)[-2:] == size[-2:] == shape(inner)[-2:] and len(shape(source)) == len(size)
    return Matrices(source, size[:-2], swapped) if kept and math.prod(size[:-2]) == math.prod(batch) else None


def _heads(found: Matrices, number: torch.Tensor) -> int:
    """Matrices per request when query s of head n of request b, [B, N, S], reads that of its group; 0 otherwise."""
    lead = shape(found.node)[:-2]
    own = torch.arange(math.prod(lead)).view(lead).expand(found.batch).flatten()[number]
    batch, heads, _ = number.shape
    each = math.prod(lead) // batch
    if each * batch != math.prod(lead) or not each or heads % each:
        return 0
    wanted = torch.arange(batch)[:, None] * each + torch.arange(heads) // (heads // each)
    return each if bool((own == wanted[..., None]).all()) else 0


def check(match: Match, ctx: Context) -> Refusal | None:
    """Rows of queries and keys are where the formula needs them; the mask is one for all heads."""
    found = _written(match)
    if isinstance(found, Refusal):
        return found
    if found.mask is None:
        return None
    size, mask = shape(match["softmax"]), found.mask
    if mask.fill is None and not dtype(mask.node).is_floating_point:
        return added_refusal(mask.node)
    wide = (1,) * (len(size) - len(shape(mask.node))) + shape(mask.node)
    if wide[0] not in (1, size[0]) or any(n != 1 for n in wide[1:-2]) or wide[-2] not in (1, size[-2]) or (
            wide[-1] != size[-1]):
        return Refusal("what is put on the scores is no mask for all heads", mask.node, "mask",
                       f"a mask that broadcasts to {[size[0], 1, *size[-2:]]}", describe(mask.node),
                       "give the mask one row of keys for each query, the same for all heads")
    return None


def rewrite(match: Match, ctx: Context) -> None:
    """Replace the weighted sum by the dialect op, its rows where they were."""
    found, size = _written(match), shape(match["softmax"])
    assert isinstance(found, Written)
    call, reshape, anchor = ctx.editor.call, ctx.editor.reshape, match.anchor
    batch, heads, queries = size[0], math.prod(size[1:-2]), size[-2]
    operands = [cast(fx.Node, found.product.args[0]), found.keys.node, found.values.node]
    q, k, v = (narrowed(n, ctx) for n in operands) if found.narrow else operands
    q = reshape(found.before.emit(ctx, q, shape(found.product)), [batch, heads, queries, shape(q)[-1]])
    k = found.keys.emit(ctx, k, [batch, found.kv_heads], True)
    v = found.values.emit(ctx, v, [batch, found.kv_heads], False)
    mask = _emit_mask(ctx, found.mask, size) if found.mask is not None else None
    grouped = found.kv_heads != heads
    out = call(torch.ops.cannopy.attention.default, q, k, v, mask, found.scale, False, grouped,
               *UNSEEN[mask is not None])
    out = reshape(out, [*size[:-1], shape(v)[-1]])
    out = reshape(found.after.emit(ctx, out, size), shape(anchor))
    if dtype(out) != dtype(anchor):
        out = call(aten._to_copy.default, out, dtype=dtype(anchor))
    ctx.editor.replace(anchor, out)


def _emit_mask(ctx: Context, mask: Mask, size: tuple[int, ...]) -> fx.Node:
    """[B or 1, 1, S or 1, T]: bool where hidden scores are -inf, else what is added to the scores."""
    call, node = ctx.editor.call, mask.node
    if mask.hides:
        shown = node.args[0] if is_call(node, aten.bitwise_not.default) else call(aten.bitwise_not.default, node)
        node = cast(fx.Node, shown)
    wide = (1,) * (len(size) - len(shape(node))) + shape(node)
    node = ctx.editor.reshape(node, [wide[0], 1, *wide[-2:]])
    if mask.fill in (None, -math.inf):
        return node
    device = node.meta["val"].device
    zero, fill = (call(aten.full.default, [], n, dtype=torch.float32, device=device) for n in (0.0, mask.fill))
    return call(aten.where.self, node, zero, fill)


RULE = Rule(
    name="lift_attention",
    equation="softmax(q kᵀ scale + mask) v, any batched spelling  →  attention(q, k, v, mask, scale)",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    near=2,
    core=SOFTMAX,
)
