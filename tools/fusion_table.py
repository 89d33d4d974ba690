"""Where each fusion applies in the zoo's models, stock and serving form, and kernels per decode layer: docs/models.md.

    python tools/fusion_table.py            write the page
    python tools/fusion_table.py MODEL …    print the rows of some models

``expected`` says how often a model has the math of a rule, from its layers alone; the test of the page compares.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cannopy.environment import import_torch

import_torch()

import torch  # noqa: E402  (after the environment has been prepared)

from cannopy import api  # noqa: E402
from cannopy.backend.host.activate import activate  # noqa: E402
from cannopy.frontend.generation import GenerationCase, Phase  # noqa: E402
from cannopy.frontend.serving import ServingCase  # noqa: E402
from cannopy.frontend.state import prepare_state  # noqa: E402
from cannopy.fx_passes import kernels  # noqa: E402
from cannopy.models import zoo  # noqa: E402
from cannopy.options import Options  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
LAYERS = 2
PIPELINE = "normalise,lift,fuse,legalise,weight-layout,counters,merge-slices"
"""What decides which kernels there are; the schedule does not."""
Form = Literal["serving", "stock"]
FORMS: tuple[Form, ...] = ("serving", "stock")
PHASES: tuple[Phase, ...] = ("prefill", "decode")


Attention = Literal["latent", "indexed", "grouped"]
ATTENTION: Mapping[tuple[Attention, Form, Phase], Sequence[str]] = {
    ("latent", "serving", "prefill"): ("kv_rmsnorm_rope_cache", "fused_infer_attention"),
    ("latent", "serving", "decode"): ("mla_prolog", "fused_infer_attention"),
    ("latent", "stock", "prefill"): ("kv_rmsnorm_rope_cache", "fused_infer_attention"),
    ("latent", "stock", "decode"): ("mla_prolog", "fused_infer_attention"),
    ("indexed", "serving", "prefill"): ("mla_prolog", "sparse_flash_attention"),
    ("indexed", "serving", "decode"): ("mla_prolog", "sparse_flash_attention"),
    ("indexed", "stock", "prefill"): ("mla_prolog", "sparse_flash_attention"),
    ("indexed", "stock", "decode"): ("mla_prolog", "sparse_flash_attention"),
    ("grouped", "serving", "prefill"): ("fused_infer_attention",),
    ("grouped", "serving", "decode"): ("fused_infer_attention",),
    ("grouped", "stock", "prefill"): ("fused_infer_attention",),
    ("grouped", "stock", "decode"): ("fused_infer_attention",),
}
"""What each attention becomes, once per attention; norms and rotations that the prolog takes in are gone then."""


@dataclass(frozen=True)
class Family:
    """What a layer holds.

    ``attention``: through low-rank latents, with a norm each for queries and keys, with the indexer in addition, which
    rotates queries and keys of its own, or grouped queries; ``head_norms``: norms of q and k over the head dim;
    ``scaled``: numbers behind both norms of the latents; ``shortcut``: the experts are added behind a dense MLP.
    ``attentions`` and ``mlps`` with a gate and an up projection (shared experts included) per layer; the first
    ``dense`` layers have no ``experts``.
    ``by_hand``: kernels of a decode layer with experts as `BY_HAND` counts them.
    """

    attention: Attention
    head_norms: bool = False
    scaled: bool = False
    attentions: int = 1
    mlps: int = 1
    experts: bool = False
    dense: int = 0
    shortcut: bool = False
    by_hand: Mapping[str, int] = field(default_factory=dict)

    def expected(self, form: Form, phase: Phase, layers: int) -> dict[str, int]:
        """{rule: how often the model has its math}."""
        count = layers * self.attentions
        becomes = ATTENTION[self.attention, form, phase]
        in_prolog = "mla_prolog" in becomes
        latent = 0 if self.attention == "grouped" or in_prolog else 2 - ("kv_rmsnorm_rope_cache" in becomes)
        routed = layers - self.dense if self.experts else 0
        halves = 0 if self.attention == "latent" else 2
        rules = {
            **dict.fromkeys(becomes, count),
            "lift_norm_scale": 2 * count * self.scaled,
            "add_rms_norm": 2 * count,
            "rms_norm": 1 + count * (latent + 2 * self.head_norms),
            "interleave_rope": count * latent,
            "rotary_mul": count * halves,
            "moe_gating_top_k": routed,
            "moe_experts": routed,
            "moe_finalize_add": routed * self.shortcut,
            "swiglu": layers * self.mlps,
        }
        return {rule: n for rule, n in rules.items() if n}


BY_HAND = """By hand: counted from the models that are written by hand for these devices (cann-recipes-infer), in bf16
and on one die: collectives left out, dispatch and combine counted as the one kernel each that routing takes without
them."""
ROUTED = {"Cast": 1, "gating": 1, "routing": 1, "grouped matmul": 2, "finalize": 1}
LATENT = {"MLA prolog": 1, "fused infer attention": 1, "transposed matmul": 1}
R1 = {"add + norm": 2, **LATENT, "matmul": 4, **ROUTED, "SwiGLU": 2, "add": 1}
V32 = {"add + norm": 2, "MLA prolog": 1, "matmul": 7, "layer norm": 1, "rotary": 2, "split": 2, "concat": 2,
       "cache write": 1, "indexer": 1, "sparse attention": 1, "transposed matmul": 1, **ROUTED, "SwiGLU": 2}
LONGCAT = {"add + norm": 4, **{k: 2 * n for k, n in LATENT.items()}, "matmul": 7, **ROUTED, "SwiGLU": 3, "add": 1}

MODELS: Mapping[str, Family] = {
    "deepseek-v3.2": Family("indexed", experts=True, dense=1, by_hand=V32),
    "deepseek-r1": Family("latent", experts=True, dense=1, by_hand=R1),
    "kimi-k2": Family("latent", experts=True, dense=1, by_hand=R1),
    "longcat-flash": Family("latent", scaled=True, attentions=2, mlps=2, experts=True, shortcut=True,
                            by_hand=LONGCAT),
    "qwen2.5": Family("grouped"),
    "qwen3-moe": Family("grouped", head_norms=True, mlps=0, experts=True),
    "qwen3": Family("grouped", head_norms=True),
}


@dataclass(frozen=True)
class Row:
    """``found`` and ``expected`` times each rule applied; ``kernels`` of the last layer by operation."""

    model: str
    form: Form
    phase: Phase
    expected: Mapping[str, int]
    found: Mapping[str, int]
    kernels: Mapping[str, int]

    @property
    def wrong(self) -> list[str]:
        """Rules that applied another number of times, as sentences."""
        where = f"{self.model}, {self.form}, {self.phase}"
        rules = dict.fromkeys((*self.expected, *self.found))
        return [f"{where}: {rule} {self.found.get(rule, 0)} of {self.expected.get(rule, 0)}" for rule in rules
                if self.found.get(rule, 0) != self.expected.get(rule, 0)]


def keys() -> list[tuple[str, Form, Phase]]:
    """All rows of the table; the dense Qwen3 is in it as a stock model only."""
    return [(model, form, phase) for model in MODELS for form in FORMS if (model, form) != ("qwen3", "serving")
            for phase in PHASES]


def _preset(model: str) -> zoo.Preset:
    if model == "qwen3":
        base = zoo.preset("qwen2.5", "tiny")
        return dataclasses.replace(base, architecture="Qwen3ForCausalLM", config_class="Qwen3Config",
                                   config={**base.config, "head_dim": 128, "num_hidden_layers": LAYERS})
    base = zoo.preset(model, "tiny")
    layers = next(name for name in ("num_layers", "num_hidden_layers") if name in base.config)
    return dataclasses.replace(base, config={**base.config, layers: LAYERS})


@functools.cache
def row(model: str, form: Form, phase: Phase) -> Row:
    """One row: the model captured and lowered in this process."""
    activate()
    if form == "serving":
        served = zoo.build_serving(_preset(model)).requires_grad_(False)
        module: torch.nn.Module = served
        method, (args, kwargs) = phase, ServingCase(served, 2, 24, 128, next_n=1).inputs(phase)
    else:
        module = zoo.build(_preset(model)).requires_grad_(False)
        method, (args, kwargs) = "forward", GenerationCase(module, 2, 24, 128).inputs(phase)
    prepare_state(module, args, kwargs)
    options = Options(phase=phase, pipeline=PIPELINE, verify=False)
    program, done = api.lower(module, method, args, kwargs, options, {})
    shown = ("lift_norm_scale",)
    found = {rule: n for rule, n in done.log.counts().items() if not rule.startswith("lift") or rule in shown}
    layers = kernels.by_layer(program.gm.graph)
    last = layers[max(layer for layer in layers if layer is not None)]
    return Row(model, form, phase, MODELS[model].expected(form, phase, LAYERS), found, last)


def rows(models: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of ``models``, all of them when none is named."""
    for key in keys():
        if not models or key[0] in models:
            yield row(*key)


def page(table: Sequence[Row]) -> str:
    """The Markdown page."""
    text = [
        "# Fusions of the models", "",
        "Written by `make docs`; a test compares it with what it finds. Each cell: places where the rule applied / "
        f"places where the model has its math. Tiny sizes, {LAYERS} layers (of DeepSeek and Kimi the first one is "
        "dense), bf16, Atlas A3. *serving*: our own plain model with packed tokens and a paged cache, two requests, a "
        "decode step of two tokens each; *stock*: the class of `transformers` with a `StaticCache`. Counts grow with "
        "the layers.", "",
    ]
    for model in dict.fromkeys(r.model for r in table):
        own = [r for r in table if r.model == model]
        rules = list(dict.fromkeys(rule for r in own for rule in (*r.expected, *r.found)))
        text += [f"## {model}", "", f"| form | phase | {' | '.join(rules)} |", "|" + " --- |" * (len(rules) + 2)]
        for r in own:
            cells = [f"{r.found.get(rule, 0)} / {r.expected.get(rule, 0)}" if rule in r.expected or rule in r.found
                     else "" for rule in rules]
            text.append(f"| {r.form} | {r.phase} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join([*text, *_kernel_table(table)])


def _kernel_table(table: Sequence[Row]) -> list[str]:
    text = [
        "## Kernels of a decode layer", "",
        "Operations of the last layer of the final graph that run as kernels: views, outputs picked and constants are "
        "none. " + " ".join(BY_HAND.split()) + " Difference: of the serving form.", "",
        "| model | serving | stock | by hand | difference |", "| --- | --- | --- | --- | --- |",
    ]
    for model, family in MODELS.items():
        count = {r.form: sum(r.kernels.values()) for r in table if (r.model, r.phase) == (model, "decode")}
        hand = sum(family.by_hand.values())
        more = f"{(count['serving'] / hand - 1):+.0%}" if hand and "serving" in count else ""
        text.append(f"| {model} | {count.get('serving', '')} | {count.get('stock', '')} | {hand or ''} | {more} |")
    text += ["", "What the serving form's layer is made of:", ""]
    for r in table:
        if (r.form, r.phase) == ("serving", "decode"):
            parts = ", ".join(f"{n} × `{op.removeprefix('aten.')}`" for op, n in Counter(r.kernels).most_common())
            text.append(f"- {r.model}: {parts}")
    return [*text, ""]


def main(models: Sequence[str]) -> None:
    """Write the page, or print what is found in some models."""
    table = list(rows(models))
    if not models:
        PAGE.write_text(page(table), encoding="utf-8")
    for r in table:
        if models:
            print(r.model, r.form, r.phase, dict(r.found), sum(r.kernels.values()), dict(r.kernels))
        print("\n".join(r.wrong), end="\n" if r.wrong else "")


if __name__ == "__main__":
    main(sys.argv[1:])
