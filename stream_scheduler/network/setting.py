"""What a step is estimated for: load, parallel layout, quantisation, placement."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, fields

from cannopy.fx_passes.parallel import Parallel as Layout
from cannopy.fx_passes.parallel import ParallelError
from cannopy.stream_scheduler.network.model import Model


class SettingError(ValueError):
    """A value that does not fit; says what does."""


@dataclass(frozen=True)
class Load:
    """``phase`` decode: ``batch`` sequences per die, ``context`` cached tokens each, 1 + ``next_n`` query tokens each
    (``next_n`` drafts to verify, and as many draft steps). ``phase`` prefill: ``context`` new tokens per sequence.
    ``batch`` below 1: only that share of the dies has a sequence; above 1 it is a whole number."""

    phase: str = "decode"
    batch: float = 1
    context: int = 4096
    next_n: int = 0

    def __post_init__(self) -> None:
        if self.phase not in ("decode", "prefill"):
            raise SettingError(f"phase is decode or prefill, not {self.phase!r}")
        if not 0 < self.batch < math.inf or self.context < 1 or self.next_n < 0:
            raise SettingError("batch and context are above 0, next_n is 0 or more")
        if self.batch > 1 and self.batch != round(self.batch):
            raise SettingError(f"a die has a whole number of sequences, found {self.batch:g}; a batch below 1 is the "
                               "share of the dies that have one")

    @property
    def sequences(self) -> int:
        """Sequences of a die that has one."""
        return max(1, round(self.batch))

    @property
    def q_tokens(self) -> int:
        """Query tokens per sequence."""
        return self.context if self.phase == "prefill" else 1 + self.next_n

    @property
    def tokens(self) -> int:
        """Query tokens of a die."""
        return self.sequences * self.q_tokens

    @property
    def group_share(self) -> float:
        """Share of the dies that have tokens."""
        return min(1.0, self.batch)


@dataclass(frozen=True)
class Parallel(Layout):
    """`fx_passes.parallel.Parallel` with the checks that a described model allows."""

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """From ``ep=128,o_proj_tp=4``; `SettingError` names the nearest key."""
        try:
            return cls(**asdict(Layout.parse(text)))
        except ParallelError as e:
            raise SettingError(str(e)) from None

    def check(self, model: Model) -> None:
        """`SettingError` when the groups do not fit each other or the model."""
        heads = model.attention.heads
        if heads % self.attn_tp or (heads // self.attn_tp) % self.o_proj_tp:
            raise SettingError(f"{heads} heads cannot be divided by attn_tp={self.attn_tp} "
                               f"times o_proj_tp={self.o_proj_tp}")
        keys = model.attention.kv_heads
        if keys and keys % self.attn_tp and self.attn_tp % keys:
            raise SettingError(f"{keys} heads of keys cannot be divided by attn_tp={self.attn_tp}, nor shared by as "
                               f"many dies each; take a divisor or a multiple of {keys}")
        if self.attn_tp > 1 and self.o_proj_tp > 1:
            raise SettingError("attn_tp already divides o_proj; leave o_proj_tp out")
        for name, size in (("dense_tp", self.dense_tp), ("lm_head_tp", self.lm_head_tp)):
            if self.attn_tp > 1 and size not in (1, self.attn_tp):
                raise SettingError(f"attn_tp={self.attn_tp} already divides what {name}={size} would; leave {name} out")
        if self.cp > 1:
            raise SettingError(f"the estimate does not know prompts that are split over dies; leave cp={self.cp} out")
        if self.sp > 1:
            raise SettingError(f"the estimate does not know rows of prompts spread over attn_tp; leave sp={self.sp} "
                               "out")
        if self.kvp > 1:
            self._check_rows(model)
        for name, size in (("ep", self.ep), ("moe_tp", self.moe_tp)):
            if size > 1 and model.experts is None:
                raise SettingError(f"{model.title} has no experts; leave {name} out")
        if model.experts is not None and model.experts.experts % self.ep:
            raise SettingError(f"{model.experts.experts} experts cannot be divided by ep={self.ep}")
        if self.ep > 1 and self.moe_tp > 1:
            raise SettingError("experts are spread (ep) or cut (moe_tp), not both")
        if self.attn_tp > 1 and self.attn_tp % self.moe_tp:
            raise SettingError(f"moe_tp={self.moe_tp} is no part of attn_tp={self.attn_tp}, which it has to divide")
        self._check_widths(model)
        for f in fields(self):
            size = getattr(self, f.name)
            if size and self.dies % size:
                raise SettingError(f"{self.dies} dies cannot be divided into groups of {f.name}={size}")

    def _check_rows(self, model: Model) -> None:
        """`SettingError` where rows of caches cannot be spread over ``kvp`` dies."""
        a, kvp = model.attention, self.kvp
        if a.kind != "mla" or a.indexer is not None:
            has = "an indexer" if a.kind == "mla" else "caches with heads"
            raise SettingError(f"kvp={kvp} spreads caches of latents without an indexer, and {model.title} has {has}; "
                               "leave kvp out")
        for name in ("attn_tp", "o_proj_tp"):
            if getattr(self, name) > 1:
                raise SettingError(f"kvp={kvp} cuts the output projections already; leave {name} out")
        if a.heads % kvp:
            raise SettingError(f"{a.heads} heads cannot be divided by kvp={kvp}")
        for name in ("dense_tp", "embed_tp", "lm_head_tp", "moe_tp"):
            if kvp % getattr(self, name):
                raise SettingError(f"{name}={getattr(self, name)} is no part of kvp={kvp}, whose dies have the same "
                                   "tokens")

    def _check_widths(self, model: Model) -> None:
        """`SettingError` when a matrix cannot be cut into so many equal parts."""
        dense = self.attn_tp if self.attn_tp > 1 else self.dense_tp
        if model.dense_width % dense:
            raise SettingError(f"a dense MLP of width {model.dense_width} cannot be divided by {dense}")
        if model.experts is not None and model.experts.width % self.moe_tp:
            raise SettingError(f"experts of width {model.experts.width} cannot be divided by moe_tp={self.moe_tp}")


_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}
QUANTISATIONS = ("bf16", "w8a8c16", "w8a8c8", "w4a8c16", "w4a8c8")


@dataclass(frozen=True)
class Quantisation:
    """``matrices``: dtype of the matrices that the checkpoint quantises; ``experts``: of the routed experts;
    ``cache``: of the attention cache. ``bf16`` or ``int8``, experts also ``int4`` (with int8 activations)."""

    matrices: str = "bf16"
    experts: str = "bf16"
    cache: str = "bf16"

    @classmethod
    def parse(cls, text: str) -> Quantisation:
        """From bf16, w8a8c16 (or w8a8), w8a8c8, w4a8c16, w4a8c8: W4 stands for the experts, C for the cache."""
        name = text.lower()
        name = {"w8a8": "w8a8c16", "w4a8": "w4a8c16"}.get(name, name)
        if name not in QUANTISATIONS:
            close = difflib.get_close_matches(name, QUANTISATIONS, n=1, cutoff=0.0)
            raise SettingError(f"no quantisation is called {text!r}; did you mean {close[0]!r}? "
                               f"there are {', '.join(QUANTISATIONS)}")
        if name == "bf16":
            return cls()
        return cls("int8", "int4" if name.startswith("w4") else "int8", "int8" if name.endswith("c8") else "bf16")

    def of(self, matrix: str, model: Model) -> str:
        """Dtype of ``matrix`` (a name of ``Model.quantised``)."""
        if matrix not in model.quantised:
            return "bf16"
        return self.experts if matrix == "experts" else self.matrices

    def bytes_of(self, matrix: str, model: Model) -> float:
        """Bytes per element of ``matrix``."""
        return _BYTES[self.of(matrix, model)]


@dataclass(frozen=True)
class Placement:
    """How an expert places a layer. ``side_stream``: the branch that experts put on a second stream (shared expert and
    indexer projections, LongCat's MoE). ``main_cores``, ``side_cores``: (cube, vector) limits while both run.
    ``prefetch``: weights of the next matmuls during norms and attention. ``super_kernel``: one region per run."""

    side_stream: bool = False
    main_cores: tuple[int, int] | None = None
    side_cores: tuple[int, int] | None = None
    prefetch: bool = False
    super_kernel: bool = False


def split_cores(cube: int, vector: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Limits of LongCat's main and MoE streams: two thirds and one third of the chip (16C32V and 8C16V of 24C48V)."""
    side = cube // 3, vector // 3
    return (cube - side[0], vector - side[1]), side

