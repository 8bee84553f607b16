"""Configs of every family with one odd field, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from family_configs import FAMILY_CONFIGS, VARIANTS

from gptmanager.models.families import FAMILIES
from gptmanager.models.fields import names_of

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**8, 2**31 - 1, 2**31, 2**63, 10**400, 0.0, 0.5,
    2.0, -1.5, 1e308, 1e-308, 5e-324, float("nan"), float("inf"), "", "a", "L", "\ud800",
    "9" * 5000, [], [1], [[1]], [None] * 4, ["full_attention"] * 4, ["sliding_attention"] * 4,
    ["linear_attention"] * 4, [0.5] * 4, [{}] * 4, {}, {"a": 1}, {"9" * 5000: {}}, {"0": {}},
    {"rope_type": "yarn", "factor": 4}, {"rope_type": "llama3"}, {"type": "linear", "factor": -1},
    {"rope_type": "dynamic", "alpha": 1e30, "rope_theta": 1e30},
    {"full_attention": 3, "sliding_attention": 4},
]  # fmt: skip
_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    **{"attention_factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "alpha": 2.0},
    **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 0.5},
    **{"type": "default", "truncate": False, "llama_4_scaling_beta": 0.1},
}
_KINDS = ["default", "linear", "proportional", "llama3", "yarn", "longrope", "dynamic", "mrope"]
_OTHERS = ["layer_types", "head_dim", "sliding_window_pattern"]
_OTHERS += ["per_layer_config", "mlp_only_layers", "attn_type_list", "no_rope_layers"]
_OTHERS += ["layer_rope_theta", "mlp_layer_types"]


# Values that are almost never a sensible size or factor.
ODD_NUMBERS: list[Any] = [
    *(0, -1, 0.0, float("nan"), float("inf"), 2**31, 10**400),
    *("1", True, [1], None),
]  # fmt: skip
# An odd number -> the fields that it makes sense for, in every family that reads them.
_COUNTS = {
    *("first_k_dense_replace", "num_kv_shared_layers", "hidden_size_per_layer_input"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_dense_layers"),
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
    "moe_shared_expert_intermediate_size",
    *("moe_layer_start_index", "moe_layer_end_index"),
    *("max_window_layers", "pad_token_id"),
}
_ZERO_FACTORS = {"mscale", "mscale_all_dim", "llama_4_scaling_beta"}
_FACTORS = {
    *("rope_theta", "rotary_emb_base", "rope_local_base_freq", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier"),
    *("logits_scaling", "residual_multiplier", "attention_multiplier", "logit_scale"),
    *("routed_scaling_factor", "attn_scale", "factor", "attention_factor", "beta_fast", "alpha"),
    *("route_scale", "router_scaling_factor", "scale_emb", "scale_depth", "clip_qkv"),
    *("high_freq_factor", *_ZERO_FACTORS),
}
# null has a meaning: a default, or none of something
_OPTIONAL = {
    *(_COUNTS - {"first_k_dense_replace", "num_kv_shared_layers", "moe_layer_start_index"}),
    *("num_key_value_heads", "head_dim", "sliding_window", "sliding_window_pattern", "ffn_dim"),
    *("rope_theta", "rotary_emb_base", "rope_local_base_freq", "num_global_key_value_heads"),
    *("final_logit_softcapping", "attn_logit_softcapping", "word_embed_proj_dim", "q_lora_rank"),
    *("attention_chunk_size", "n_group", "topk_group", "routed_scaling_factor", "n_inner"),
    *("factor", "attention_factor", "beta_fast", "beta_slow", "partial_rotary_factor"),
    *("v_head_dim", "scale_depth", "dim_model_base", "block_ffn_dim_multiplier", "clip_qkv"),
    *("moe_latent_size", "attention_multiplier", "rms_norm_eps"),
    "prefix_dense_intermediate_size",
    *(
        "route_scale",
        "router_scaling_factor",
        "num_kv_heads",
        "ffn_hidden_size",
        "num_ln_in_parallel_attn",
    ),
    *_ZERO_FACTORS,
}
SENSIBLE: Mapping[str, set[str]] = {
    "0": {*_COUNTS, *_ZERO_FACTORS, "sliding_window"},  # a window that is not in use
    "0.0": _ZERO_FACTORS,
    "-1": {"moe_layer_end_index"},
    "2147483648": _FACTORS,
    "None": _OPTIONAL,
}
_PAIRS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
ROPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_type": "default", "rope_theta": 1e4}),
    ("phi", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    ("llama", {"rope_type": "llama3", **_SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("llama", {"rope_type": "longrope", **_SCALED, **_PAIRS, "attention_factor": 1.0}),
    ("llama", {"rope_type": "yarn", **_SCALED, "mscale": 1.0, "mscale_all_dim": 0.7}),
    ("phi3", {"rope_type": "yarn", **_SCALED, "beta_fast": 32.0, "beta_slow": 1.0}),
    ("deepseek_v3", {"rope_type": "yarn", **_SCALED, "mscale_all_dim": 1.0}),
    ("ministral3", {"rope_type": "yarn", **_SCALED, "llama_4_scaling_beta": 0.1}),
    ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    ("hunyuan_v1_dense", {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 2.0}),
]


def family_config(name: str) -> dict[str, Any]:
    return {"model_type": name.split(" ")[0], **{**FAMILY_CONFIGS, **VARIANTS}[name]}


def odd_configs(name: str, count: int) -> Iterator[dict[str, Any]]:
    """The config of a family, `count` times, each time with another odd field."""
    chance, config = random.Random(name), family_config(name)
    family = FAMILIES[config["model_type"]]
    fields = [
        *config,
        *(names_of(family.spellings, it)[0] for it in family.defaults),
        *family.neutral,
    ]
    fields += _OTHERS
    for _ in range(count):
        if chance.random() < 0.3:
            yield {**config, "rope_parameters": _odd_rope(config, chance)}
            continue
        field, value = chance.choice(fields), chance.choice(VALUES)
        known = config.get(field)
        if isinstance(known, list) and chance.random() < 0.5:
            value = chance.choice([known[1:], known * 2, [value, *known[1:]]])
        yield {**config, field: value}


def numeric_fields(name: str) -> list[str]:
    """The numeric fields of a family's config and those with a numeric default, by its names."""
    config = family_config(name)
    family = FAMILIES[config["model_type"]]
    defaults = {names_of(family.spellings, it)[0]: value for it, value in family.defaults.items()}
    known = {**defaults, **config}
    return [field for field in known if type(known[field]) in (int, float)]


def _odd_rope(config: Mapping[str, Any], chance: random.Random) -> Any:
    """The config's rope, or another one, with an odd field or with one that it does not have."""
    known = config.get("rope_parameters")
    if isinstance(known, dict) and any(isinstance(it, dict) for it in known.values()):
        kind = chance.choice([*known])
        return {**known, kind: _odd_rope({"rope_parameters": known[kind]}, chance)}
    names = chance.sample([*_ROPE], chance.choice((0, 1, 3, 6)))
    rope = {**(known or {}), **{name: _ROPE[name] for name in names}}
    if chance.random() < 0.7:
        rope["rope_type"] = chance.choice(_KINDS)
    return {**rope, chance.choice([*_ROPE]): chance.choice(VALUES)}
