"""From a published ``config.json`` (Hugging Face) to the zoo's serving model of the same math, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .deepseek import Deepseek, DeepseekConfig
from .longcat import Longcat, LongcatConfig
from .qwen import Qwen, QwenConfig
from .serving import ServingModel
from .weights import Rename, deepseek_target, longcat_target


class PublishedConfigError(ValueError):
    """A configuration whose math no model of the zoo has: names the entry, what was expected and what was found."""


@dataclass(frozen=True)
class Published:
    """A family of the zoo with its sizes. ``build()`` makes the model, ``rename`` maps names of the checkpoint."""

    build: Callable[[], ServingModel]
    rename: Rename


def read(config: Mapping[str, Any]) -> Published:
    """The serving model of ``config``, the contents of a ``config.json``.

    Raises:
        PublishedConfigError: another architecture, or one of these with an entry that changes the math.
    """
    kind = str(config.get("model_type"))
    if kind not in _FAMILIES:
        raise PublishedConfigError(f"model_type: expected one of {', '.join(sorted(_FAMILIES))}, found {kind}")
    if config.get("quantization_config"):
        raise PublishedConfigError("quantization_config: expected weights in bf16, fp16 or fp32, found "
                                   f"{config['quantization_config'].get('quant_method', 'a quantised checkpoint')}")
    _require(config, {"is_causal": True})
    heads = config.get("architectures") or ()
    if heads and not any(name.endswith("ForCausalLM") for name in heads):
        raise PublishedConfigError(f"architectures: expected a model for causal language, found {', '.join(heads)}")
    return _FAMILIES[kind](config)


def _require(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Every entry of ``config`` that is there and that ``expected`` names has that value, or one of a tuple of them."""
    for name, wanted in expected.items():
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        if name in config and config[name] not in allowed:
            raise PublishedConfigError(f"{name}: expected {' or '.join(map(repr, allowed))}, found {config[name]!r}")


def _known(config: Mapping[str, Any], cls: type[Any], optional: Collection[str], **more: Any) -> Any:
    """An instance of ``cls`` with the entries that it has fields for. All but ``optional`` ones must be there; those
    keep the default of transformers. A size of another checkpoint is never filled in."""
    names = [f.name for f in fields(cls)]
    given = {k: v for k, v in config.items() if k in names and v is not None} | more
    missing = [name for name in names if name not in given and name not in optional]
    if missing:
        raise PublishedConfigError(f"the configuration is not complete: expected {', '.join(missing)}, found none")
    for name in (f.name for f in fields(cls) if f.type in ("int", "int | None")):
        found, least = given.get(name), 0 if name in _FROM_ZERO else 1
        if found is not None and (type(found) is not int or found < least):
            raise PublishedConfigError(f"{name}: expected a whole number from {least} on, found {found!r}")
    return cls(**given)


_FROM_ZERO = ("first_k_dense_replace", "zero_expert_num", "num_experts")


def _same(config: Mapping[str, Any], **other_names: str) -> dict[str, Any]:
    """``config`` with each entry under its own name, from the other name that `transformers` reads and writes."""
    named = dict(config)
    for own, other in other_names.items():
        found, again = config.get(own), config.get(other)
        if found is not None and again is not None and found != again:
            raise PublishedConfigError(f"{other}: expected {own}, {found!r}, found {again!r}")
        named[own] = again if found is None else found
    return named


def _at_most(name: str, found: int, limit: int, what: str) -> None:
    if found > limit:
        raise PublishedConfigError(f"{name}: expected at most {limit}, {what}, found {found}")


def _divides(name: str, found: int, whole: int, what: str) -> None:
    if whole % found:
        raise PublishedConfigError(f"{name}: expected a divisor of {whole}, {what}, found {found}")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Angles as `parts.Rotary` takes them, from both spellings: ``rope_parameters``, or ``rope_theta`` and scaling."""
    given = [config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    theta = next((g["rope_theta"] for g in given if g.get("rope_theta") is not None), config.get("rope_theta"))
    if theta is None:  # families differ in what it is then
        raise PublishedConfigError("rope_theta: expected the base of the angles, found none")
    found = [_angles(theta, spelling) for spelling in given or [{}]]
    if found[0] != found[-1]:
        raise PublishedConfigError(f"rope_scaling: expected what rope_parameters says, found {given[-1]}")
    return found[0]


def _angles(theta: float, given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("rope_type", given.get("type", "default"))
    rope: dict[str, Any] = {"theta": given.get("rope_theta") or theta}
    _require({"partial_rotary_factor": given.get("partial_rotary_factor", 1.0)}, {"partial_rotary_factor": 1.0})
    if kind == "default":
        return rope
    if kind != "yarn":
        raise PublishedConfigError(f"rope_type: expected default or yarn, found {kind}")
    if given.get("mscale") != given.get("mscale_all_dim") or given.get("attention_factor") is not None:
        raise PublishedConfigError("rope: expected mscale equal to mscale_all_dim and no attention_factor, so that "
                                   f"cos and sin are not scaled, found {given}")
    if "truncate" in given and not given["truncate"]:
        raise PublishedConfigError("rope: expected YaRN bounds that are rounded, found truncate=False")
    names = {"factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
             "original_max_position_embeddings": "original_positions", "mscale_all_dim": "mscale_all_dim"}
    rope |= {own: given[name] for name, own in names.items() if given.get(name) is not None}
    for own in ("factor", "original_positions", "mscale_all_dim"):
        if own not in rope:
            raise PublishedConfigError(f"rope: YaRN without {own}")
        if rope[own] <= 0:  # an mscale of 0 stands for another one in transformers, and scales cos and sin
            raise PublishedConfigError(f"rope: expected YaRN with {own} above 0, found {rope[own]!r}")
    return rope


_PLAIN_MLA = {"attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False, "pretraining_tp": 1}


def _latent(config: Mapping[str, Any]) -> None:
    if not config.get("q_lora_rank"):
        raise PublishedConfigError("q_lora_rank: expected the rank of the queries, found none")


def _deepseek(config: Mapping[str, Any]) -> Published:
    _require(config, _PLAIN_MLA | {
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True,
        "mlp_bias": False,
    })
    _latent(config)
    index = config.get("index_topk") if config["model_type"] == "deepseek_v32" else None
    if config["model_type"] == "deepseek_v32" and not index:
        raise PublishedConfigError("index_topk: expected how many keys the indexer chooses, found none")
    indexer = () if index else ("index_n_heads", "index_head_dim")
    config = _same(config, n_routed_experts="num_local_experts")
    if index:
        config = _same(config, n_routed_experts="num_experts")
    sizes = _known(config, DeepseekConfig, indexer, rope=_rope(config), index_topk=index)
    dense = min(sizes.first_k_dense_replace, sizes.num_hidden_layers)
    _require(config, {
        "mlp_layer_types": (["dense"] * dense + ["sparse"] * (sizes.num_hidden_layers - dense), None),
        "layer_types": (["indexed_attention" if index else "full_attention"] * sizes.num_hidden_layers, None),
    })
    _groups_fit(sizes)
    if index:
        _at_most("qk_rope_head_dim", sizes.qk_rope_head_dim, sizes.index_head_dim, "the indexer's heads")
    return Published(lambda: Deepseek(sizes), lambda name: deepseek_target(name, sizes.num_hidden_layers))


def _groups_fit(sizes: DeepseekConfig) -> None:
    experts, groups = sizes.n_routed_experts, sizes.n_group
    _divides("n_group", groups, experts, "the experts")
    if groups > 1:
        _at_most("n_group", groups, experts // 2, "two experts in each")
    _at_most("topk_group", sizes.topk_group, groups, "the groups")
    _at_most("num_experts_per_tok", sizes.num_experts_per_tok, experts // groups * sizes.topk_group,
             "the experts of the groups that are left")


def _longcat(config: Mapping[str, Any]) -> Published:
    _require(config, _PLAIN_MLA | {
        "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "router_bias": False,
        "norm_topk_prob": (False, None), "zero_expert_type": "identity",
    })
    _latent(config)
    config = _same(config, n_routed_experts="num_local_experts", moe_topk="num_experts_per_tok",
                   ffn_hidden_size="intermediate_size", expert_ffn_hidden_size="moe_intermediate_size")
    sizes = _known(config, LongcatConfig, (), rope=_rope(config))
    _require(config, {"qk_head_dim": (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim, None),
                      "num_hidden_layers": (2 * sizes.num_layers, sizes.num_layers, None)})
    _at_most("moe_topk", sizes.moe_topk, sizes.n_routed_experts + sizes.zero_expert_num, "all experts")
    return Published(lambda: Longcat(sizes), lambda name: longcat_target(name, sizes.n_routed_experts))


_MLP = ("intermediate_size",)
_MIXTURE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
"""What a Qwen with experts in every layer, and a dense one, have no use for."""


def _qwen(config: Mapping[str, Any], **own: Any) -> Published:
    _require(config, {"use_sliding_window": False, "hidden_act": "silu", "mlp_only_layers": ([], None),
                      "decoder_sparse_step": 1})
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise PublishedConfigError("layer_types: expected full_attention in every layer, found sliding windows")
    if config.get("head_dim") is None and config.get("hidden_size") and config.get("num_attention_heads"):
        if config["model_type"] == "qwen3":  # transformers takes 128 then, whatever the other sizes are
            raise PublishedConfigError("head_dim: expected the size of a head, found none")
        own["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] == "qwen3_moe":
        config = _same(config, num_experts="num_local_experts")  # how transformers writes it since version 5
        optional: tuple[str, ...] = _MIXTURE if config.get("num_experts") == 0 else _MLP
    else:
        own["num_experts"], optional = 0, _MIXTURE
    sizes = _known(config, QwenConfig, {"tie_word_embeddings", *optional}, rope=_rope(config), **own)
    _divides("num_key_value_heads", sizes.num_key_value_heads, sizes.num_attention_heads, "the heads")
    if sizes.num_experts:
        _at_most("num_experts_per_tok", sizes.num_experts_per_tok, sizes.num_experts, "the experts")
    return Published(lambda: Qwen(sizes), lambda name: name)


def _qwen2(config: Mapping[str, Any]) -> Published:
    return _qwen(config, attention_bias=True, qk_norm=False)


def _qwen3(config: Mapping[str, Any]) -> Published:
    _require(config, {"attention_bias": False})
    return _qwen(config, attention_bias=False, qk_norm=True)


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Published]] = {
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "longcat_flash": _longcat,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3,
}
