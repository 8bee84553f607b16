"""A small config of every family: a line a family, by the names of `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
BASE: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
    **_SPECIAL,
}
_HEADS = {**BASE, "head_dim": 16}
_NEOX = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
_GPT = {
    **{"vocab_size": 96, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 160},
    **_SPECIAL,
}
_FALCON = {key: value for key, value in _NEOX.items() if key != "intermediate_size"}
_EVERY_SECOND = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
_TOP2 = {**BASE, "num_experts_per_tok": 2}
_MOE = {**_TOP2, "moe_intermediate_size": 48}
_FOUR, _LOCAL = {"num_experts": 4}, {"num_local_experts": 4}
_ROUTED = {
    **_MOE,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
_HALF = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}
_MSCALES = {
    **{"rope_type": "longrope", "rope_theta": 1e6, "original_max_position_embeddings": 160},
    **{"short_factor": [1.5] * 8, "long_factor": [3.0] * 8},
    **{"short_mscale": 1.2, "long_mscale": 1.3},
}
_GEMMA4 = {
    **_HEADS,
    **_EVERY_SECOND,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "sliding_attention": _ROPE,
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LINEAR = {
    **_HEADS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}
_BLOCKS = {  # their lists say how many layers there are
    **{key: _HEADS[key] for key in _HEADS if key != "num_hidden_layers"},
    **{"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2},
    # transformers applies it to prompts and not to new tokens
    **{"chunk_size": 16, "time_step_min": 1e-30},
}
_SHORT = {**BASE, "layer_types": ["conv", "full_attention"] * 2}

FAMILY_CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {**BASE, "attention_bias": True, "mlp_bias": True},
    "mistral": {**_HEADS, "sliding_window": 8},
    "ministral": {**_HEADS, "sliding_window": 8},
    "ministral3": {
        **_HEADS,
        "rope_parameters": {
            **_ROPE,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 8,
        },
    },
    "qwen2": {**BASE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {**_HEADS, "attention_bias": True},
    "gpt2": {**_GPT},
    "gemma": {**_HEADS, "tie_word_embeddings": True},
    "gemma2": {
        **_HEADS,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**_HEADS, **_EVERY_SECOND, "query_pre_attn_scalar": 24},
    "gemma4_text": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
    },
    "vaultgemma": {
        **_HEADS,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "phi": {**BASE, **_HALF},
    "phi3": {**BASE, "sliding_window": 8},
    "olmo": {**BASE, "attention_bias": True},
    "olmo2": {**BASE},
    "olmo3": {**BASE, "sliding_window": 8},
    "granite": {**BASE, **_GRANITE, "attention_bias": True},
    "granitemoehybrid": {
        **{**_TOP2, **_LOCAL, **_GRANITE, "layer_types": ["mamba", "attention"] * 2},
        **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 24},
        **{"shared_intermediate_size": 48, "mamba_proj_bias": True, "mamba_chunk_size": 16},
    },
    "cohere": {**BASE, "use_qk_norm": True, "tie_word_embeddings": True},
    "cohere2": {**BASE, **_EVERY_SECOND, "logit_scale": 0.3},
    "glm": {**_HEADS, **_HALF},
    "glm4": {**_HEADS, **_HALF},
    "smollm3": {**BASE, "no_rope_layer_interval": 2},
    "exaone4": {**BASE, "sliding_window": 8, "sliding_window_pattern": 2},
    "seed_oss": {**_HEADS, "attention_out_bias": True},
    "stablelm": {**BASE, **_HALF, "use_qkv_bias": True},
    "starcoder2": {**BASE, "sliding_window": 8},
    "nemotron": {**_HEADS, **_HALF, "attention_bias": True},
    "helium": {**_HEADS},
    "ernie4_5": {**_HEADS, "use_bias": True},
    "arcee": {**_HEADS, "mlp_bias": True},
    "hunyuan_v1_dense": {**_HEADS},
    "cwm": {**_HEADS, "sliding_window": 8, "bos_token_id": 1, "eos_token_id": 2},
    "hyperclovax": {**_HEADS, **_GRANITE},
    "nanochat": {**BASE, "attention_bias": True},
    "apertus": {**BASE, "attention_bias": True},
    "jais2": {**_HEADS},
    "gpt_neox": {**_NEOX, **_HALF},
    "opt": {**_NEOX, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "gptj": {**_GPT, "rotary_dim": 8},
    "gpt_bigcode": {**_GPT},
    "falcon": {**_FALCON, "num_kv_heads": 4},
    "exaone": {
        **{key: it for key, it in _HEADS.items() if key != "num_hidden_layers"},
        **{"num_layers": 4, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
    },
    "internlm2": {**BASE, "bias": False},
    "internlm3": {**_HEADS, "bias": True, "qkv_bias": True},
    "minicpm": {**BASE, "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16},
    "mimo": {**_HEADS, "attention_bias": True},
    "mixtral": {**_TOP2, **_LOCAL, "sliding_window": 8},
    "phimoe": {
        **{**_TOP2, **_LOCAL, "attention_bias": True, "lm_head_bias": True, "sliding_window": 30},
        **{"router_jitter_noise": 0.2, "rope_parameters": _MSCALES},
    },
    "qwen2_moe": {**_MOE, **_FOUR, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_MOE, **_FOUR, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "olmoe": {**_TOP2, **_FOUR},
    "flex_olmo": {**_TOP2, **_FOUR, "norm_topk_prob": True},
    "gpt_oss": {**_TOP2, **_LOCAL, **_EVERY_SECOND, "head_dim": 16, "rope_parameters": _ROPE},
    "cohere2_moe": {
        **{**_TOP2, **_FOUR, **_EVERY_SECOND, "head_dim": 16, "num_shared_experts": 2},
        **{"mlp_layer_types": ["sparse", "dense"] * 2, "prefix_dense_intermediate_size": 80},
    },
    "mellum": {
        **{**_MOE, **_FOUR, **_EVERY_SECOND, "head_dim": 16},
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "rope_parameters": {"full_attention": _YARN, "sliding_attention": _ROPE},
    },
    "granite_swa": {
        **{**BASE, **_GRANITE, **_EVERY_SECOND, "attention_bias": True},
        **{"layer_rope_theta": [5000.0, 0, 300.0, 0]},
    },
    "granitemoe_swa": {
        **{**_TOP2, **_LOCAL, **_GRANITE, "shared_intermediate_size": 32, "sliding_window": 8},
        **{"layer_rope_theta": [0, 300.0, 0, 5000.0], "rope_parameters": _YARN},
    },
    "llama4_text": {
        **_HEADS,
        **{**_LOCAL, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2},
        **{"attention_chunk_size": 8, "no_rope_layer_interval": 2, "attention_bias": True},
        **{"floor_scale": 8, "attn_scale": 0.3, "rope_parameters": _ROPE},
    },
    "granitemoe": {**_TOP2, **_LOCAL, **_GRANITE},
    "granitemoeshared": {**_TOP2, **_LOCAL, **_GRANITE, "shared_intermediate_size": 32},
    "glm4_moe": {**_ROUTED, **_HALF, "use_qk_norm": True, "first_k_dense_replace": 1},
    "solar_open": {**_ROUTED, "head_dim": 16},
    "sarvam_moe": {
        **{**_MOE, "num_experts": 8, "num_shared_experts": 2, "use_qkv_bias": True},
        **{"head_dim": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    },
    "dots1": {**_ROUTED, "first_k_dense_replace": 1},
    "minimax_m2": {**_TOP2, **_LOCAL, "head_dim": 16},
    "ernie4_5_moe": {
        **BASE,
        "moe_intermediate_size": 48,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "exaone_moe": {
        **{**_MOE, **_FOUR, "head_dim": 16, "num_shared_experts": 1, "n_group": 2},
        **{"sliding_window": 8, "sliding_window_pattern": 2},
    },
    "hy_v3": {
        **{**_MOE, **_FOUR, "head_dim": 16, "num_shared_experts": 2, "attention_bias": True},
        **{"router_scaling_factor": 1.5, "mlp_layer_types": ["dense", "sparse"] * 2},
    },
    "afmoe": {
        **{**_MOE, **_FOUR, "head_dim": 16, "num_shared_experts": 1, "route_scale": 1.5},
        **{"sliding_window": 8, "global_attn_every_n_layers": 2, "mup_enabled": True},
    },
    "hunyuan_v1_moe": {**_HEADS, **_FOUR, "moe_topk": [2, 1, 2, 3]},
    "deepseek_v2": {
        **_ROUTED,
        **_LATENT,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "deepseek_v3": {
        **_ROUTED,
        **_LATENT,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "mlp_layer_types": ["dense", "sparse"] * 2},
    "sarvam_mla": {
        **{**_MOE, **_LATENT, "num_experts": 4, "num_shared_experts": 1, "q_lora_rank": None},
        "rope_parameters": {**_YARN, "rope_type": "deepseek_yarn", "mscale_all_dim": 1.0},
    },
    "mistral4": {
        **{**_ROUTED, **_LATENT, "first_k_dense_replace": 1},
        "rope_parameters": {
            **{**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3},
            "original_max_position_embeddings": 8,
        },
    },
    "youtu": {**BASE, **_LATENT},
    "minicpm3": {**BASE, **_LATENT, "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 16},
    "qwen3_next": {
        **_LINEAR,
        **_MOE,
        **_FOUR,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "qwen3_5_text": {**_LINEAR, "attention_bias": True},
    "qwen3_5_moe_text": {**_LINEAR, **_MOE, **_FOUR, "shared_expert_intermediate_size": 32},
    "bamba": {
        **{**BASE, "attn_layer_indices": [1, 3], "attention_bias": True, "mlp_bias": True},
        # with more groups than one, transformers 5.17 normalizes all of them together
        **{"mamba_n_heads": 4, "mamba_d_state": 24, "mamba_chunk_size": 16},
    },
    "nemotron_h": {
        **{**_BLOCKS, "layers_block_type": ["attention", "moe", "mamba", "mlp"]},
        **{"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40},
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    },
    "lfm2": {**_SHORT, "conv_bias": True, "block_multiple_of": 32},
    "lfm2_moe": {**_SHORT, **_MOE, **_FOUR, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
}
# other properties of the same families
VARIANTS: Mapping[str, dict[str, Any]] = {
    "gemma4_text small": {
        **_GEMMA4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_activation": "silu",
    },
    "gemma4_text experts": {
        **_GEMMA4,
        **{"enable_moe_block": True, "moe_intermediate_size": 48, "top_k_experts": 2, **_FOUR},
    },
    "llama4_text listed": {
        **_HEADS,
        **{"num_hidden_layers": 2, "moe_layers": [0], "no_rope_layers": [1, 0]},
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "use_qk_norm": False},
        **{"intermediate_size_mlp": 64, "attn_temperature_tuning": False},
        **{"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 8},
        "rope_parameters": _ROPE,
    },
    "stablelm parallel": {**BASE, "use_parallel_residual": True},
    "stablelm norms": {**BASE, **_HALF, "qk_layernorm": True, "use_parallel_residual": True},
    "phi norms": {**BASE, **_HALF, "qk_layernorm": True},
    "gpt_neox sequential": {**_NEOX, "use_parallel_residual": False},
    "gpt_bigcode heads": {**_GPT, "multi_query": False, "n_inner": 96},
    "falcon groups": {
        **{**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
        "ffn_hidden_size": 96,
    },
    "falcon 11B": {
        **{**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
        **{"num_ln_in_parallel_attn": 1, "tie_word_embeddings": True},
    },
    "falcon sequential": {
        **{**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
        "num_kv_heads": 4,
    },
    "deepseek_v2 greedy": {
        **_ROUTED,
        **_LATENT,
        "num_hidden_layers": 2,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    "deepseek_v3 in halves": {
        **_ROUTED,
        **_LATENT,
        "num_hidden_layers": 2,
        "rope_interleave": False,
    },
    "hunyuan_v1_dense alpha": {
        **_HEADS,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            **{"alpha": 20.0, "factor": 1.0},
        },
    },
    "qwen3_moe windows": {**_MOE, **_FOUR, "use_sliding_window": True, "sliding_window": 8},
    "dots1 windows": {**_ROUTED, "sliding_window": 8, "max_window_layers": 2},
    "cohere2_moe summed": {
        **{**_TOP2, **_FOUR, **_EVERY_SECOND, "head_dim": 16, "num_shared_experts": 1},
        **{"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"},
        **{"rms_norm_eps": 1e-5, "prefix_dense_sliding_window_pattern": 2, "logit_scale": 0.3},
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    },
    "olmo clipped": {**BASE, "clip_qkv": 0.7},
    "phi tied": {**BASE, **_HALF, "tie_word_embeddings": True},
    "ernie4_5_moe biased": {
        **{**BASE, "moe_intermediate_size": 48, "moe_num_experts": 4, "moe_k": 2},
        **{"use_bias": True, "tie_word_embeddings": True},
    },
    "lfm2_moe plain": {
        **{**_SHORT, **_MOE, **_FOUR, "num_dense_layers": 0, "use_expert_bias": False},
        **{"norm_topk_prob": False, "conv_L_cache": 4, "tie_word_embeddings": True},
    },
    "granitemoehybrid attention": {
        **BASE,
        **_GRANITE,
        **{"num_local_experts": 0, "shared_intermediate_size": 80, "num_experts_per_tok": 0},
        **{"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
        **{"mamba_n_heads": 8, "mamba_d_head": 16, "attention_bias": True},
    },
    "granitemoehybrid dense": {
        **{**BASE, **_GRANITE, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
        **{"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 3, "mamba_conv_bias": False},
        **{"shared_intermediate_size": 48, "num_local_experts": 0, "num_experts_per_tok": 0},
    },
    "nemotron_h dense": {
        **{**_BLOCKS, "hybrid_override_pattern": "M*M-", "use_bias": True},
        **{"mlp_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    },
    "nemotron_h latents": {
        **{**_BLOCKS, "hybrid_override_pattern": "E*MM", "moe_latent_size": 32},
        **{"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40},
        **{"n_routed_experts": 6, "norm_topk_prob": False, "mlp_bias": True},
    },
    "smollm3 tied": {**BASE, "tie_word_embeddings": True},
}


_OF_LAYERS = ("layer_types", "mlp_layer_types", "moe_topk", "layer_rope_theta")
_FACTORS = ("short_factor", "long_factor")


def _widened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return two layers of the config, with heads of 32 dimensions, for kernels of devices."""
    sizes: dict[str, Any] = {
        **{"num_attention_heads": 2, "n_head": 2, "num_key_value_heads": 1, "head_dim": 32},
        "num_kv_heads": 2,
        **{"num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "max_window_layers": 1},
        **{it: config[it][:2] for it in _OF_LAYERS if it in config},
        "global_head_dim": 64,
    }
    if "kv_lora_rank" in config:  # each head has keys of its own
        sizes["num_key_value_heads"] = 2
    if "short_factor" in (rope := config.get("rope_parameters", {})):  # of more pairs
        sizes["rope_parameters"] = {**rope, **{it: 2 * rope[it] for it in _FACTORS}}
    if config.get("num_kv_shared_layers"):  # the other layers must be of both types
        sizes = {key: sizes[key] for key in sizes if "head" in key}
    return {**config, **{name: own for name, own in sizes.items() if name in config}}


WIDE: Mapping[str, dict[str, Any]] = {
    f"{name} wide": _widened(config) for name, config in {**FAMILY_CONFIGS, **VARIANTS}.items()
}
