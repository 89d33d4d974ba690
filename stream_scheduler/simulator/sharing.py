"""How concurrent readers divide the HBM bandwidth."""

from __future__ import annotations

from collections.abc import Sequence


def speeds(demands: Sequence[float], weights: Sequence[float], total: float) -> list[float]:
    """Speed of each reader relative to having the memory to itself, in (0, 1].

    ``demands``: bytes per microsecond that each reads when alone; ``weights``: how many requests it keeps in flight
    (cores). While the demands fit into ``total`` nobody is slowed; beyond, the bandwidth is divided by weight, and
    what a reader does not need goes to the others (weighted max-min fairness).
    """
    if sum(demands) <= total:
        return [1.0] * len(demands)
    left, found = total, [1.0] * len(demands)
    open_ = [i for i, demand in enumerate(demands) if demand > 0]
    while open_:
        per_weight = left / sum(weights[i] for i in open_)
        content = [i for i in open_ if demands[i] <= per_weight * weights[i]]
        if not content:
            for i in open_:
                found[i] = per_weight * weights[i] / demands[i]
            break
        left -= sum(demands[i] for i in content)
        open_ = [i for i in open_ if i not in content]
    return found
