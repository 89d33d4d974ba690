"""rms_norm(x, gamma, eps) · s  →  rms_norm(x, gamma · s, eps), also where linears and views stand in between.

LongCat multiplies queries and latents by √(hidden / rank). A number commutes with a linear without bias and with views,
so it becomes part of gamma at load time, as long as everything that reads the norm is multiplied by it. Rounding: the
product with s is no longer rounded, gamma · s is once.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Number, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import NEVER, Context, Refusal, Rule
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fx_passes.graph import aten, dtype, is_call, where
from cannopy.fx_passes.weight_plan import derived, why_not_weight

VIEWS = (aten.reshape.default, aten.permute.default, aten.slice.Tensor, aten.split_with_sizes.default,
         aten.select.int, operator.getitem)
NORM = "cannopy::rms_norm"
EXPONENTS = {torch.float16: 4}
MOST_EXPONENTS = 64
"""A number from 2 ** -n to 2 ** n leaves gamma times that number inside of the dtype's range. float16 has 5 bits of
exponent, so a larger number makes gammas infinite and a smaller one rounds them to few bits; other dtypes have 8."""


def readers(norm: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """The products with a number behind ``norm``, and the first reader that is none, if there is one."""
    products: list[fx.Node] = []
    pending = [norm]
    while pending:
        node = pending.pop()
        for user in node.users:
            if _scaled(user, node):
                products.append(user)
            elif user.args[0] is node and (is_call(user, *VIEWS) or (
                    is_call(user, aten.linear.default) and len(user.args) == 2 and user.args[1] is not node)):
                pending.append(user)
            else:
                return products, user
    return products, None


def _scaled(user: fx.Node, node: fx.Node) -> bool:
    return is_call(user, aten.mul.Tensor) and user.args[0] is node and isinstance(user.args[1], int | float) and (
        dtype(user) == dtype(node))


def check(match: Match, ctx: Context) -> Refusal | None:
    """All readers of the norm are multiplied by the same number, and gamma is there at load time."""
    norm, scale = match["norm"], match["scale"]
    gamma = norm.args[1]
    if not math.isfinite(scale):
        return Refusal(f"the norm is multiplied by {scale}", match.anchor, "constant", "a finite number", str(scale),
                       "scale by a finite number")
    refusal = _range_refusal(match)
    if refusal is not None:
        return refusal
    products, other = readers(norm)
    other = next((p for p in products if p.args[1] != scale), other)
    if other is not None:
        found = "the method returns it" if other.op == "output" else f"{describe(other)} at {where(other)}"
        return Refusal(f"the norm is also read without the factor {scale:g}: {found}", norm,
                       "output" if other.op == "output" else "reader", f"a product with {scale:g} at every reader",
                       found, "multiply the norm once, before all of its readers")
    reason = why_not_weight(ctx.program, gamma)
    if reason is not None:
        return Refusal(f"gamma must be a parameter to be multiplied by {scale:g} at load time: {reason}", gamma,
                       "weight", "a parameter or buffer", reason, "keep gamma in the module as a parameter")
    return None


def _range_refusal(match: Match) -> Refusal | None:
    """gamma times the number must keep its bits, and what stands between the norm and the product its range."""
    norm, scale, kind = match["norm"], match["scale"], dtype(match["norm"].args[1])
    bits = EXPONENTS.get(kind, MOST_EXPONENTS)
    if not 2.0**-bits <= abs(scale) <= 2.0**bits:
        return Refusal(f"gamma times {scale:g} may leave the range of {describe(kind)}", match.anchor, "constant",
                       f"a number from 2**-{bits} to 2**{bits}", f"{scale:g}",
                       "scale by a number in that range" + ", or run the model in bfloat16" * (kind in EXPONENTS))
    if kind in EXPONENTS and any(_behind_linear(product) for product in readers(norm)[0]):
        return Refusal(f"a {describe(kind)} linear between the norm and the product with {scale:g} may overflow with "
                       "one and not with the other", match.anchor, "dtype", "bfloat16 or float32", describe(kind),
                       "run the model in bfloat16, or scale the norm before the linear")
    return None


def _behind_linear(product: fx.Node) -> bool:
    node = product.args[0]
    while is_call(node, *VIEWS):
        node = node.args[0]  # type: ignore[union-attr]
    return is_call(node, aten.linear.default)


def rewrite(match: Match, ctx: Context) -> None:
    """A norm with the scaled gamma, and what was multiplied in place of each product."""
    norm, scale = match["norm"], float(match["scale"])
    x, gamma, eps = norm.args
    recipe = f"(w[0].double() * {scale!r}).to(w[0].dtype)"
    with ctx.editor.before(norm):
        gamma = derived(ctx.program, ctx.editor, f"{gamma.name}_scaled", [gamma], recipe)
        scaled = ctx.editor.call(norm.target, x, gamma, eps)
    for product in readers(norm)[0]:
        ctx.editor.replace(product, product.args[0])  # type: ignore[arg-type]
    ctx.editor.replace(norm, scaled)


def _only_scaled(value: object) -> str | None:
    if not (isinstance(value, fx.Node) and isinstance(value.target, torch._ops.OpOverload)
            and value.target.name() == NORM):
        return "something else than a norm"
    products, other = readers(value)
    return None if other is None and len({p.args[1] for p in products}) == 1 else "a norm with other readers"


def _times_number(value: Pattern) -> Pattern:
    return op(aten.mul.Tensor, value, Number("scale"))


DIRECT = _times_number(Through(op(NORM, Any(), Any(), Number(), name="norm"), over=VIEWS))
BEHIND_LINEAR = _times_number(Through(
    op(aten.linear.default, Through(Any("norm", where=_only_scaled, wants="a norm without other readers"), over=VIEWS),
       Any()),
    over=VIEWS,
))
"""Most norms are read through linears in several ways, of which a product with a number may be one: no near miss."""

RULES = tuple(
    Rule(
        name="lift_norm_scale",
        equation=f"{formula}  →  {formula.removesuffix(' · s').replace('gamma', 'gamma · s')}",
        pattern=pattern,
        check=check,
        rewrite=rewrite,
        near=NEVER,
    )
    for formula, pattern in (("rms_norm(x, gamma, eps) · s", DIRECT), ("linear(rms_norm(x, gamma, eps)) · s",
                                                                       BEHIND_LINEAR))
)
