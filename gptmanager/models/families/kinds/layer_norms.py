"""Families with LayerNorm instead of RMS norms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from gptmanager.models.families import readers
from gptmanager.models.families.base import (
    BIASED_ATTENTION,
    LAYER_EPS,
    LAYER_NORM,
    LLAMA,
    PLAIN,
    llama_fields,
)
from gptmanager.models.families.family import Family
from gptmanager.models.families.names import GPT2, GPT_NEOX, OPT, layer_names, llama_names
from gptmanager.models.spec import Norms

_GPT2 = Family(
    "GPT-2",
    tensors=GPT2,
    prefix="transformer.",
    ignored=re.compile(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$"),
    spellings={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    },
    defaults={
        "hidden_act": "gelu_new",
        "norm_eps": 1e-5,
        "intermediate_size": None,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
    },
    norms=LAYER_NORM,
    rotary=False,
    position_offset=0,
    gated=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    transposed=True,
    attention=readers.as_many_kv_heads,
)
_COHERE = replace(
    BIASED_ATTENTION,
    title="Cohere Command R",
    tensors=llama_names(mlp_norm=None),
    spellings=LAYER_EPS,
    defaults=llama_fields(
        norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        logit_scale=0.0625,
    ),
    norms=Norms("layer", before_mlp=False, query_key="own_head", query_key_kind="layer"),
    qk_norm="use_qk_norm",
    interleaved=True,
    parallel=True,
    network=lambda fields: {"logit_scale": fields.number("logit_scale")},
)
_STABLELM = replace(
    PLAIN,
    title="StableLM",
    tensors=llama_names(
        q_norm=None,
        k_norm=None,
        q_norms="self_attn.q_layernorm.norms.{}",
        k_norms="self_attn.k_layernorm.norms.{}",
    ),
    spellings=LAYER_EPS,
    defaults=llama_fields(norm_eps=1e-5, max_position_embeddings=4096, partial_rotary_factor=0.25),
    norms=replace(LAYER_NORM, query_key="own_head", query_key_kind="layer"),
    qk_norm="qk_layernorm",
    parallel="use_parallel_residual",
    one_norm="use_parallel_residual",
    qkv_bias="use_qkv_bias",
    neutral={"rotary_scaling_factor": 1.0},
)
_PHI = replace(
    PLAIN,
    title="Phi 1, 1.5, 2",
    tensors=llama_names(
        mlp_norm=None,
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        out="self_attn.dense",
        gate=None,
        up=None,
        fc="mlp.fc1",
        down="mlp.fc2",
        final_norm="model.final_layernorm",
    ),
    spellings=LAYER_EPS,
    defaults=llama_fields(hidden_act="gelu_new", norm_eps=1e-5, partial_rotary_factor=0.5),
    norms=Norms(
        "layer", bias=True, before_mlp=False, query_key="biased_head", query_key_kind="layer"
    ),
    qk_norm="qk_layernorm",
    gated=False,
    parallel=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    head_bias=True,
)
_STARCODER2 = replace(
    PLAIN,
    title="StarCoder 2",
    tensors=llama_names(gate=None, up=None, fc="mlp.c_fc", down="mlp.c_proj"),
    spellings={"norm_eps": "norm_epsilon"},
    defaults=llama_fields(
        hidden_act="gelu_pytorch_tanh",
        norm_eps=1e-5,
        max_position_embeddings=4096,
        num_key_value_heads=2,
        use_bias=True,
        tie_word_embeddings=True,
    ),
    norms=LAYER_NORM,
    gated=False,
    qkv_bias="use_bias",
    out_bias="use_bias",
    mlp_bias="use_bias",
    windows="all",
    neutral={"norm_type": "layer_norm", "mlp_type": "default"},
)
_NEMOTRON = replace(
    LLAMA,
    title="Nemotron 4, Minitron",
    tensors=llama_names(gate=None, up=None, fc="mlp.up_proj"),
    spellings={},
    defaults=llama_fields(
        hidden_act="relu2",
        norm_eps=1e-5,
        max_position_embeddings=4096,
        head_dim=None,
        partial_rotary_factor=0.5,
    ),
    norms=replace(LAYER_NORM, plus_one=True),
    gated=False,
)
_GPT_NEOX = Family(
    "GPT-NeoX, Pythia",
    tensors=GPT_NEOX,
    other_tensors={
        **layer_names("gpt_neox.layers.{}.", qkv_in_order="attention.qkv"),
        "lm_head": ("lm_head", None),
    },
    prefix="gpt_neox.",
    ignored=re.compile(r"(^|\.)attention\.(bias|masked_bias|rotary_emb\.inv_freq)$"),
    spellings={
        **LAYER_EPS,
        "partial_rotary_factor": "rotary_pct",
        "rope_theta": "rotary_emb_base",
    },
    defaults=llama_fields(
        hidden_act="gelu",
        norm_eps=1e-5,
        attention_bias=True,
        use_parallel_residual=True,
        partial_rotary_factor=0.25,
    ),
    norms=LAYER_NORM,
    gated=False,
    parallel="use_parallel_residual",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias=True,
    attention=readers.as_many_kv_heads,
)
_OPT = Family(
    "OPT",
    tensors=OPT,
    prefix="model.",
    spellings={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    defaults={
        "hidden_act": "relu",
        "norm_eps": 1e-5,
        "intermediate_size": None,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "enable_bias": True,
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
    },
    norms=LAYER_NORM,
    rotary=False,
    position_offset=2,
    gated=False,
    qkv_bias="enable_bias",
    out_bias="enable_bias",
    mlp_bias="enable_bias",
    network=readers.opt_network,
    attention=readers.as_many_kv_heads,
)
LAYER_NORMS: Mapping[str, Family] = {
    "gpt2": _GPT2,
    "phi": _PHI,
    "olmo": replace(
        BIASED_ATTENTION,
        title="OLMo 1",
        spellings={},
        defaults=llama_fields(norm_eps=1e-5, clip_qkv=None),
        norms=Norms("layer", weight=False),
        network=lambda fields: {"qkv_limit": fields.optional_number("clip_qkv")},
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        title="Cohere Command A, R7B",
        defaults={
            **_COHERE.defaults,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        norms=Norms("layer", before_mlp=False),
        windows="pattern",
        neutral={
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "layer_switch": 4,
            **dict.fromkeys(
                ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), True
            ),
        },
        attention=readers.unrotated_full_layers,
    ),
    "stablelm": _STABLELM,
    "starcoder2": _STARCODER2,
    "nemotron": _NEMOTRON,
    "jais2": replace(
        LLAMA,
        title="Jais 2",
        tensors=llama_names(gate=None, up=None, fc="mlp.up_proj"),
        spellings=LAYER_EPS,
        defaults=llama_fields(
            hidden_act="relu2",
            norm_eps=1e-5,
            max_position_embeddings=8192,
            attention_bias=True,
            mlp_bias=True,
        ),
        norms=LAYER_NORM,
        gated=False,
    ),
    "gpt_neox": _GPT_NEOX,
    "opt": _OPT,
}
