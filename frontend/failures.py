"""Turns what Dynamo and AOTAutograd raise, and what they record but must not happen, into `CaptureError`."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from cannopy.fx_passes import compat

from . import provenance
from .dynamo import Effect
from .errors import CaptureError, SourceLine

EXPERTS_REMEDY = (
    'set the model\'s experts to one graph: model.set_experts_implementation("grouped_mm"); where the class does not '
    "support that, rewrite its loop over experts"
)
_BRANCHLESS = "make the code branchless with torch.where, or pass the condition as a Python bool"

_REMEDIES = (
    (
        "a `lock` context manager",
        "the model takes a lock",
        "make one eager call with these arguments first: transformers locks only when it installs the hooks that "
        "record hidden states or router logits",
    ),
    ("Data-dependent branching", "control flow depends on a tensor's value", _BRANCHLESS),
    ("Data-dependent assertion", "an assertion depends on a tensor's value", "remove the assertion from the model"),
    ("Dynamic control flow", "control flow depends on a tensor's value", _BRANCHLESS),
    ("data-dependent expression", "a size or an index depends on the data", "use operations of fixed output size"),
    ("graph_break", "the model asks for a graph break", "remove the call of torch._dynamo.graph_break"),
    ("logging", "the model logs or prints", "remove the call, or guard it by `if not torch.compiler.is_compiling()`"),
    ("print", "the model logs or prints", "remove the call, or guard it by `if not torch.compiler.is_compiling()`"),
    ("inplace view", "the method changes an input's shape or strides in place", "use the form without underscore"),
    ("nn.Parameter", "the model makes parameters or modules while it runs", "create them in __init__"),
    ("nn_parameter construction", "the model makes parameters or modules while it runs", "create them in __init__"),
)
"""Part of Dynamo's message → reason, cure. The first that fits counts."""

_EXPLANATION = re.compile(r"^\s*Explanation: (.+)$", re.MULTILINE)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(getattr(error, "real_stack", None) or ())


def _in_experts(frames: list[traceback.FrameSummary], where: SourceLine | None) -> bool:
    names = " ".join(f"{f.name} {f.line}" for f in frames) + (where.code if where else "")
    return "expert" in names.lower()


def with_loops(error: CaptureError, loops: Sequence[str]) -> CaptureError:
    """``error`` with why loops over experts in its file were not replaced (`experts.Twin.refused`)."""
    here = [loop for loop in loops if error.source_file and loop.startswith(f"{error.source_file}:")]
    if not here:
        return error
    remedy = "; ".join((error.remedy, *(f"this loop was not replaced, {loop}" for loop in here)))
    return CaptureError(error.reason, error.source_file, error.line, error.code, remedy)


def from_dynamo(error: BaseException) -> CaptureError:
    """The refusal for an exception of the tracer."""
    frames = _frames(error)
    where = provenance.innermost(frames)
    message = str(error)
    head = message.splitlines()[0] if message else type(error).__name__
    explanation = _EXPLANATION.search(message)
    # Dynamo's hints mention print and logging for all kinds of faults, so they are left out.
    told = f"{head} {explanation[1] if explanation else ''} {message.partition('Developer debug context')[2]}"
    for needle, reason, remedy in _REMEDIES:
        if needle in told:
            if _in_experts(frames, where):
                remedy = EXPERTS_REMEDY
            return CaptureError.at(where, f"cannot capture one graph: {reason}", remedy)
    detail = f"{head}: {explanation[1]}" if explanation else head
    cause = error.__cause__
    if head.startswith("Observed exception") and cause is not None:
        detail = f"the model raises {_observed(cause)}"
    return CaptureError.at(
        where, f"cannot capture one graph: {detail}", "check that the eager call works; otherwise rewrite this line"
    )


def _observed(cause: BaseException) -> str:
    name = type(cause).__name__.removeprefix("Observed")
    name = name.removesuffix("Error") if name.endswith("ErrorError") else name
    said = compat.raised_text(cause)
    return f"{name}: {said}" if said else name


def from_aot(error: BaseException) -> CaptureError:
    """The refusal for an exception of AOTAutograd."""
    # The interpreter that runs the graph writes the failing node's own stack into the message.
    where = provenance.of_stack_text(str(error))
    head = (str(error) or type(error).__name__).splitlines()[0]
    return CaptureError.at(
        where, f"cannot make the graph functional: {head}", "rewrite the operation named here without in-place effects"
    )


def from_fake_run(error: BaseException) -> CaptureError:
    """The refusal for an exception of an eager run on fake tensors, which looks for the shapes of a cache."""
    frames = list(traceback.extract_tb(error.__traceback__))
    where = provenance.innermost(frames)
    if isinstance(error, ValueError) and where is not None and "raise" in where.code:
        remedy = "the model refuses this call in eager mode too: call it as its message says"
    else:
        remedy = EXPERTS_REMEDY if _in_experts(frames, where) else "run one eager step with this cache first"
    head = (str(error) or type(error).__name__).splitlines()[0]
    return CaptureError.at(
        where, f"cannot find the shapes of the static cache without running the model: {head}", remedy
    )


_LINEAR_STATE = re.compile(r"layers\[\d+\]\.has_previous_state$")
"""What transformers' layers of linear attention keep in Python: whether they have read tokens."""
_READ_FIRST = (
    "this layer of the cache holds the state of linear attention or of a convolution, and notes in Python that it has "
    "one: read the prompt in eager mode first, and compile the decode step with that cache"
)


def check_effects(effects: list[Effect]) -> None:
    """Refuses Python objects of the caller that the method changes.

    Raises:
        CaptureError: names the object, its attributes and the line.
    """
    if not effects:
        return
    effect = effects[0]
    where = provenance.innermost(effect.stack)
    owner = readable(effect.owner)
    what = ", ".join(a if owner == a else f"{owner}.{a}" for a in effect.attributes) or owner
    others = f" (and {len(effects) - 1} more objects)" if len(effects) > 1 else ""
    remedy = _remedy_for_effect(owner, effect.attributes)
    if any(_LINEAR_STATE.search(readable(e.owner)) for e in effects):
        remedy = _READ_FIRST
    raise CaptureError.at(where, f"the method changes Python state that a graph cannot carry: {what}{others}", remedy)


def check_added_masks(graph: fx.Graph) -> None:
    """Refuses lines of transformers that add a boolean mask to scores, which hides nothing: True counts as 1.

    DeepSeek-V3.2 of transformers 5.14 does so with 'sdpa' where it is traced; an eager call has no mask at that place.

    Raises:
        CaptureError: names the line.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        kinds = [a.meta["val"].dtype for a in node.args if isinstance(a, fx.Node)]
        where = provenance.of_node(node)
        ours = where is not None and "transformers/models/" in where.file.replace("\\", "/")
        if ours and torch.bool in kinds and any(k.is_floating_point for k in kinds):
            raise CaptureError.at(where, "a boolean mask is added to scores, which hides no key: the traced call would "
                                  "compute something else than an eager one, which has no mask here",
                                  "take attn_implementation='eager', whose masks are numbers, or a later transformers")


def _remedy_for_effect(owner: str, attributes: tuple[str, ...]) -> str:
    if re.search(r"layers\[\d+\]$", owner) is None:
        return "create the state in __init__ (tensors as buffers) and change it in place: copy_, add_, index_copy_"
    if "cumulative_length_int" in attributes:  # transformers' StaticSlidingWindowLayer
        return (
            "this layer of the cache keeps a sliding window and counts its tokens in Python; make the StaticCache from "
            "a copy of the config whose layer_types are all 'full_attention': it holds every token, and the model's "
            "mask still hides those outside the window"
        )
    return (
        "pass a StaticCache(config=..., max_cache_len=...), whose tensors keep their storage; one that is not an "
        "argument has to be initialised by an eager call first"
    )


def readable(source: str) -> str:
    """Dynamo's expression for an object as a user would write it: ``L['self'].__dict__['x']`` → ``self.x``."""
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)
    if (imported := re.match(r"__import_(\w+?)\.(?=\w)", text)) is not None:
        text = imported[1].replace("_dot_", ".") + "." + text[imported.end() :]
    text = re.sub(r"\.__dict__\['([^']*)'\]", r".\1", text)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", text)


def check_static(graph: fx.Graph) -> None:
    """Refuses values, sizes and storages of Dynamo's ``graph`` that are not known before the run.

    Raises:
        CaptureError: names the line that reads a tensor's value or makes a size from one.
    """
    for node in graph.nodes:
        if compat.gives_other_memory(node.target):
            raise CaptureError.at(
                provenance.of_node(node),
                "the method gives a tensor other memory (.data = …, set_, resize_)",
                "copy into the tensor instead: copy_, index_copy_",
            )
        if node.op != "output" and _symbolic(node.meta.get("example_value")):
            raise _data_dependent(node)


def _symbolic(value: Any) -> bool:
    return value is not None and bool(free_symbols(value))


def _data_dependent(node: fx.Node) -> CaptureError:
    where = provenance.of_node(node)
    stack = node.meta.get("stack_trace") or ""
    if node.op == "placeholder":
        return CaptureError.at(
            where, f"input {node.name} has a dynamic size", "remove torch._dynamo.mark_dynamic: shapes are static here"
        )
    if "expert" in stack.lower():
        remedy = EXPERTS_REMEDY
    elif node.target == "item":
        remedy = "keep the value in a tensor, or pass it to the method as a Python number"
    else:
        remedy = "use an operation of fixed output size: torch.where, masked_fill, topk, scatter"
    if node.target == "item":
        return CaptureError.at(where, "the model reads a tensor's value into Python (.item(), int(), tolist())", remedy)
    name = getattr(node.target, "__name__", node.target)
    return CaptureError.at(where, f"the size of {name}'s result depends on the data", remedy)
