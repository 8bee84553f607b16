"""The model families with mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.base import (
    BIASED_ATTENTION,
    NORMS_AFTER_ONLY,
    PLAIN,
    llama_fields,
)
from gptmanager.models.families.family import ROTARY_BUFFERS, Family
from gptmanager.models.families.llama4 import LLAMA4
from gptmanager.models.families.llamas import LLAMAS
from gptmanager.models.families.names import (
    BY_EXPERT,
    DENSE,
    EXPERTS,
    IN_ONE,
    NORMS_AFTER,
    ONLY_EXPERTS,
    SHARED,
    SHARED_EXPERT,
    SHARED_HALVES,
    STACKED,
    SWITCHED,
    layer_names,
    llama_names,
    switched,
)
from gptmanager.models.families.readers import experts_of
from gptmanager.models.spec import Norms

_SWITCHED_BLOCK = switched("block_sparse_moe.switch_mlp")
_SWITCHED_EXPERTS = switched("mlp.experts")
_BLOCK_IN_ONE = {**_SWITCHED_BLOCK, **STACKED, "router": "mlp.gate"}
_GRANITE_IN_ONE = {
    "router": "block_sparse_moe.router",
    "stacked_up": "block_sparse_moe.experts.gate_up_proj",
    "stacked_down": "block_sparse_moe.experts.down_proj",
}
_BLOCK = {
    "gate": None,
    "up": None,
    "down": None,
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}
_GRANITE_BLOCK = {
    "gate": None,
    "up": None,
    "down": None,
    "router": "block_sparse_moe.router.layer",
    "stacked_up": "block_sparse_moe.input_linear.weight",
    "stacked_down": "block_sparse_moe.output_linear.weight",
}
_PREDICTORS = re.compile(rf"{ROTARY_BUFFERS.pattern}|^(model\.)?mtp_")
_SIGMOID: Mapping[str, Any] = {
    "score": "sigmoid",
    "correction": True,
    "num_shared": "n_shared_experts",
    "is_dense": readers.first_layers_dense,
}
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
    experts=experts_of("n_routed_experts", **_SIGMOID),
)
_QWEN3_MOE = replace(
    LLAMAS["qwen3"],
    title="Qwen3-MoE",
    tensors=llama_names(**EXPERTS),
    other_tensors=layer_names(**IN_ONE),
    spellings={**LLAMAS["qwen3"].spellings, "num_experts": "num_local_experts"},
    defaults={
        **LLAMAS["qwen3"].defaults,
        "head_dim": None,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "use_sliding_window": False,
    },
    windows="all",  # unlike in other families of Qwen, `max_window_layers` has no effect
    experts=experts_of("num_experts", is_dense=readers.sparse_steps_dense),
)
_OLMOE = replace(
    BIASED_ATTENTION,
    title="OLMoE",
    tensors=llama_names(**ONLY_EXPERTS),
    other_tensors=layer_names(**IN_ONE),
    defaults=llama_fields(
        norm_eps=1e-5,
        max_position_embeddings=4096,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    norms=Norms(query_key="all_heads"),
    experts=experts_of("num_experts", width="intermediate_size"),
)
_GRANITE_MOE = replace(
    LLAMAS["granite"],
    title="Granite 3 MoE",
    tensors=llama_names(**_GRANITE_BLOCK),
    other_tensors=layer_names(**BY_EXPERT, **_SWITCHED_BLOCK, **_GRANITE_IN_ONE),
    defaults={
        **LLAMAS["granite"].defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    mlp_bias=False,
    experts=experts_of(
        "num_local_experts",
        width="intermediate_size",
        score="softmax_of_best",
        renormalize=False,
    ),
)
MIXTURES: Mapping[str, Family] = {
    "mixtral": replace(
        LLAMAS["mistral"],
        title="Mixtral",
        tensors=llama_names(**_BLOCK),
        other_tensors=layer_names(**_BLOCK_IN_ONE),
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=1e6,
            max_position_embeddings=131072,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        experts=experts_of("num_local_experts", width="intermediate_size", renormalize=True),
    ),
    "qwen2_moe": replace(
        LLAMAS["qwen2"],
        title="Qwen1.5-MoE, Qwen2-MoE",
        tensors=llama_names(**EXPERTS, **SHARED_EXPERT),
        other_tensors=layer_names(**IN_ONE),
        defaults={
            **LLAMAS["qwen2"].defaults,
            "num_key_value_heads": 16,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        qkv_bias="qkv_bias",
        network=readers.listed_windows,
        experts=experts_of(
            "num_experts",
            shared="shared_expert_intermediate_size",
            shared_gate=True,
            is_dense=readers.sparse_steps_dense,
        ),
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": replace(
        _QWEN3_MOE,
        title="Qwen3-VL-MoE (text)",
        tensors=llama_names(
            **DENSE,
            router="mlp.gate",
            transposed_up="mlp.experts.gate_up_proj",
            transposed_down="mlp.experts.down_proj",
        ),
        other_tensors=layer_names(**BY_EXPERT, **SWITCHED),
        defaults={
            **_QWEN3_MOE.defaults,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "tie_word_embeddings": True,
        },
        neutral={"norm_topk_prob": True},
        experts=experts_of("num_experts", renormalize=True, is_dense=readers.sparse_steps_dense),
    ),
    "olmoe": _OLMOE,
    "flex_olmo": replace(
        _OLMOE,
        title="FlexOlmo",
        tensors=llama_names(**ONLY_EXPERTS, **NORMS_AFTER),
        defaults=llama_fields(
            norm_eps=1e-6,
            rope_theta=500000.0,
            max_position_embeddings=4096,
            num_experts=7,
            num_experts_per_tok=5,
        ),
        norms=replace(NORMS_AFTER_ONLY, query_key="all_heads"),
    ),
    "gpt_oss": replace(
        PLAIN,
        title="gpt-oss",
        tensors=llama_names(
            gate=None,
            up=None,
            down=None,
            sinks="self_attn.sinks",
            router="mlp.router",
            mixed_up="mlp.experts.gate_up_proj",
            mixed_down="mlp.experts.down_proj",
        ),
        other_tensors=layer_names(**BY_EXPERT, **_SWITCHED_EXPERTS),
        defaults=llama_fields(
            norm_eps=1e-5,
            max_position_embeddings=131072,
            num_key_value_heads=8,
            head_dim=64,
            attention_bias=True,
            sliding_window=128,
            num_local_experts=128,
            num_experts_per_tok=4,
            rope_theta=150000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        activation="clamped_swiglu",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        windows=2,
        neutral={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "initial_context_length": 4096},
        attention=lambda *_: {"sinks": True},
        experts=experts_of(
            "num_local_experts",
            width="intermediate_size",
            score="softmax_of_best",
            renormalize=False,
            router_bias=True,
            bias=True,
        ),
    ),
    "llama4_text": LLAMA4,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(
        _GRANITE_MOE,
        title="Granite 3 MoE with a shared MLP",
        tensors=llama_names(
            **_GRANITE_BLOCK,
            shared_gate_up="shared_mlp.input_linear",
            shared_down="shared_mlp.output_linear",
        ),
        other_tensors=layer_names(
            **BY_EXPERT, **_SWITCHED_BLOCK, **_GRANITE_IN_ONE, **SHARED_HALVES
        ),
        experts=experts_of(
            "num_local_experts",
            width="intermediate_size",
            score="softmax_of_best",
            renormalize=False,
            shared="shared_intermediate_size",
        ),
    ),
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
    "dots1": replace(
        _GLM4_MOE,
        title="dots.llm1",
        other_tensors=layer_names(**_SWITCHED_EXPERTS, **STACKED),
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
        tensors=llama_names(**_BLOCK, correction="block_sparse_moe.e_score_correction_bias"),
        other_tensors=layer_names(**_BLOCK_IN_ONE, correction="mlp.e_score_correction_bias"),
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
}
