"""Model families that have RMS norms, and differ little from Llama."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from gptmanager.models.families import readers
from gptmanager.models.families.base import (
    BIASED_ATTENTION,
    FOUR_NORMS,
    LLAMA,
    NORMS_AFTER_ONLY,
    PLAIN,
    llama_fields,
)
from gptmanager.models.families.family import ROTARY_BUFFERS, Family
from gptmanager.models.families.names import NORMS_AFTER, layer_names, llama_names
from gptmanager.models.spec import Norms

_MISTRAL = replace(
    PLAIN,
    title="Mistral",
    defaults=llama_fields(
        max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096
    ),
    windows="all",
)
_QWEN2 = replace(
    PLAIN,
    title="Qwen2, 2.5",
    defaults=llama_fields(
        max_position_embeddings=32768,
        num_key_value_heads=32,
        sliding_window=4096,
        max_window_layers=28,
        dual_chunk_attention_config=None,
    ),
    qkv_bias=True,
    windows="some",
)
_QWEN3 = replace(
    BIASED_ATTENTION,
    title="Qwen3",
    defaults={**_QWEN2.defaults, "head_dim": 128},
    norms=Norms(query_key="head"),
    windows="some",
)
_GRANITE = replace(
    LLAMA,
    title="Granite 3",
    defaults=llama_fields(
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        attention_multiplier=1.0,
    ),
    network=readers.granite_scales,
    attention=readers.granite_attention,
)
_OLMO2 = replace(
    BIASED_ATTENTION,
    title="OLMo 2",
    tensors=llama_names(**NORMS_AFTER),
    defaults=llama_fields(norm_eps=1e-5),
    norms=replace(NORMS_AFTER_ONLY, query_key="all_heads"),
)
_GLM = replace(
    PLAIN,
    title="GLM-4 (9B)",
    tensors=llama_names(gate=None, up=None, gate_up="mlp.gate_up_proj"),
    other_tensors=layer_names(qkv_in_order="self_attn.query_key_value"),
    defaults=llama_fields(
        norm_eps=1.5625e-7,
        max_position_embeddings=131072,
        num_key_value_heads=2,
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
    ),
    interleaved=True,
    qkv_bias="attention_bias",
)
_PHI3 = replace(
    PLAIN,
    title="Phi 3, 3.5, 4",
    tensors=llama_names(
        q=None,
        k=None,
        v=None,
        qkv="self_attn.qkv_proj",
        gate=None,
        up=None,
        gate_up="mlp.gate_up_proj",
    ),
    # PEFT's names, next to the adapters of images and sounds in Phi-4-multimodal
    other_tensors=layer_names(
        qkv="self_attn.qkv_proj.base_layer",
        out="self_attn.o_proj.base_layer",
        gate_up="mlp.gate_up_proj.base_layer",
        down="mlp.down_proj.base_layer",
    ),
    defaults=llama_fields(norm_eps=1e-5, max_position_embeddings=4096, partial_rotary_factor=1.0),
    windows="all",
    neutral={"interpolate_factor": 1, "full_attn_mod": 1},
)
_SMOLLM3 = replace(
    LLAMA,
    title="SmolLM 3",
    defaults=llama_fields(
        rope_theta=2e6,
        max_position_embeddings=32768,
        num_key_value_heads=4,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    attention=readers.unrotated_layers,
)
_EXAONE4 = replace(
    PLAIN,
    title="EXAONE 4",
    tensors=llama_names(**NORMS_AFTER),
    defaults=llama_fields(norm_eps=1e-5, sliding_window=4096, sliding_window_pattern=4),
    norms=replace(NORMS_AFTER_ONLY, query_key="head"),
    windows="pattern",
    attention=readers.unrotated_full_layers,
)
LLAMAS: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, title="Ministral", windows=0),
    "ministral3": replace(
        PLAIN,
        title="Ministral 3",
        defaults=llama_fields(
            norm_eps=1e-5,
            max_position_embeddings=262144,
            num_key_value_heads=8,
            head_dim=128,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        windows="all",
        attention=readers.query_temperature,
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "phi3": _PHI3,
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        title="OLMo 3",
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=500000.0,
            rope_local_base_freq=500000.0,  # `rope_scaling` applies only to layers without a window
            sliding_window=4096,
        ),
        windows=4,
    ),
    "granite": _GRANITE,
    "hyperclovax": replace(
        _GRANITE,
        title="HyperCLOVA X SEED Think",
        tensors=llama_names(attention_out_norm="post_norm1", mlp_out_norm="post_norm2"),
        defaults={**_GRANITE.defaults, "attention_multiplier": None},
        norms=FOUR_NORMS,
        neutral={"use_post_norm": True},
        network=readers.hyperclova_scales,
        attention=readers.hyperclova_attention,
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        title="GLM-4 (0414)",
        other_tensors={},
        tensors=llama_names(
            attention_out_norm="post_self_attn_layernorm",
            mlp_out_norm="post_mlp_layernorm",
            gate=None,
            up=None,
            gate_up="mlp.gate_up_proj",
        ),
        norms=FOUR_NORMS,
    ),
    "smollm3": _SMOLLM3,
    "exaone4": _EXAONE4,
    "seed_oss": replace(
        LLAMA,
        title="Seed-OSS",
        defaults=llama_fields(
            max_position_embeddings=524288,
            num_key_value_heads=8,
            head_dim=128,
            attention_bias=True,
        ),
        out_bias="attention_out_bias",
    ),
    "helium": replace(
        LLAMA,
        title="Helium",
        defaults=llama_fields(
            norm_eps=1e-8, rope_theta=100000.0, max_position_embeddings=4096, head_dim=128
        ),
        interleaved=True,
        out_bias=False,
    ),
    "ernie4_5": replace(
        LLAMA,
        title="ERNIE 4.5",
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=500000.0,
            max_position_embeddings=131072,
            num_key_value_heads=2,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        interleaved=True,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
    ),
    "arcee": replace(
        LLAMA,
        title="Arcee AFM",
        tensors=llama_names(gate=None, up=None, fc="mlp.up_proj"),
        defaults=llama_fields(hidden_act="relu2", norm_eps=1e-5, max_position_embeddings=4096),
        gated=False,
    ),
    "hunyuan_v1_dense": replace(
        BIASED_ATTENTION,
        title="HunYuan (dense)",
        tensors=llama_names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        defaults=llama_fields(norm_eps=1e-5, rope_alpha=None),
        norms=Norms(query_key="rotated_head"),
    ),
    "nanochat": replace(
        BIASED_ATTENTION,
        title="nanochat",
        tensors=llama_names(
            **dict.fromkeys(("attention_norm", "mlp_norm", "q_norm", "k_norm", "gate", "up")),
            fc="mlp.fc1",
            down="mlp.fc2",
        ),
        defaults=llama_fields(hidden_act="relu2", final_logit_softcapping=15.0),
        norms=Norms(weight=False, embedding=True, query_key="rotated"),
        backward=True,
        gated=False,
        network=lambda fields: {"logit_softcap": fields.optional_number("final_logit_softcapping")},
    ),
    "apertus": replace(
        BIASED_ATTENTION,
        title="Apertus",
        tensors=llama_names(
            attention_norm="attention_layernorm",
            mlp_norm="feedforward_layernorm",
            gate=None,
            up=None,
            fc="mlp.up_proj",
            xielu_positive="mlp.act_fn.alpha_p",
            xielu_negative="mlp.act_fn.alpha_n",
        ),
        ignored=re.compile(rf"{ROTARY_BUFFERS.pattern}|\.mlp\.act_fn\.(beta|eps)$"),
        defaults=llama_fields(
            hidden_act="xielu",
            norm_eps=1e-5,
            rope_theta=12e6,
            max_position_embeddings=65536,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        norms=Norms(query_key="head"),
        gated=False,
        xielu=True,
        neutral={"qk_norm": True},
    ),
    "cwm": replace(
        PLAIN,
        title="Code World Model",
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=1e6,
            max_position_embeddings=131072,
            num_key_value_heads=8,
            head_dim=128,
            sliding_window=8192,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        mlp_bias="mlp_bias",
        windows=-4,
    ),
}
