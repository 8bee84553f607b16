"""Functions for `Architecture.further`: config fields that depend on several keys of a file."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from gptmanager.models.gguf.architecture import Config
from gptmanager.models.gguf.metadata import Metadata

Names = Collection[str]
_LEAST_SCALE = 1e-9
KV_HEADS = "attention.head_count_kv"


def without_further_layers(metadata: Metadata, prefix: str, _: Names, config: Config) -> Config:
    """Return the number of normal layers, and the number of layers for multi-token prediction."""
    num_further = metadata.integer(f"{prefix}nextn_predict_layers") or 0
    layers = config.get("num_hidden_layers")
    if not num_further or not isinstance(layers, int):
        return {}
    if not 0 < num_further < layers:
        raise metadata.error(f"{prefix}nextn_predict_layers", f"must be 1 to {layers - 1}")
    return {
        "num_hidden_layers": layers - num_further,
        "num_nextn_predict_layers": num_further,
    }


def layers_with_keys(metadata: Metadata, prefix: str, other: str) -> Config:
    """Return the number of KV heads, and `layer_types` of layers with attention or of type `other`.

    A file has a number for each layer, which is 0 for the layers without keys and values.
    """
    key = f"{prefix}{KV_HEADS}"
    counts = metadata.numbers(key, metadata.integer(f"{prefix}block_count") or 0)
    heads = {*counts} - {0}
    if len(heads) != 1:
        raise metadata.error(key, "must have the same number for all layers with attention")
    return {
        "num_key_value_heads": heads.pop(),
        "layer_types": ["full_attention" if count else other for count in counts],
    }


def gpt_oss_rope(_: Metadata, __: str, ___: Names, config: Config) -> Config:
    """Return the yarn scaling with `truncate` false, as in the training of gpt-oss."""
    scaling = config.get("rope_scaling")
    return {} if scaling is None else {"rope_scaling": {**scaling, "truncate": False}}


def ministral_rope(metadata: Metadata, prefix: str, _: Names, config: Config) -> Config:
    """Return the yarn scaling with its factors for attention scores and for queries."""
    scaling = config.get("rope_scaling")
    if scaling is None:
        return {}
    multiplier = metadata.plain(f"{prefix}rope.scaling.yarn_log_multiplier")
    own = {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
    beta = metadata.plain(f"{prefix}attention.temperature_scale")
    return {"rope_scaling": {**scaling, **own, "llama_4_scaling_beta": beta}}


def minicpm_scales(metadata: Metadata, prefix: str, _: Names, config: Config) -> Config:
    """Return MiniCPM's numbers from the scales in a file. The first files do not have scales."""
    keys = "embedding_scale", "residual_scale", "logit_scale"
    scale, residual, logits = (metadata.plain(prefix + key) for key in keys)
    hidden, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    if isinstance(residual, float) and isinstance(layers, int) and layers > 0:
        residual = round(residual * layers**0.5, 6)
    if isinstance(logits, float) and isinstance(hidden, int) and logits > _LEAST_SCALE:
        logits = round(hidden / logits)
    return {
        "scale_emb": 12.0 if scale is None else scale,
        "scale_depth": 1.4 if residual is None else residual,
        "dim_model_base": 256 if logits is None else logits,
    }


def check_xielu(metadata: Metadata, _: str, __: Names, config: Config) -> Config:
    """Raise ConfigError for xIELU with other constants than those of transformers."""
    layers = config.get("num_hidden_layers")
    for key, value in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        found = metadata.numbers(key, layers if isinstance(layers, int) else 0)
        # the converter reads numbers of bfloat16
        if not all(math.isclose(it, value, rel_tol=2**-8) for it in found):
            raise metadata.error(key, f"must be {value} in all layers")
    return {}


def minicpm3_fields(metadata: Metadata, prefix: str, _: Names, config: Config) -> Config:
    """Return the elements of a head's query and key that do not rotate."""
    key, rotated = metadata.integer(f"{prefix}attention.key_length"), config.get("qk_rope_head_dim")
    if key is None or not isinstance(rotated, int):
        return {}
    return {"qk_nope_head_dim": key - rotated}


def deepseek_fields(metadata: Metadata, prefix: str, names: Names, config: Config) -> Config:
    """Return the sizes of a head, the routing method, and the yarn scaling with its `mscale`.

    In files from before April 2025, `attention.key_length` and `attention.value_length` are the
    sizes of the heads that the latent expands to. In later files they are the sizes of the latent,
    and the same keys with `_mla` are the sizes of the heads.
    """

    def size(key: str) -> Any:
        expanded = metadata.integer(f"{prefix}attention.{key}_mla")
        return metadata.integer(f"{prefix}attention.{key}") if expanded is None else expanded

    found: dict[str, Any] = {"v_head_dim": size("value_length")}
    key, rotated = size("key_length"), config.get("qk_rope_head_dim")
    if key is not None and isinstance(rotated, int):
        found["qk_nope_head_dim"] = key - rotated
    found["q_lora_rank"] = config.get("q_lora_rank")
    found["n_routed_experts"] = config.get("n_routed_experts")  # Youtu-LLM has none
    if config["model_type"] == "deepseek_v2":
        is_limited = config.get("n_group") not in (None, 0, 1)
        found["topk_method"] = "group_limited_greedy" if is_limited else "greedy"
    scaling = config.get("rope_scaling")
    multiplier = metadata.plain(f"{prefix}rope.scaling.yarn_log_multiplier")
    if scaling is not None and isinstance(multiplier, float) and multiplier:
        # llama.cpp's converter writes one number, mscale_all_dim / 10; mscale is taken to be equal.
        both = dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier * 10, 6))
        found["rope_scaling"] = {**scaling, **both}
    return {**found, **without_further_layers(metadata, prefix, names, config)}


def windowed_ropes(metadata: Metadata, prefix: str, _: Names, config: Config) -> Config:
    """Return the RoPE parameters of both kinds of layers: a window rules out a scaling."""
    theta = config.get("rope_theta")
    local = metadata.plain(f"{prefix}rope.freq_base_swa")
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return {
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": theta if local is None else local,
            },
        },
    }


def granite_window_ropes(metadata: Metadata, prefix: str, _: Names, config: Config) -> Config:
    """Return the base of RoPE in each layer, 0 for a layer without it."""
    layers, key = config.get("num_hidden_layers"), f"{prefix}attention.rope_pattern"
    if key not in metadata or not isinstance(layers, int):
        return {}
    theta = config.get("rope_theta")
    return {"layer_rope_theta": [theta if it else 0 for it in metadata.numbers(key, layers)]}


def hunyuan3_fields(metadata: Metadata, prefix: str, names: Names, config: Config) -> Config:
    """Return the number of shared experts, and which layers are dense: those without a router."""
    found = without_further_layers(metadata, prefix, names, config)
    layers = found.get("num_hidden_layers", config.get("num_hidden_layers"))
    key = f"{prefix}expert_shared_feed_forward_length"
    shared, width = metadata.integer(key) or 0, config.get("moe_intermediate_size")
    if not isinstance(width, int) or width < 1 or shared % width or not isinstance(layers, int):
        raise metadata.error(key, f"must be a multiple of {prefix}expert_feed_forward_length")
    is_sparse = (f"blk.{layer}.ffn_gate_inp.weight" in names for layer in range(layers))
    types = ["sparse" if it else "dense" for it in is_sparse]
    return {**found, "num_shared_experts": shared // width, "mlp_layer_types": types}


def cohere_moe_fields(metadata: Metadata, prefix: str, names: Names, config: Config) -> Config:
    """Return the score of experts; a file without one has llama.cpp's, the sigmoid."""
    key = f"{prefix}expert_gating_func"
    given = metadata.integer(key)
    if given not in (None, 1, 2):
        raise metadata.error(key, "must be 1 or 2")
    score = "softmax" if given == 1 else "sigmoid"
    found = without_further_layers(metadata, prefix, names, config)
    return {**found, "expert_selection_fn": score}


def mistral4_fields(metadata: Metadata, prefix: str, names: Names, config: Config) -> Config:
    """Return the fields of DeepSeek, and the temperature of queries if the file has one."""
    found = dict(deepseek_fields(metadata, prefix, names, config))
    scale, length = (
        metadata.plain(f"{prefix}attention.temperature_{it}") for it in ("scale", "length")
    )
    scaling = found.get("rope_scaling", config.get("rope_scaling"))
    if not scale or scaling is None:
        return found
    if length not in (None, scaling.get("original_max_position_embeddings")):
        need = f"must equal {prefix}rope.scaling.original_context_length"
        raise metadata.error(f"{prefix}attention.temperature_length", need)
    return {**found, "rope_scaling": {**scaling, "llama_4_scaling_beta": scale}}


def llama4_fields(_: Metadata, __: str, ___: Names, config: Config) -> Config:
    """Return whether attention has norms, which a file does not say.

    Like llama.cpp, this function knows the one model without them by its 128 experts. The other
    fields that a file does not have are the same in all models: chunks of 8192 tokens, no RoPE in
    every fourth layer.
    """
    return {"use_qk_norm": config.get("num_local_experts") != 128}


def gemma4_fields(metadata: Metadata, prefix: str, names: Names, config: Config) -> Config:
    """Return the KV heads, MLP widths and RoPE parameters, each for two kinds of layers.

    KV heads and RoPE parameters differ between full and sliding attention. Layers that share the
    keys and values of earlier layers may have a wider MLP.
    """
    types, shared = config.get("layer_types"), config.get("num_kv_shared_layers")
    if not isinstance(types, list) or "full_attention" not in types or not isinstance(shared, int):
        need = "must be an array of booleans, with false for at least one layer"
        raise metadata.error(f"{prefix}attention.sliding_window_pattern", need)
    is_full = [kind == "full_attention" for kind in types]
    is_shared = [layer >= len(types) - shared for layer in range(len(types))]
    windowed, full = _two(metadata, f"{prefix}attention.head_count_kv", is_full)
    width, wide = _two(metadata, f"{prefix}feed_forward_length", is_shared)
    if wide not in (width, 2 * width):
        need = "must be equal or twice as large in layers that share keys and values"
        raise metadata.error(f"{prefix}feed_forward_length", need)
    factors = (config.get("rope_scaling") or {}).get("long_factor", [1.0])
    # A pair of dimensions with the factor 1e30 does not rotate.
    rotated = sum(factor == 1 for factor in factors) / len(factors)
    theta = config.get("rope_theta")
    return {
        "num_key_value_heads": windowed,
        "num_global_key_value_heads": None if full == windowed else full,
        "attention_k_eq_v": f"blk.{is_full.index(True)}.attn_v.weight" not in names,
        "intermediate_size": width,
        "use_double_wide_mlp": wide != width,
        "vocab_size_per_layer_input": config.get("vocab_size"),
        "rope_scaling": None,
        "original_max_position_embeddings": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": rotated,
                "rope_theta": theta,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.plain(f"{prefix}rope.freq_base_swa") or theta,
            },
        },
    }


def _two(metadata: Metadata, key: str, is_second: Sequence[bool]) -> tuple[Any, Any]:
    """Return two values of `key`: for layers with `is_second` False, and for the other layers.

    Raises ConfigError if the values of one kind of layers differ.
    """
    given = metadata.plain(key)
    values = given if isinstance(given, list) else [given] * len(is_second)
    if len(values) == len(is_second) and all(isinstance(value, int) for value in values):
        pairs = {*zip(is_second, values, strict=True)}
        found = [[value for second, value in pairs if second == kind] for kind in (False, True)]
        if all(len(kind) <= 1 for kind in found):
            first, second = (next(iter(kind), values[0]) for kind in found)
            return first, second
    raise metadata.error(key, "must be one number for all layers of a kind")
