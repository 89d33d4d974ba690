"""What a loop over experts computes, written without sizes that depend on the data.

    y[t] = Σ_k  weights[t, k] · expert[ids[t, k]](hidden[t])         hidden [T, H], ids and weights [T, K]

Experts that are gated MLPs of one size go through products over stacked weights, in the spellings of transformers'
``grouped_mm`` (bf16) and ``batched_mm`` (other dtypes) experts. Any other expert runs on every token, and the tokens
that did not choose it get nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
ALIGNED = 8
"""``torch._grouped_mm`` takes rows of a multiple of 16 bytes, 8 numbers in bf16."""
Routed = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""``(module, hidden, ids, weights) -> y``, a method of the twin."""
Activation = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(rows [P, K], weights [E, K, N], ends [E]) -> [P, N]``: expert e has the rows up to ``ends[e]``."""


def stacked(routed: int, zero: int, result: str, product: Product | None = None) -> Routed:
    """Experts in ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I] with ``act_fn``.

    ``routed`` of them have weights; the ``zero`` ids behind those return their input. The result has the dtype of
    "hidden" or of the "weights". ``product`` takes the place of ``torch._grouped_mm``.
    """

    def method(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        stacks = self.gate_up_proj[:routed] if zero else self.gate_up_proj, self.down_proj
        y = _mixed(hidden, ids, weights, stacks, self.act_fn, routed if zero else None, product)
        return y.to((weights if result == "weights" else hidden).dtype)

    return method


def listed(container: str, names: tuple[str, str, str], routed: int, zero: int, result: str,
           product: Product | None = None) -> Routed:
    """Experts in the list ``container``: gated MLPs whose gate, up and down projections are called ``names``."""
    gate, up, down = names

    def method(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts = [getattr(self, container)[i] for i in range(routed)]
        gate_up = torch.stack([torch.cat((getattr(e, gate).weight, getattr(e, up).weight)) for e in experts])
        stacks = gate_up, torch.stack([getattr(e, down).weight for e in experts])
        y = _mixed(hidden, ids, weights, stacks, experts[0].act_fn, routed if zero else None, product)
        return y.to((weights if result == "weights" else hidden).dtype)

    return method


def every(container: str, result: str) -> Routed:
    """Experts of any kind in the list ``container``, each run on every token."""

    def routed(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, weights.dtype))
        for i, expert in enumerate(getattr(self, container)):
            chosen = ids == i
            weight = torch.where(chosen, weights, 0).sum(1, keepdim=True)
            total = total + torch.where(chosen.any(1, keepdim=True), expert(hidden) * weight, 0)
        return total.to((weights if result == "weights" else hidden).dtype)

    return routed


def _mixed(hidden: Tensor, ids: Tensor, weights: Tensor, stacks: tuple[Tensor, Tensor], act: Activation,
           first_zero: int | None, product: Product | None) -> Tensor:
    """The experts of ``stacks`` and, from id ``first_zero`` on, those that return their input."""
    if first_zero is None:
        return _experts(hidden, ids, weights, stacks, act, product)
    real = ids < first_zero
    y = _experts(hidden, torch.where(real, ids, 0), torch.where(real, weights, 0), stacks, act, product)
    return y + hidden * torch.where(real, 0, weights).sum(1, keepdim=True)


def _experts(hidden: Tensor, ids: Tensor, weights: Tensor, stacks: tuple[Tensor, Tensor], act: Activation,
             product: Product | None) -> Tensor:
    rows_align = all(size % ALIGNED == 0 for size in (hidden.shape[1], stacks[1].shape[2]))
    if product is not None or (hidden.dtype == torch.bfloat16 and rows_align):
        return _grouped(hidden, ids, weights, *stacks, act, product or torch._grouped_mm)
    return _batched(hidden, ids, weights, *stacks, act)


def _grouped(hidden: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
             act: Activation, product: Any) -> Tensor:
    tokens, top_k = ids.shape
    experts = gate_up.shape[0]
    chosen, order = torch.sort(ids.reshape(-1))
    ends = torch.histc(chosen.float(), bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
    gate, up = product(hidden[order // top_k], gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
    y = product(act(gate) * up, down.transpose(1, 2), ends)
    y = y * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    total: Tensor = y[back].view(tokens, top_k, -1).sum(1)
    return total


def _batched(hidden: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
             act: Activation) -> Tensor:
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    rows = hidden.unsqueeze(1).expand(tokens, top_k, hidden.shape[1]).reshape(tokens * top_k, -1)
    gate, up = torch.bmm(gate_up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    y = torch.bmm(down[flat], (act(gate) * up).unsqueeze(-1)).squeeze(-1)
    y = y * weights.reshape(-1).unsqueeze(-1)
    return y.view(tokens, top_k, -1).sum(1)


def plain_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """What ``torch._grouped_mm`` computes, expert by expert, in any dtype; runs in eager mode only."""
    starts = [0, *ends.tolist()[:-1]]
    parts = [rows[a:b] @ w for a, b, w in zip(starts, ends.tolist(), weights, strict=True)]
    return torch.cat(parts)
