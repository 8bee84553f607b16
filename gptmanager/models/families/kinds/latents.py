"""Families with multi-head latent attention, as DeepSeek V2 introduced it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.base import PLAIN, llama_fields
from gptmanager.models.families.family import Family
from gptmanager.models.families.names import EXPERTS, IN_ONE, SHARED, layer_names, llama_names
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import RANGE, Fields, is_positive
from gptmanager.models.spec import Experts, Latent

_LATENTS = {
    "q": None,
    "k": None,
    "v": None,
    "q_norm": None,
    "k_norm": None,
    "query_latent": "self_attn.q_a_proj",
    "query_latent_norm": "self_attn.q_a_layernorm",
    "query": "self_attn.q_b_proj",
    "direct_query": "self_attn.q_proj",
    "kv_latent": "self_attn.kv_a_proj_with_mqa",
    "kv_latent_norm": "self_attn.kv_a_layernorm",
    "latent_up": "self_attn.kv_b_proj",
}
# the matrix `kv_b_proj`, split by heads: in GGUF files, and as MLX writes it
_LATENT_HEADS = {
    "latent_keys": "self_attn.k_b_proj.{}",
    "latent_values": "self_attn.v_b_proj.{}",
    "stacked_keys": "self_attn.embed_q",
    "stacked_values": "self_attn.unembed_out",
}
_FIELDS = {
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def _attention(fields: Fields, layer: int, value_dim: int | None = None) -> Mapping[str, Any]:
    """Return further fields of a layer's `Attention`. `value_dim`: used if a config has none."""
    readers.as_many_kv_heads(fields, layer)
    rope_dim = fields.size("head_dim")
    fields.note_read("qk_head_dim", "q_head_dim")
    latent = Latent(
        rank=fields.size("kv_lora_rank"),
        query_rank=0 if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        key_dim=fields.size("qk_nope_head_dim"),
        value_dim=fields.size("v_head_dim", value_dim),
        bias=fields.flag("attention_bias"),
    )
    return {
        "num_kv_heads": 1,
        "head_dim": rope_dim + latent.rank,
        "rope_dim": rope_dim,
        "latent": latent,
        "scale": (latent.key_dim + rope_dim) ** -0.5 * _yarn_scale(fields),
    }


def _mistral_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    return {**_attention(fields, layer), **readers.query_temperature(fields, layer)}


def _yarn_scale(fields: Fields) -> float:
    """Return the factor by which YaRN's `mscale_all_dim` scales the attention scores."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    own = Fields(rope if isinstance(rope, Mapping) else {}, {}, {}, "config.json: rope_parameters.")
    temperature, factor = own.number_or_zero("mscale_all_dim"), own.number("factor", 1.0)
    kind = own.get("rope_type") or own.get("type") or "default"
    if not temperature or kind == "default" or factor <= 1:
        return 1.0
    scale = (0.1 * temperature * math.log(factor) + 1.0) ** 2
    if not is_positive(scale):
        raise own.error("mscale_all_dim", f"scales attention by {scale:g}; it must be {RANGE}")
    return float(scale)


_GREEDY = experts_of(
    "n_routed_experts",
    renormalize=False,
    group_score="best",
    num_shared="n_shared_experts",
    is_dense=readers.first_layers_dense,
)


def _v2_experts(fields: Fields, layer: int) -> tuple[Experts, int] | None:
    """Return the experts of a DeepSeek V2 layer and the width of an expert; None if it is dense.

    If `topk_method` is "greedy", all experts are in one group.
    """
    method, found = fields.get("topk_method"), _GREEDY(fields, layer)
    if fields.get("norm_topk_prob") not in (None, False):
        raise fields.error(
            "norm_topk_prob",
            "must be false: DeepSeek's own code divides the weights of a token's experts by their "
            "sum, and transformers does not",
        )
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", "must be 'greedy' or 'group_limited_greedy'")
    if found is None or method == "group_limited_greedy":
        return found
    routing = found[0].routing._replace(groups=1, top_groups=1)
    return replace(found[0], routing=routing), found[1]


def _corrected(is_dense: Callable[[Fields, int], bool]) -> readers.ReadExperts:
    return experts_of(
        "n_routed_experts",
        score="sigmoid",
        correction=True,
        num_shared="n_shared_experts",
        is_dense=is_dense,
    )


def _minicpm_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    heads = fields.size("num_attention_heads")
    return _attention(fields, layer, fields.size("hidden_size") // heads)


_V2 = replace(
    PLAIN,
    title="DeepSeek V2",
    tensors=llama_names(**_LATENTS, **EXPERTS, **SHARED),
    other_tensors=layer_names(**_LATENT_HEADS, **IN_ONE),
    spellings={**PLAIN.spellings, "head_dim": "qk_rope_head_dim"},
    defaults=llama_fields(
        **_FIELDS,
        attention_bias=False,
        mlp_bias=False,
        n_routed_experts=64,
        n_shared_experts=2,
        n_group=None,
        topk_group=None,
        moe_intermediate_size=1407,
        routed_scaling_factor=1.0,
        first_k_dense_replace=0,
        topk_method="greedy",
    ),
    interleaved=True,
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    neutral={
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
        "seq_aux": True,
    },
    attention=_attention,
    experts=_v2_experts,
)
_V3 = replace(
    _V2,
    title="DeepSeek V3, R1",
    tensors=llama_names(
        **_LATENTS, **EXPERTS, **SHARED, correction="mlp.gate.e_score_correction_bias"
    ),
    defaults=llama_fields(
        **_FIELDS,
        max_position_embeddings=4096,
        attention_bias=False,
        rope_interleave=True,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
        norm_topk_prob=True,
    ),
    interleaved="rope_interleave",
    mlp_bias=False,
    neutral={
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "seq_aux": True,
    },
    experts=_corrected(readers.first_layers_dense),
)
LATENTS: Mapping[str, Family] = {
    "deepseek_v2": _V2,
    "deepseek_v3": _V3,
    "glm4_moe_lite": replace(
        _V3,
        title="GLM-4.7-Flash",
        defaults={
            **_V3.defaults,
            "norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        },
        experts=_corrected(readers.listed_layers_dense),
    ),
    "sarvam_mla": replace(
        _V3,
        title="Sarvam 105B",
        spellings={
            **_V3.spellings,
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
        },
        defaults={
            **_V3.defaults,
            "q_lora_rank": None,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "mistral4": replace(
        _V3,
        title="Mistral 4",
        tensors=_V2.tensors,
        defaults={
            **_V3.defaults,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "max_position_embeddings": 1048576,
            "partial_rotary_factor": None,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        attention=_mistral_attention,
        experts=experts_of(
            "n_routed_experts",
            num_shared="n_shared_experts",
            is_dense=readers.first_layers_dense,
        ),
    ),
    "youtu": replace(
        _V3,
        title="Youtu-LLM",
        tensors=llama_names(**_LATENTS),
        other_tensors=layer_names(**_LATENT_HEADS),
        defaults=llama_fields(
            **_FIELDS,
            max_position_embeddings=131072,
            num_key_value_heads=16,
            attention_bias=False,
            rope_interleave=True,
            tie_word_embeddings=True,
        ),
        neutral={},
        experts=None,
    ),
    "minicpm3": replace(
        PLAIN,
        title="MiniCPM 3",
        tensors=llama_names(**_LATENTS),
        other_tensors=layer_names(**_LATENT_HEADS),
        spellings=_V2.spellings,
        defaults=llama_fields(
            norm_eps=1e-5,
            max_position_embeddings=32768,
            num_key_value_heads=40,
            head_dim=32,
            kv_lora_rank=256,
            q_lora_rank=768,
            qk_nope_head_dim=64,
            v_head_dim=None,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=True,
            scale_emb=12.0,
            scale_depth=1.4,
            dim_model_base=256,
        ),
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        network=readers.minicpm_scales,
        attention=_minicpm_attention,
    ),
}
