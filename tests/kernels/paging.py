"""Requests laid out as packed, batched or paged tensors, with the plain per-request tensors kept beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.kernels.numerics import ints, normal


@dataclass
class Requests:
    """Query and key lengths of each request."""

    queries: list[int]
    keys: list[int]

    def packed(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(rows)

    def batched(self, rows: list[torch.Tensor], size: int) -> torch.Tensor:
        """[B, size, …] with noise after each request's rows."""
        out = normal(len(rows), size, *rows[0].shape[1:], dtype=rows[0].dtype)
        for b, part in enumerate(rows):
            out[b, : part.shape[0]] = part
        return out

    def block_table(self, block: int) -> torch.Tensor:
        """Blocks dealt out in shuffled order; unused entries of a row point outside the cache."""
        needed = [-(-n // block) for n in self.keys]
        order = torch.randperm(sum(needed) + 2)[: sum(needed)].tolist()
        table = torch.full((len(needed), max(needed) + 1), 1 << 20, dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        return table

    def paged(self, rows: list[torch.Tensor], table: torch.Tensor, block: int) -> torch.Tensor:
        """[blocks, block, 1, D] with noise wherever no key is."""
        needed = sum(-(-n // block) for n in self.keys)
        cache = normal(needed + 2, block, 1, rows[0].shape[-1], dtype=rows[0].dtype)
        for b, part in enumerate(rows):
            for position, row in enumerate(part):
                cache[int(table[b, position // block]), position % block] = row
        return cache

    def query_ends(self) -> torch.Tensor:
        return torch.tensor(self.queries).cumsum(0).to(torch.int32)

    def key_ends(self) -> torch.Tensor:
        return torch.tensor(self.keys).cumsum(0).to(torch.int32)

    def query_lengths(self) -> torch.Tensor:
        return ints(*self.queries)

    def key_lengths(self) -> torch.Tensor:
        return ints(*self.keys)

    def visible(self, request: int, query: int, mode: int) -> int:
        """How many leading keys query number `query` of a request may see."""
        if mode == 0:
            return self.keys[request]
        return max(0, self.keys[request] - self.queries[request] + query + 1)
