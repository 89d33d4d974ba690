"""Layouts that a number of dies allows for a model: which are legal, which fit, and which is fastest.

Every layout is checked and its memory computed. Times come from the cost model, one stream: a model of few layers
gives the time of a layer; what each kind of group adds is measured against the same layout without it, and added up;
the best ones are then simulated in full.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cannopy.fusion_rules.parallel.legality import Traffic, dispatch_limits
from cannopy.stream_scheduler.hardware import Hardware
from cannopy.stream_scheduler.network.memory import Memory
from cannopy.stream_scheduler.network.model import Model
from cannopy.stream_scheduler.network.report import StepEstimate, estimate_memory, estimate_step
from cannopy.stream_scheduler.network.setting import Load, Parallel, Quantisation, SettingError

FINE = ("o_proj_tp", "dense_tp", "embed_tp", "lm_head_tp")
"""Groups that share one matrix each."""
SIZES = (1, 2, 4, 8, 16)
"""Dies of such a group and of a group that cuts heads: a node has 16."""
EXACT = 4
"""Layouts that are simulated in full."""


@dataclass(frozen=True)
class Proposal:
    """One layout: ``us`` a step of one stream, ``bound`` the resource most of it waits for, memory of a die."""

    parallel: Parallel
    load: Load
    us: float
    bound: str
    memory: Memory

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {"parallel": str(self.parallel), "sequences": self.load.batch, "step_us": self.us, "bound": self.bound,
                "memory": self.memory.to_dict()}


@dataclass(frozen=True)
class Proposals:
    """``best`` first. ``legal`` layouts, and why others were ``dropped`` {reason: layouts}."""

    best: tuple[Proposal, ...]
    legal: int
    dropped: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {"best": [p.to_dict() for p in self.best], "legal": self.legal, "dropped": self.dropped}


def propose(model: Model, dies: int, load: Load, quant: Quantisation, hardware: Hardware) -> Proposals:
    """Layouts of ``dies`` dies. ``load.batch`` counts sequences per die; dies that share heads have theirs together.

    `SettingError` when none is legal or none fits, with the reasons.
    """
    dropped: Counter[str] = Counter()
    fitting: list[tuple[Parallel, Load]] = []
    least: Memory | None = None
    legal = 0
    for parallel in _candidates(model, dies):
        own = dataclasses.replace(load, batch=load.batch * parallel.attn_tp)
        reason = _refused(model, parallel, own, hardware)
        if reason:
            dropped[reason] += 1
            continue
        legal += 1
        found = estimate_memory(model, own, parallel, quant, hardware)
        if found.fits:
            fitting.append((parallel, own))
        else:
            dropped[f"more than the {hardware.hbm_bytes / 1e9:.3g} GB of a die"] += 1
            least = found if least is None or found.total < least.total else least
    if not fitting:
        reasons = "; ".join(f"{n} layouts: {reason}" for reason, n in dropped.most_common(4))
        best = f"; the smallest takes {least.total / 1e9:.3g} GB" if least is not None else ""
        raise SettingError(f"no layout of {dies} dies carries {model.title} with {load.batch:g} sequences of "
                           f"{load.context} tokens a die: {reasons}{best}")
    times = _Times(model, quant, hardware)
    ranked = sorted(fitting, key=lambda case: (times.of(*case), case[0].dies, str(case[0])))
    best_ones = [_proposal(model, parallel, own, quant, hardware) for parallel, own in ranked[:EXACT]]
    return Proposals(tuple(sorted(best_ones, key=lambda p: p.us)), legal, dict(dropped))


def _candidates(model: Model, dies: int) -> Iterator[Parallel]:
    """Every combination of group sizes that divide ``dies``; experts over all dies that they can be divided among."""
    fine = [n for n in SIZES if dies % n == 0]
    spread = [n for n in range(1, dies + 1) if dies % n == 0 and (n == 1 or model.experts is not None)]
    for attn_tp, ep in itertools.product(fine, spread):
        for sizes in itertools.product(fine, repeat=len(FINE)):
            if attn_tp > 1 and max(sizes[0], sizes[1], sizes[3]) > 1:
                continue  # heads, dense MLPs and the last matrix are cut by attn_tp then
            yield Parallel(ep=ep, dp=dies // attn_tp, attn_tp=attn_tp, **dict(zip(FINE, sizes, strict=True)))


def _refused(model: Model, parallel: Parallel, load: Load, hardware: Hardware) -> str:
    """Why the layout is not legal; "" when it is."""
    try:
        parallel.check(model)
    except SettingError as error:
        return str(error)
    for size, name, what in ((model.vocab, "embed_tp", "words"), (model.vocab, "lm_head_tp", "words")):
        if size % getattr(parallel, name):
            return f"{size} {what} cannot be divided by {name}={getattr(parallel, name)}"
    if parallel.dense_tp > 1 and not (model.dense_layers or model.family == "longcat"):
        return "dense_tp: no layer has a dense MLP"
    e = model.experts
    if e is None or parallel.ep == 1 or load.phase == "prefill":
        return ""
    traffic = Traffic(hardware.family, parallel.ep, max(1, load.tokens // parallel.attn_tp), model.hidden, e.top_k,
                      e.experts, e.targets)
    limits = dispatch_limits(traffic)
    return f"ep={parallel.ep}: {limits[0]}" if limits else ""


class _Times:
    """Microseconds of a step: those of the layout with fine groups of 1, and what each fine group adds to it."""

    def __init__(self, model: Model, quant: Quantisation, hardware: Hardware) -> None:
        self._model, self._quant, self._hardware = model, quant, hardware
        self._known: dict[tuple[Parallel, Load], float] = {}

    def of(self, parallel: Parallel, load: Load) -> float:
        """The sum; exact where kernels of a stream do not change each other's times."""
        plain = dataclasses.replace(parallel, **dict.fromkeys(FINE, 1))
        base = self._time(plain, load)
        alone = [dataclasses.replace(plain, **{k: getattr(parallel, k)}) for k in FINE if getattr(parallel, k) > 1]
        return base + sum(self._time(one, load) - base for one in alone)

    def _time(self, parallel: Parallel, load: Load) -> float:
        if (parallel, load) not in self._known:
            few = min(self._model.layers, self._model.dense_layers + 1)
            more = min(self._model.layers, few + 1)
            short, longer = (self._step(parallel, load, n) for n in (few, more))
            self._known[parallel, load] = short + (longer - short) * (self._model.layers - few)
        return self._known[parallel, load]

    def _step(self, parallel: Parallel, load: Load, layers: int) -> float:
        model = dataclasses.replace(self._model, layers=layers)
        return estimate_step(model, load, parallel, self._quant, self._hardware).us


def _proposal(model: Model, parallel: Parallel, load: Load, quant: Quantisation, hardware: Hardware) -> Proposal:
    step: StepEstimate = estimate_step(model, load, parallel, quant, hardware)
    return Proposal(parallel, load, step.us, step.bounds.bound,
                    estimate_memory(model, load, parallel, quant, hardware))
