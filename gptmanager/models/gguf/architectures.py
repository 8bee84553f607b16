"""A table of the architectures of GGUF files: their family, metadata keys and tensor names.

`config` and `tensors` read files with this table. It does not describe what a family computes: the
metadata of a file is converted to a `config.json`, which defines the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gptmanager.models.gguf.architecture import (
    CAPPED,
    EXPERTS,
    FEED_FORWARD,
    FUSED,
    GPT2,
    LAYER_NORM,
    LLAMA,
    MIXTURE,
    NORMS_AFTER,
    ROTARY,
    SANDWICH,
    SIZES,
    Architecture,
)

_GEMMA = Architecture(
    "gemma",
    constants={"hidden_act": "gelu_pytorch_tanh"},
    plus_one=True,
)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    fields=CAPPED,
    constants={"hidden_activation": "gelu_pytorch_tanh"},
    modules=SANDWICH,
    scaled_by_size=46,
)
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_MLP_BIAS = {"mlp_bias": "blk.0.ffn_up.bias"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        permuted=True,
        biases={**_ATTENTION_BIAS, **_MLP_BIAS},
    ),
    "qwen2": Architecture("qwen2", constants={"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", constants={"use_sliding_window": False}, biases=_ATTENTION_BIAS),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, model_type="gemma3_text", scaled_by_size=62),
    "phi3": Architecture(
        "phi3",
        fields={**ROTARY, "sliding_window": "attention.sliding_window"},
        modules=FUSED,
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
        modules=GPT2,
        outside={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        transposed=True,
    ),
    "phi2": Architecture(
        "phi",
        fields=LAYER_NORM,
        modules={
            **{key: LLAMA[key] for key in ("attn_norm", "attn_q", "attn_k", "attn_v")},
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        outside={
            "token_embd": "model.embed_tokens",
            "output_norm": "model.final_layernorm",
            "output": "lm_head",
        },
    ),
    "olmo": Architecture(
        "olmo",
        fields={key: ROTARY[key] for key in ROTARY if key != "rms_norm_eps"},
        permuted=True,
        ignored=frozenset({"attention.layer_norm_epsilon"}),  # that of all such models
        biases=_ATTENTION_BIAS,
    ),
    "olmo2": Architecture("olmo2", modules=NORMS_AFTER),
    "granite": Architecture(
        "granite",
        fields={
            **ROTARY,
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        permuted=True,
        biases=_ATTENTION_BIAS,
    ),
    "command-r": Architecture(
        "cohere",
        fields={**LAYER_NORM, "logit_scale": "logit_scale"},
        biases={"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "cohere2": Architecture(
        "cohere2",
        fields={
            **LAYER_NORM,
            "logit_scale": "logit_scale",
            "sliding_window": "attention.sliding_window",
        },
    ),
    "glm4": Architecture(
        "glm4",
        modules={
            **LLAMA,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        biases=_ATTENTION_BIAS,
    ),
    "smollm3": Architecture("smollm3", permuted=True, biases=_ATTENTION_BIAS),
    "seed_oss": Architecture(
        "seed_oss",
        modules={**LLAMA, "post_attention_norm": "post_attention_layernorm"},
        biases={**_ATTENTION_BIAS, "attention_out_bias": "blk.0.attn_output.bias"},
    ),
    "stablelm": Architecture(
        "stablelm",
        fields={**LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": "blk.0.attn_q.bias"},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        fields={
            **SIZES,
            "norm_epsilon": "attention.layer_norm_epsilon",
            "rope_theta": "rope.freq_base",
        },
        modules={**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biases={"use_bias": "blk.0.attn_q.bias"},
    ),
    "nemotron": Architecture(
        "nemotron",
        fields={
            **SIZES,
            "norm_eps": "attention.layer_norm_epsilon",
            "rope_theta": "rope.freq_base",
        },
        plus_one=True,
        ignored=frozenset({"attention.layer_norm_rms_epsilon"}),
        biases={**_ATTENTION_BIAS, **_MLP_BIAS},
    ),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": "blk.0.attn_q.bias"}),
    "arcee": Architecture("arcee", permuted=True, biases={**_ATTENTION_BIAS, **_MLP_BIAS}),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        modules={
            **LLAMA,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        biases=_ATTENTION_BIAS,
    ),
    "jais2": Architecture("jais2", fields=LAYER_NORM, biases={**_ATTENTION_BIAS, **_MLP_BIAS}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        fields={
            **MIXTURE,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        constants={"use_sliding_window": False, "norm_topk_prob": False},
        modules={
            **LLAMA,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **{
                f"{module}_shexp": LLAMA[module].replace("mlp.", "mlp.shared_expert.")
                for module in FEED_FORWARD
            },
        },
        experts=EXPERTS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        fields=MIXTURE,
        constants={"use_sliding_window": False, "norm_topk_prob": True},
        modules={**LLAMA, "ffn_gate_inp": "mlp.gate"},
        experts=EXPERTS,
        biases=_ATTENTION_BIAS,
    ),
    "olmoe": Architecture(
        "olmoe",
        fields={key: MIXTURE[key] for key in MIXTURE if key != "moe_intermediate_size"},
        constants={"norm_topk_prob": False},
        modules={**LLAMA, "ffn_gate_inp": "mlp.gate"},
        experts=EXPERTS,
    ),
}
# files with experts that have the architecture of those without
WITH_EXPERTS: Mapping[str, Architecture] = {
    "llama": Architecture(
        "mixtral",
        fields={
            **ROTARY,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        permuted=True,
        modules={
            **{key: LLAMA[key] for key in LLAMA if key not in FEED_FORWARD},
            "ffn_gate_inp": "block_sparse_moe.gate",
        },
        experts={
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        },
    ),
}
