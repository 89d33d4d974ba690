"""Discrete choices of a run (experts of a router, keys of an indexer): recorded in one run, replayed in another.

Under bf16 noise two correct runs choose differently where scores tie, and one other expert moves a token's result by
more than all rounding together. So the picks of the compiled run are recorded and replayed in the reference runs,
and whether each pick was a fair one is checked on the scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cannopy.errors import CannopyError

Kind = Literal["experts", "groups", "keys", "topk"]


class ReplayError(CannopyError):
    """The reference run does not ask for the picks that the compiled run made."""


@dataclass(frozen=True)
class Pick:
    """One selection for a batch of tokens.

    ``indices`` int64 [rows, k]; -1 stands for no candidate left. ``width`` is the number of candidates, None when the
    op does not say (a paged cache). ``reach``: rows of keys that the op was given. ``kind``: ``experts``
    (npu_moe_gating_top_k), ``keys`` (npu_lightning_indexer) or ``topk`` (a topk that was not fused); ``groups`` of
    experts are implied by the experts and never recorded.
    """

    kind: Kind
    indices: torch.Tensor
    width: int | None = None
    reach: int = 0

    @property
    def rows(self) -> int:
        """Number of selections: tokens, for a router or an indexer."""
        return self.indices.shape[0]

    @property
    def k(self) -> int:
        """Picks per selection."""
        return self.indices.shape[1]


class Recorder(TorchDispatchMode):
    """While active, keeps the picks of every selection op that executes, in order, in ``picks``."""

    def __init__(self) -> None:
        super().__init__()
        self.picks: list[Pick] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "npu::npu_moe_gating_top_k":
            self._keep("experts", out[1], args[0].shape[-1])
        elif name == "npu::npu_lightning_indexer":
            self._keep("keys", out[0], None, args[1].shape[0])
        elif name == "aten::topk" and _of_last_dim(args):
            self._keep("topk", torch.where(_valid(out[0]), out[1], -1), args[0].shape[-1])
        return out

    def _keep(self, kind: Kind, indices: torch.Tensor, width: int | None, reach: int = 0) -> None:
        self.picks.append(Pick(kind, indices.detach().long().reshape(-1, indices.shape[-1]).clone(), width, reach))


@dataclass(frozen=True)
class Choice:
    """What a reference run would have picked at one recorded pick.

    ``scores`` [rows, n] in the run's dtype; ``own`` [rows, k] the run's own picks; ``wanted`` [rows, k] the recorded
    ones, -1 for no candidate left.
    """

    kind: Kind
    scores: torch.Tensor
    own: torch.Tensor
    wanted: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """Bool [rows, n]: candidates that no mask excludes."""
        return _valid(self.scores)

    @property
    def picked(self) -> torch.Tensor:
        """Bool [rows, n]: the recorded picks."""
        return _as_set(self.wanted, self.scores.shape[1])

    @property
    def differs(self) -> torch.Tensor:
        """Bool [rows]: the run would have picked other valid candidates."""
        own = _as_set(self.own, self.scores.shape[1]) & self.valid
        return (own != (self.picked & self.valid)).any(-1)


class Replay(TorchDispatchMode):
    """While active, each topk over the last dimension that fits the next recorded pick returns that pick.

    ``choices`` has one entry per replayed pick, and one per choice of expert groups that precedes such a pick.
    `finish` raises `ReplayError` when picks are left over.
    """

    def __init__(self, picks: Sequence[Pick]) -> None:
        super().__init__()
        self.picks = picks
        self.choices: list[Choice] = []
        self.used = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name != "aten::topk" or not _of_last_dim(args) or self.used == len(self.picks):
            return out
        scores, own = args[0], out[1]
        flat = scores.detach().reshape(-1, scores.shape[-1])
        pick = self.picks[self.used]
        wanted = self._wanted(pick, flat, own.shape[-1])
        if wanted is None:
            return out
        kind: Kind = pick.kind if wanted is pick.indices else "groups"
        self.choices.append(Choice(kind, flat.clone(), own.reshape(flat.shape[0], -1), wanted))
        indices = _complete(wanted, flat).view(own.shape)
        return scores.gather(-1, indices), indices

    def finish(self) -> None:
        """`ReplayError` unless every recorded pick was asked for."""
        if self.used < len(self.picks):
            left = self.picks[self.used]
            raise ReplayError(
                f"pick {self.used + 1} of {len(self.picks)} of the compiled run ({left.kind}, {left.rows} rows, "
                f"{left.k} of {left.width or '?'}) has no topk in the eager run that fits it",
                "compare the topk calls of the model with the fused ops in the report",
            )

    def _wanted(self, pick: Pick, flat: torch.Tensor, k: int) -> torch.Tensor | None:
        """What this topk has to return as [rows, k] with -1 for nothing; None when it is not one of the recorded."""
        rows, n = flat.shape
        if rows != pick.rows:
            return None
        if k == pick.k and (pick.width == n or (pick.width is None and bool((pick.indices < n).all()))):
            self.used += 1
            return pick.indices
        if pick.kind == "experts" and pick.width and n < pick.width and pick.width % n == 0:
            return _groups(pick, flat, k)
        return None


def _of_last_dim(args: tuple[Any, ...]) -> bool:
    """Whether a topk call takes the largest of the last dimension: (self, k, dim=-1, largest=True, sorted=True)."""
    dim = args[2] if len(args) > 2 else -1
    largest = args[3] if len(args) > 3 else True
    return bool(largest) and dim in (-1, args[0].dim() - 1)


def _as_set(indices: torch.Tensor, n: int) -> torch.Tensor:
    """Bool [rows, n], true at ``indices`` [rows, k]; -1 is nothing."""
    found = torch.zeros(indices.shape[0], n + 1, dtype=torch.bool)
    return found.scatter_(1, torch.where(indices < 0, n, indices), True)[:, :n]


def _valid(scores: torch.Tensor) -> torch.Tensor:
    """Candidates that no mask excludes: masks are -inf or the most negative number of a 16- or 32-bit type, the latter
    added to a score as well."""
    return scores > torch.finfo(torch.float16).min / 2


def _groups(pick: Pick, scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k expert groups that the picked experts imply; where they lie in fewer, the best others by ``scores``."""
    assert pick.width is not None
    per_group = pick.width // scores.shape[1]
    implied = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, pick.indices // per_group, True)
    return torch.where(implied, torch.inf, scores.double()).topk(k, dim=-1).indices


def _complete(wanted: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """``wanted`` with masked candidates in place of -1, as an eager topk pads."""
    masked_first = torch.argsort(_valid(scores).int(), dim=-1, stable=True)
    missing = wanted < 0
    rank = (missing.long().cumsum(-1) - 1).clamp(min=0)
    return torch.where(missing, masked_first.gather(1, rank), wanted)
