"""Mixtures of experts that are chosen by scores with a learned correction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.base import BIASED_ATTENTION, FOUR_NORMS, PLAIN, llama_fields
from gptmanager.models.families.family import ROTARY_BUFFERS, Family
from gptmanager.models.families.kinds.llamas import LLAMAS
from gptmanager.models.families.layer_types import SLIDING
from gptmanager.models.families.names import (
    BLOCK,
    BLOCK_IN_ONE,
    EXPERTS,
    IN_ONE,
    SHARED,
    STACKED,
    SWITCHED_EXPERTS,
    layer_names,
    llama_names,
    tensor_names,
)
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Norms

_PREDICTORS = re.compile(rf"{ROTARY_BUFFERS.pattern}|^(model\.)?mtp[_.]")
_CORRECTED: Mapping[str, Any] = {"score": "sigmoid", "correction": True}
_GLM4_MOE = replace(
    BIASED_ATTENTION,
    title="GLM-4.5, 4.6",
    tensors=llama_names(**EXPERTS, **SHARED, correction="mlp.gate.e_score_correction_bias"),
    other_tensors=layer_names(**IN_ONE),
    defaults=llama_fields(
        norm_eps=1e-5,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        partial_rotary_factor=0.5,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    ),
    norms=Norms(query_key="head"),
    qk_norm="use_qk_norm",
    out_bias=False,
    experts=experts_of(
        "n_routed_experts",
        num_shared="n_shared_experts",
        is_dense=readers.first_layers_dense,
        **_CORRECTED,
    ),
)


def _exaone_dense(fields: Fields, layer: int) -> bool:
    """Return whether a layer is dense. `is_moe_layer`, which transformers ignores, must agree."""
    is_dense, given = readers.listed_layers_dense(fields, layer), fields.get("is_moe_layer")
    num_layers = fields.size("num_hidden_layers")
    is_list = isinstance(given, list) and len(given) == num_layers
    if given is not None and (not is_list or given[layer] is is_dense):
        raise fields.error("is_moe_layer", "must be true for each layer with experts, else false")
    return is_dense


def _trinity_scale(fields: Fields) -> Mapping[str, Any]:
    """Return the scale of Trinity's embeddings."""
    is_scaled = fields.flag("mup_enabled")
    return {"embedding_scale": fields.size("hidden_size") ** 0.5 if is_scaled else 1.0}


def _trinity_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return fields of the attention: all layers are gated, those without a window have no RoPE."""
    fields.size("sliding_window")  # without a window, transformers has no rule
    return {"gated": True, **({} if fields.layer_type(layer) == SLIDING else {"rope": None})}


CORRECTED_MIXTURES: Mapping[str, Family] = {
    "glm4_moe": _GLM4_MOE,
    "solar_open": replace(
        _GLM4_MOE,
        title="Solar Open",
        defaults={
            **_GLM4_MOE.defaults,
            "head_dim": 128,
            "intermediate_size": 1280,
            "rope_theta": 1e6,
            "partial_rotary_factor": 1.0,
            "moe_intermediate_size": 1280,
            "first_k_dense_replace": 0,
        },
        norms=Norms(),
    ),
    "sarvam_moe": replace(
        _GLM4_MOE,
        title="Sarvam 30B",
        tensors=tensor_names(
            "model.layers.{}.",
            embedding="model.word_embeddings",
            final_norm="model.norm",
            attention_norm="input_layernorm",
            qkv="attention.query_key_value",
            q_norm="attention.query_layernorm",
            k_norm="attention.key_layernorm",
            out="attention.dense",
            mlp_norm="post_attention_layernorm",
            correction="mlp.gate.expert_bias",
            **{**EXPERTS, **SHARED},
        ),
        other_tensors={  # the names in transformers
            **layer_names(**IN_ONE),
            **layer_names(**{it: f"self_attn.{it}_proj" for it in "qkv"}),
            **layer_names(
                q_norm="self_attn.q_norm",
                k_norm="self_attn.k_norm",
                out="self_attn.o_proj",
                correction="mlp.gate.e_score_correction_bias",
            ),
            "model.embed_tokens": ("embedding", None),
        },
        spellings={
            **_GLM4_MOE.spellings,
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "attention_bias": "use_qkv_bias",
        },
        defaults={
            **_GLM4_MOE.defaults,
            "norm_eps": 1e-6,
            "rope_theta": 8e6,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "partial_rotary_factor": 1.0,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    ),
    "dots1": replace(
        _GLM4_MOE,
        title="dots.llm1",
        other_tensors=layer_names(**SWITCHED_EXPERTS, **STACKED),
        defaults=llama_fields(
            norm_eps=1e-6,
            n_routed_experts=None,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            first_k_dense_replace=0,
            moe_intermediate_size=1408,
            use_sliding_window=True,
            sliding_window=4096,
            max_window_layers=62,
        ),
        qk_norm=True,
        out_bias="attention_bias",
        windows="some",
    ),
    "minimax_m2": replace(
        PLAIN,
        title="MiniMax-M2",
        tensors=llama_names(**BLOCK, correction="block_sparse_moe.e_score_correction_bias"),
        other_tensors=layer_names(**BLOCK_IN_ONE, correction="mlp.e_score_correction_bias"),
        defaults=llama_fields(
            rope_theta=5e6,
            max_position_embeddings=196608,
            num_key_value_heads=8,
            head_dim=128,
            rotary_dim=None,
            partial_rotary_factor=1.0,
            num_local_experts=256,
            num_experts_per_tok=8,
        ),
        norms=Norms(query_key="all_heads"),
        neutral={
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
        },
        network=readers.minimax_network,
        experts=experts_of(
            "num_local_experts",
            width="intermediate_size",
            score="sigmoid",
            renormalize=True,
            correction=True,
        ),
    ),
    "ernie4_5_moe": replace(
        LLAMAS["ernie4_5"],
        title="ERNIE 4.5 MoE",
        tensors=llama_names(
            **EXPERTS, **SHARED, correction_row="mlp.moe_statics.e_score_correction_bias"
        ),
        other_tensors=layer_names(
            **IN_ONE, correction_row="mlp.gate.moe_statics.e_score_correction_bias"
        ),
        defaults={
            **LLAMAS["ernie4_5"].defaults,
            "head_dim": None,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        head_bias="use_bias",
        neutral={"moe_norm_min": 1e-12},
        ignored=_PREDICTORS,
        experts=experts_of(
            "moe_num_experts",
            per_token="moe_k",
            renormalize=True,
            correction=True,
            num_shared="moe_num_shared_experts",
            is_dense=readers.ernie_dense,
        ),
    ),
    "exaone_moe": replace(
        LLAMAS["exaone4"],
        title="K-EXAONE",
        tensors=llama_names(**EXPERTS, **SHARED, correction="mlp.e_score_correction_bias"),
        other_tensors=layer_names(**IN_ONE, correction="mlp.gate.e_score_correction_bias"),
        ignored=_PREDICTORS,
        defaults={
            **LLAMAS["exaone4"].defaults,
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        norms=Norms(query_key="head"),
        experts=experts_of(
            "num_experts",
            num_shared="num_shared_experts",
            is_dense=_exaone_dense,
            **_CORRECTED,
        ),
    ),
    "hy_v3": replace(
        BIASED_ATTENTION,
        title="Hunyuan 3",
        tensors=llama_names(
            **{**EXPERTS, "router": "mlp.router.gate"},
            **{it: SHARED[it].replace("shared_experts", "shared_mlp") for it in SHARED},
            correction="mlp.expert_bias",
        ),
        other_tensors={
            **layer_names(**IN_ONE),
            **layer_names(router="mlp.gate"),
            **layer_names(correction="mlp.e_score_correction_bias"),
            **layer_names(**SHARED),
        },
        spellings={
            **BIASED_ATTENTION.spellings,
            "routed_scaling_factor": "router_scaling_factor",
        },
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=11158840.0,
            max_position_embeddings=131072,
            num_key_value_heads=8,
            head_dim=128,
            num_experts=192,
            num_experts_per_tok=8,
            num_shared_experts=1,
            moe_intermediate_size=1536,
            routed_scaling_factor=2.826,
            first_k_dense_replace=1,
        ),
        norms=Norms(query_key="head"),
        neutral={
            **{"mlp_bias": False, "qk_norm": True, "route_norm": True},
            "enable_moe_fp32_combine": (True, False),  # the order of arithmetic
        },
        experts=experts_of(
            "num_experts",
            renormalize=True,
            num_shared="num_shared_experts",
            is_dense=readers.listed_layers_dense,
            **_CORRECTED,
        ),
    ),
    "afmoe": replace(
        PLAIN,
        title="Arcee Trinity",
        tensors=llama_names(
            **{**EXPERTS, "router": "mlp.router.gate"},
            **SHARED,
            correction="mlp.expert_bias",
            query_gates="self_attn.gate_proj",
            attention_out_norm="post_attention_layernorm",
            mlp_norm="pre_mlp_layernorm",
            mlp_out_norm="post_mlp_layernorm",
        ),
        other_tensors=layer_names(**IN_ONE),
        spellings={
            **PLAIN.spellings,
            "sliding_window_pattern": "global_attn_every_n_layers",
            "first_k_dense_replace": "num_dense_layers",
            "routed_scaling_factor": "route_scale",
        },
        defaults=llama_fields(
            norm_eps=1e-5,
            max_position_embeddings=16384,
            head_dim=128,
            sliding_window=1024,
            sliding_window_pattern=4,
            mup_enabled=False,
            moe_intermediate_size=1408,
            num_experts=64,
            num_experts_per_tok=6,
            num_shared_experts=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.0,
        ),
        norms=replace(FOUR_NORMS, query_key="head"),
        windows="pattern",
        neutral={
            "attention_bias": False,
            "score_func": "sigmoid",
            "route_norm": True,
            "num_expert_groups": 1,
            "num_limited_groups": 1,
            "use_grouped_mm": True,
        },
        network=_trinity_scale,
        attention=_trinity_attention,
        experts=experts_of(
            "num_experts",
            renormalize=True,
            num_shared="num_shared_experts",
            is_dense=readers.first_layers_dense,
            **_CORRECTED,
        ),
    ),
}
