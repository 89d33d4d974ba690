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
    return cls(**given)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Angles as `parts.Rotary` takes them, from both spellings: ``rope_parameters``, or ``rope_theta`` and scaling."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = given.get("rope_type", given.get("type", "default"))
    rope: dict[str, Any] = {"theta": given.get("rope_theta", config.get("rope_theta"))}
    if rope["theta"] is None:  # families differ in what it is then
        raise PublishedConfigError("rope_theta: expected the base of the angles, found none")
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
    sizes = _known(config, DeepseekConfig, indexer, rope=_rope(config), index_topk=index)
    return Published(lambda: Deepseek(sizes), lambda name: deepseek_target(name, sizes.num_hidden_layers))


def _longcat(config: Mapping[str, Any]) -> Published:
    _require(config, _PLAIN_MLA | {
        "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "router_bias": False,
        "norm_topk_prob": (False, None), "zero_expert_type": "identity",
    })
    _latent(config)
    sizes = _known(config, LongcatConfig, (), rope=_rope(config))
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
        own["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if "num_local_experts" in config:  # how transformers writes num_experts since version 5
        own["num_experts"] = config["num_local_experts"]
    optional = {"tie_word_embeddings", *(_MLP if config["model_type"] == "qwen3_moe" else _MIXTURE)}
    sizes = _known(config, QwenConfig, optional, rope=_rope(config), **own)
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
