"""Families that are published with Python code of their own. They are close to Llama."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from gptmanager.models.families import readers
from gptmanager.models.families.base import BIASED_ATTENTION, LLAMA, PLAIN, RMS_EPS, llama_fields
from gptmanager.models.families.family import ROTARY_BUFFERS, Family
from gptmanager.models.families.kinds.llamas import LLAMAS
from gptmanager.models.families.names import LLAMA as LLAMA_NAMES
from gptmanager.models.families.names import layer_names, tensor_names

OWN_CODE: Mapping[str, Family] = {
    "exaone": replace(
        LLAMA,
        title="EXAONE 3, 3.5, Deep",
        tensors=tensor_names(
            "transformer.h.{}.",
            embedding="transformer.wte",
            final_norm="transformer.ln_f",
            attention_norm="ln_1",
            q="attn.attention.q_proj",
            k="attn.attention.k_proj",
            v="attn.attention.v_proj",
            out="attn.attention.out_proj",
            mlp_norm="ln_2",
            gate="mlp.c_fc_0",
            up="mlp.c_fc_1",
            down="mlp.c_proj",
        ),
        other_tensors=LLAMA_NAMES,  # the names in transformers
        prefix="transformer.",
        spellings={  # the published names, and those of transformers 5.24
            "norm_eps": ("layer_norm_epsilon", "rms_norm_eps"),
            "hidden_act": ("activation_function", "hidden_act"),
            "num_hidden_layers": "num_layers",
        },
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=500000.0,
            max_position_embeddings=4096,
            num_key_value_heads=8,
        ),
    ),
    "internlm2": replace(
        PLAIN,
        title="InternLM 2, 2.5",
        tensors=tensor_names(
            "model.layers.{}.",
            embedding="model.tok_embeddings",
            final_norm="model.norm",
            head="output",
            attention_norm="attention_norm",
            qkv_by_head="attention.wqkv",
            out="attention.wo",
            mlp_norm="ffn_norm",
            gate="feed_forward.w1",
            up="feed_forward.w3",
            down="feed_forward.w2",
        ),
        other_tensors=layer_names(q="attention.wq", k="attention.wk", v="attention.wv"),  # in GGUF
        defaults=llama_fields(bias=True),
        qkv_bias="bias",
        out_bias="bias",
    ),
    "internlm3": replace(
        LLAMA,
        title="InternLM 3",
        spellings={**RMS_EPS, "attention_bias": "qkv_bias", "mlp_bias": "bias"},
        defaults=llama_fields(
            norm_eps=1e-5, max_position_embeddings=32768, num_key_value_heads=2, head_dim=128
        ),
        out_bias="mlp_bias",
    ),
    "minicpm": replace(
        BIASED_ATTENTION,
        title="MiniCPM 1, 2, 4",
        defaults=llama_fields(
            tie_word_embeddings=True, scale_emb=1.0, scale_depth=1.0, dim_model_base=1
        ),
        network=readers.minicpm_scales,
    ),
    "mimo": replace(
        LLAMAS["qwen2"],
        title="MiMo",
        ignored=re.compile(rf"{ROTARY_BUFFERS.pattern}|^(model\.)?mtp_layers\."),
        neutral={"attention_bias": True},
    ),
}
