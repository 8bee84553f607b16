"""A table of the architectures of GGUF files: their family, metadata keys and tensor names.

`config` and `tensors` read files with this table. It does not describe what a family computes: the
metadata of a file is converted to a `config.json`, which defines the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Field of a config.json -> key in a file, without the architecture name that precedes it.
_SIZES: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
}
_ROTARY: Mapping[str, str] = {
    **_SIZES,
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_CAPPED: Mapping[str, str] = {
    **_ROTARY,
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Module in a file -> module in a checkpoint, without the prefixes blk.{} and model.layers.{}.
_LLAMA: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH: Mapping[str, str] = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED: Mapping[str, str] = {
    **{key: _LLAMA[key] for key in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")},
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_GPT2: Mapping[str, str] = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Architecture:
    """Maps one `general.architecture` to the `model_type` and the names of a checkpoint.

    `fields`: config field -> key. `constants`: config fields that files do not contain. `layer`:
    the prefix of a layer's modules. `modules`: names of modules in a layer. `outside`: names of
    modules outside the layers. `permuted`: rows of queries and keys are stored as neighboring
    pairs. `plus_one`: norm weights are stored with 1 added. `transposed`: a checkpoint stores a
    layer's matrices as [in, out]. `biases`: config field -> tensor; the field is true if the file
    has the tensor. `scaled_by_size`: models with this number of layers scale attention scores by
    hidden size / heads instead of the head size.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=lambda: _ROTARY)
    constants: Mapping[str, Any] = field(default_factory=dict)
    layer: str = "model.layers.{}."
    modules: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    outside: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
        }
    )
    permuted: bool = False
    plus_one: bool = False
    transposed: bool = False
    biases: Mapping[str, str] = field(default_factory=dict)
    scaled_by_size: int | None = None


_GEMMA = Architecture(
    "gemma",
    constants={"hidden_act": "gelu_pytorch_tanh"},
    plus_one=True,
)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    fields=_CAPPED,
    constants={"hidden_activation": "gelu_pytorch_tanh"},
    modules=_SANDWICH,
    scaled_by_size=46,
)
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        permuted=True,
        biases={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    "qwen2": Architecture("qwen2", constants={"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", constants={"use_sliding_window": False}, biases=_ATTENTION_BIAS),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, model_type="gemma3_text", scaled_by_size=62),
    "phi3": Architecture(
        "phi3",
        fields={**_ROTARY, "sliding_window": "attention.sliding_window"},
        modules=_FUSED,
    ),
    "gpt2": Architecture(
        "gpt2",
        fields={
            "n_embd": "embedding_length",
            "n_inner": "feed_forward_length",
            "n_layer": "block_count",
            "n_head": "attention.head_count",
            "n_positions": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        constants={"activation_function": "gelu_new"},
        layer="transformer.h.{}.",
        modules=_GPT2,
        outside={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        transposed=True,
    ),
}
