"""What a user may choose about one compilation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from cannopy import pipeline_text
from cannopy.errors import OptionError, unknown
from cannopy.fx_passes.parallel import Layout, Parallel
from cannopy.pipeline_text import FusionSwitch, Pipeline, word

Phase = Literal["prefill", "decode"]
Target = Literal["atlas-a2", "atlas-a3", "atlas-950"]

PHASES: tuple[str, ...] = get_args(Phase)
TARGETS: tuple[str, ...] = get_args(Target)
MAX_BLOCK = 1024
"""Largest block of a paged cache that the attention kernels take, in tokens (op documentation of the MLA prolog)."""


@dataclass(frozen=True)
class Options:
    """Options of `cannopy.compile`.

    Args:
        phase: what the call is, for the report and for later planning; None when it is neither.
        target: the product to compile for. Where an NPU is present, the NPU is the target.
        cache_dir: folder of the compile cache; None is ``$XDG_CACHE_HOME/cannopy`` or ``~/.cache/cannopy``.
        use_cache: False neither reads nor writes the cache.
        cache_timeout: seconds to wait for another process or rank that is building the same entry.
        ranks: the ranks of torch.distributed that compile this together; None is all, ``(rank,)`` this one alone.
        parallel: how the model is spread over dies: a `Parallel`, its text (``ep=4,dp=4``), a dict of its sizes, or
            the path of a YAML file with them. None is one die. The world of torch.distributed must be as large.
        rank: the die to compile for; None is the rank of torch.distributed. Where torch.distributed is not
            initialised, one rank's graph is built without the others, and cannot be called.
        group_timeout: seconds that a collective waits for the other ranks of its group.
        fusions: rule name → True (the default of every rule), False (leave it out) or ``"require"``
            (an error with the reasons when it applies nowhere). The switches of ``fuse{…}`` in ``pipeline`` are added.
        pipeline: the stages of the compiler as a text, ``normalise,lift,fuse,legalise,…`` (`cannopy.pipeline_text`).
            Switches in it, ``fuse{mla_prolog=off}``, move to ``fusions``: `full_pipeline` has both.
        rules: files with rules of your own (`cannopy.rules`); installed entry points of the group ``cannopy.rules``
            count without being named here.
        plan: file with a plan of streams, core limits, prefetches and SuperKernel regions, or with pins for the
            scheduler (docs/scheduling.md); None plans automatically.
        block_size: tokens per block of the paged view of a cache, a multiple of 16 up to 1024; None chooses one.
        dump_dir: folder for numbered text dumps of the graph, one per pass that changed it.
        verify: check the graph between passes.
        regions: capture and rewrite like layers once and copy the result; False works on every layer.
        keep_weights: keep the results of the weight plan beside the cache entry, under a digest of the weights they
            were made from, and map them at the next start instead of deriving them again (docs/cache.md).

    Raises:
        OptionError: a value that an option does not take, naming the nearest that it takes.
    """

    phase: Phase | None = None
    target: Target = "atlas-a3"
    cache_dir: Path | None = None
    use_cache: bool = True
    cache_timeout: float = 1800.0
    ranks: tuple[int, ...] | None = None
    parallel: Parallel | None = None
    rank: int | None = None
    group_timeout: float = 1800.0
    fusions: Mapping[str, FusionSwitch] = field(default_factory=dict)
    block_size: int | None = None
    dump_dir: Path | None = None
    verify: bool = True
    pipeline: str = pipeline_text.DEFAULT
    rules: tuple[Path, ...] = ()
    plan: Path | None = None
    regions: bool = True
    keep_weights: bool = False

    def __post_init__(self) -> None:
        if self.phase is not None and self.phase not in PHASES:
            raise OptionError(unknown("phase", self.phase, PHASES))
        if self.target not in TARGETS:
            raise OptionError(unknown("target", self.target, TARGETS))
        for name, switch in self.fusions.items():
            if not isinstance(switch, bool) and switch != "require":
                raise OptionError(f"fusion {name}: expected True, False or 'require', found {switch!r}")
        size = self.block_size
        if size is not None and (isinstance(size, bool) or size % 16 or not 0 < size <= MAX_BLOCK):
            raise OptionError(f"block_size: expected a multiple of 16 from 16 to {MAX_BLOCK}, found {size!r}")
        if isinstance(self.cache_timeout, bool) or not self.cache_timeout >= 0:
            raise OptionError(f"cache_timeout: expected seconds from 0, found {self.cache_timeout!r}")
        if isinstance(self.group_timeout, bool) or not self.group_timeout > 0:
            raise OptionError(f"group_timeout: expected seconds above 0, found {self.group_timeout!r}")
        if self.keep_weights and not self.use_cache:
            raise OptionError("keep_weights: there is no cache to keep them in",
                              "leave out keep_weights (--keep-weights), or use_cache=False (--no-cache)")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(self.ranks))
        for name in ("cache_dir", "dump_dir", "plan"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, Path(value))
        rules: Any = self.rules
        object.__setattr__(self, "rules", tuple(map(Path, (rules,) if isinstance(rules, str | Path) else rules)))
        object.__setattr__(self, "parallel", sizes_of(self.parallel))
        if self.rank is not None and self.parallel is None:
            raise OptionError(f"rank: {self.rank!r} is given without parallel", "give parallel as well")
        if self.parallel is not None:
            Layout(self.parallel, 0 if self.rank is None else self.rank)
        self._share_switches()

    def _share_switches(self) -> None:
        """Move the switches of the text to ``fusions``, the one place that has them."""
        parsed = pipeline_text.parse(self.pipeline)
        for name, switch in parsed.fusions.items():
            if self.fusions.get(name, switch) != switch:
                raise OptionError(f"fusion {name} is {word(switch)} in the pipeline and {word(self.fusions[name])} in "
                                  "fusions", "give it once")
        switches = {**self.fusions, **parsed.fusions}
        required = [name for name, switch in switches.items() if switch == "require"]
        if required and all(stage.name != pipeline_text.FUSE for stage in parsed.stages):
            raise OptionError(f"fusion {required[0]} is required and the pipeline {parsed} has no stage fuse",
                              "add fuse behind lift")
        object.__setattr__(self, "pipeline", str(parsed.with_fusions({})))
        object.__setattr__(self, "fusions", MappingProxyType(dict(sorted(switches.items()))))

    @property
    def full_pipeline(self) -> Pipeline:
        """The pipeline with the switches of ``fusions`` in it; its `str` is what the report and the log show."""
        return pipeline_text.parse(self.pipeline).with_fusions(self.fusions)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Options:
        """Options from plain data; an unknown key is an `OptionError` that names the nearest one."""
        names = [f.name for f in fields(cls)]
        for key in values:
            if key not in names:
                raise OptionError(unknown("option", key, names))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``Options.from_dict(o.to_dict()) == o``, and JSON takes it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        paths = {k: str(v) for k, v in plain.items() if isinstance(v, Path)}
        parallel = None if self.parallel is None else str(self.parallel)
        return {**plain, **paths, "fusions": dict(self.fusions), "rules": [str(path) for path in self.rules],
                "parallel": parallel}

    def text(self) -> str:
        """The options that decide the graph, one ``name=value`` per line in a fixed order; part of the cache key.

        Where things are stored, what is dumped and whether the graph is checked do not decide it. Rule files are not
        in it either: what is in them is (`cannopy.pipeline.Plan.text`). The rank is part of the key by itself.
        """
        lines = [
            f"phase={self.phase or 'none'}",
            f"target={self.target}",
            f"block_size={self.block_size or 'auto'}",
            *([] if self.regions else ["regions=off"]),
            *([] if self.parallel is None else [f"parallel={self.parallel}"]),
            *self.full_pipeline.lines(),
        ]
        return "\n".join(lines)

    def check_fusions(self, names: Iterable[str]) -> None:
        """`OptionError` when ``fusions`` has a name that is not among the rules ``names``."""
        known = sorted(set(names))
        self.full_pipeline.check_fusions(known)
        for name in self.fusions:  # those that are on are not in the text
            if name not in known:
                raise OptionError(unknown("fusion", name, known))


def sizes_of(value: Any) -> Parallel | None:
    """What ``parallel`` may be, as sizes; `ParallelError` and `OptionError`."""
    if value is None or isinstance(value, Parallel):
        return value
    if isinstance(value, str) and not value.endswith((".yaml", ".yml")):
        return Parallel.parse(value)
    if isinstance(value, str | Path):
        import yaml

        try:
            value = yaml.safe_load(Path(value).read_text())
        except (OSError, yaml.YAMLError) as e:
            raise OptionError(f"parallel: cannot read the sizes of the groups from {value}: {e}") from e
    if not isinstance(value, Mapping):
        raise OptionError(f"parallel: expected sizes such as ep=4,dp=4, found {value!r}")
    return Parallel.from_dict(value)
