"""`GPTS`: the GGUF architectures after GPT-2, for the table in `architectures`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gptmanager.models.gguf.architecture import LAYER_NORM, SIZES, Architecture

_FIELDS: Mapping[str, str] = {
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
_GPT2: Mapping[str, str] = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
OF_GPT2: Mapping[str, str] = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_OF_FALCON = ("head_dim", "num_key_value_heads", "intermediate_size")
_FALCON = Architecture(  # 40B and 180B
    "falcon",
    fields={
        **{it: SIZES[it] for it in SIZES if it not in _OF_FALCON},
        "num_kv_heads": "attention.head_count_kv",
        "ffn_hidden_size": "feed_forward_length",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
        "rope_theta": "rope.freq_base",
    },
    constants={"new_decoder_architecture": True},
    layer="transformer.h.{}.",
    modules={
        "attn_norm": "ln_mlp",
        "attn_norm_2": "ln_attn",
        "attn_qkv": "self_attention.qkv",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    outside={**OF_GPT2, "token_embd": "transformer.word_embeddings"},
)
FALCON_7B = replace(
    _FALCON, constants={}, modules={**_FALCON.modules, "attn_norm": "input_layernorm"}
)
GPTS: Mapping[str, Architecture] = {
    "falcon": _FALCON,
    "gpt2": Architecture(
        "gpt2",
        fields=_FIELDS,
        constants={"activation_function": "gelu_new"},
        layer="transformer.h.{}.",
        modules=_GPT2,
        outside=OF_GPT2,
        transposed=True,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        fields={**LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        layer="gpt_neox.layers.{}.",
        modules={
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.qkv",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        outside={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        fields={**_FIELDS, "num_key_value_heads": "attention.head_count_kv"},
        layer="transformer.h.{}.",
        modules=_GPT2,
        outside=OF_GPT2,
    ),
}
