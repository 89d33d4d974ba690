"""Arguments and output that several verbs share. Nothing here imports torch before `load_model`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cannopy.cli.world import add_layout_arguments, layout_of, layout_options, with_part
from cannopy.environment import import_torch
from cannopy.errors import CannopyError, unknown
from cannopy.options import PHASES, TARGETS, Options, Phase
from cannopy.pipeline_text import DEFAULT as DEFAULT_PIPELINE
from cannopy.pipeline_text import SWITCHES, FusionSwitch, PipelineTextError, parse

if TYPE_CHECKING:
    from rich.console import Console

    from cannopy.frontend.sources import LoadedModel

DTYPES = ("bf16", "fp16", "fp32")
FORMS = ("stock", "serving")
_reserved: ContextVar[TextIO | None] = ContextVar("_reserved", default=None)


def one_of(kind: str, known: Sequence[str]) -> Callable[[str], str]:
    """An argparse type that takes one of ``known`` and names the nearest for anything else."""

    def convert(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(unknown(kind, text, known))
        return text

    return convert


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return value


def natural(text: str) -> int:
    """An argparse type: a whole number from 0 on."""
    return 0 if text == "0" else positive(text)


def _fusion(text: str) -> tuple[str, FusionSwitch]:
    name, equals, switch = text.partition("=")
    if not (name and equals) or switch not in SWITCHES:
        raise argparse.ArgumentTypeError(f"expected RULE=on, RULE=off or RULE=require, found {text!r}")
    return name, SWITCHES[switch]


def _pipeline(text: str) -> str:
    try:
        parse(text)
    except PipelineTextError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    return text


def verb_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    func: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    """The parser of one verb, with ``--json``."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    parser.set_defaults(func=func)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser, phases: Sequence[str] = PHASES, phase: str = "decode",
                        running: bool = False) -> None:
    """MODEL, what to call it with, and the options of the compilation. ``running``: with all ranks of a layout."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="zoo name, Hugging Face checkpoint folder, or path.py:factory, a function that returns a module, a method "
        "name and a tuple of inputs, and may take phase, batch, dtype and seed",
    )
    group = parser.add_argument_group("model and inputs")
    group.add_argument(
        "--form",
        type=one_of("form", FORMS),
        default="stock",
        metavar="|".join(FORMS),
        help="stock: the model of transformers with a static cache; serving: packed tokens, paged cache (stock)",
    )
    group.add_argument("--size", metavar="SIZE", help="size of a zoo model: tiny (the default), small or full")
    group.add_argument("--dtype", type=one_of("dtype", DTYPES), metavar="|".join(DTYPES), help="of the parameters")
    group.add_argument("--seed", type=int, default=0, help="of random weights and token ids (0)")
    group.add_argument("--batch", type=positive, default=1, help="sequences per call (1)")
    group.add_argument(
        "--prompt-tokens", type=positive, metavar="N", help="tokens of the prompt, in serving form of the longest (96)"
    )
    group.add_argument(
        "--max-cache-len", type=positive, metavar="N", help="tokens that the KV cache holds per sequence (256)"
    )
    group.add_argument(
        "--next-n", type=natural, default=0, metavar="N", help="serving: drafts per request and decode step (0)"
    )
    group = parser.add_argument_group("compilation")
    group.add_argument(
        "--phase",
        type=one_of("phase", phases),
        default=phase,
        metavar="|".join(phases),
        help=f"what to compile ({phase})",
    )
    group.add_argument(
        "--target",
        type=one_of("target", TARGETS),
        default="atlas-a3",
        metavar="|".join(TARGETS),
        help="product (atlas-a3)",
    )
    add_pipeline_arguments(group)
    group.add_argument(
        "--block-size",
        type=positive,
        metavar="N",
        help="tokens per block of a paged cache view (chosen); serving: of the paged cache (128)",
    )
    add_layout_arguments(group, running)
    group.add_argument("--plan", type=Path, metavar="FILE",
                       help="plan of streams, core limits, prefetches and SuperKernels, or pins for one (YAML)")
    group.add_argument("--no-regions", action="store_true", help="capture all layers, also those that are alike")
    group.add_argument("--cache-dir", type=Path, metavar="DIR", help="compile cache (~/.cache/cannopy)")
    group.add_argument("--no-cache", action="store_true", help="neither read nor write the compile cache")
    group.add_argument("--keep-weights", action="store_true",
                       help="keep derived weights beside the cache entry, and map them at the next start")


def add_pipeline_arguments(group: argparse._ArgumentGroup) -> None:
    """``--fusion``, ``--pipeline`` and ``--rules``."""
    group.add_argument(
        "--fusion",
        type=_fusion,
        action="append",
        default=[],
        metavar="RULE=on|off|require",
        help="switch one rule; repeatable",
    )
    group.add_argument(
        "--pipeline",
        type=_pipeline,
        default=DEFAULT_PIPELINE,
        metavar="TEXT",
        help=f"the stages with their options, {DEFAULT_PIPELINE.replace('fuse', 'fuse{RULE=off}', 1)}",
    )
    group.add_argument(
        "--rules",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a file with rules of your own (@cannopy.rule); repeatable",
    )


def add_offline_argument(parser: argparse.ArgumentParser) -> None:
    """``--offline``, for the verbs that run nothing."""
    parser.add_argument("--offline", action="store_true", help="build the model without weights (meta device)")


def rule_options(args: argparse.Namespace) -> Options:
    """The `Options` that `add_pipeline_arguments` stands for."""
    return Options(fusions=dict(args.fusion), pipeline=args.pipeline, rules=tuple(args.rules))


def options_of(args: argparse.Namespace, **more: Any) -> Options:
    """The `Options` that the arguments ask for; ``--phase both`` leaves the phase open."""
    return Options(
        phase=args.phase if args.phase in PHASES else None,
        target=args.target,
        cache_dir=args.cache_dir,
        use_cache=not args.no_cache,
        keep_weights=args.keep_weights,
        fusions=dict(args.fusion),
        block_size=args.block_size,
        pipeline=args.pipeline,
        regions=not args.no_regions,
        rules=tuple(args.rules),
        plan=getattr(args, "plan", None),
        **layout_options(args),
        **more,
    )


def needs_no_weights(model: str) -> bool:
    """Whether the MODEL argument can be built without weights; a factory makes its own."""
    return not model.rpartition(":")[0].endswith(".py")


def load_model(args: argparse.Namespace) -> LoadedModel:
    """The model and its inputs as the arguments say. Raises `NotReadyError` before anything imports torch.

    What is wrong with the switches, the rule files or the name of the plan is an error before the model is made.
    """
    import_torch()
    from dataclasses import replace

    from cannopy import pipeline
    from cannopy.frontend import sources

    pipeline.plan(rule_options(args))
    if args.plan is not None and not args.plan.exists():
        raise CannopyError(f"{args.plan}: No such file", "cannopy timeline MODEL --out FOLDER writes FOLDER/plan.yaml")
    phase: Phase = "decode" if args.phase == "decode" else "prefill"
    loaded = sources.load(
        args.model, size=args.size, dtype=args.dtype, seed=args.seed, phase=phase, batch=args.batch,
        weights=not getattr(args, "offline", False), form=args.form, next_n=args.next_n,
        block_size=args.block_size or 128,
    )
    case = loaded.case
    if case is None:
        if args.prompt_tokens or args.max_cache_len:
            raise CannopyError(
                "--prompt-tokens and --max-cache-len do not apply to a factory, which makes its own inputs"
            )
        return loaded
    tokens, length = args.prompt_tokens or case.prefill_tokens, args.max_cache_len or case.max_cache_len
    if tokens + args.next_n >= length:
        step = f" and a step of {1 + args.next_n} tokens" if args.next_n else ""
        raise CannopyError(
            f"a prompt of {tokens} tokens{step} does not fit a cache of {length}",
            f"--max-cache-len {tokens + args.next_n + 128}, or a shorter prompt",
        )
    case = replace(case, prefill_tokens=tokens, max_cache_len=length)
    return with_part(replace(loaded, case=case, make_inputs=case.inputs), layout_of(args))


def console(args: argparse.Namespace) -> Console:
    """Where human output goes: standard output, or standard error when that is reserved for JSON."""
    from rich.console import Console

    return Console(stderr=args.json, soft_wrap=False, highlight=False)


def print_json(data: Any) -> None:
    """One JSON object on standard output, also inside `json_only`."""
    print(json.dumps(data, indent=2), file=_reserved.get() or sys.stdout)


@contextlib.contextmanager
def json_only() -> Iterator[None]:
    """Keeps standard output for `print_json`: what anything else prints, a user's model too, goes to standard error."""
    token = _reserved.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _reserved.reset(token)


@contextlib.contextmanager
def working(screen: Console, text: str) -> Iterator[None]:
    """Shows that ``text`` is going on, and how long it took; plain lines where the output is no terminal."""
    import time

    start = time.perf_counter()
    if screen.is_terminal:
        with screen.status(text):
            yield
    else:
        screen.print(f"{text} …")
        yield
    screen.print(f"[dim]{text}: {time.perf_counter() - start:.1f} s[/]")
