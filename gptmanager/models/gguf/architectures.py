"""A table of the architectures of GGUF files: their family, metadata keys and tensor names.

The modules `config` and `tensors` read files with this table. The table does not describe what a
family computes: a file's metadata is converted to a `config.json`, which defines the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gptmanager.models.gguf.architecture import (
    ATTENTION_BIAS,
    CAPPED,
    FUSED,
    GRANITE,
    LAYER_NORM,
    LLAMA,
    NORMS_AFTER,
    ROTARY,
    SANDWICH,
    SIZES,
    SSM,
    UNSCALED,
    WINDOWS,
    Architecture,
)
from gptmanager.models.gguf.further_fields import (
    check_xielu,
    gemma4_fields,
    minicpm_scales,
    ministral_rope,
)
from gptmanager.models.gguf.kinds.gpts import FALCON_7B, GPTS, OF_GPT2
from gptmanager.models.gguf.kinds.hybrids import BAMBA, HYBRIDS
from gptmanager.models.gguf.kinds.linears import LINEARS
from gptmanager.models.gguf.kinds.mixtures import (
    DEEPSEEK_V3,
    GRANITE_MOE_WINDOWS,
    GRANITE_SHARED,
    MIXTRAL,
    MIXTURES,
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
# Positions of a text are the same in all sections; text has no features of an image to add.
_OF_MEDIA = frozenset({"rope.dimension_sections", "n_deepstack_layers"})
_BY_KIND = ("num_key_value_heads", "intermediate_size", "head_dim", "attn_logit_softcapping")
_MLP_BIAS = {"mlp_bias": "blk.0.ffn_up.bias"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        permuted=True,
        biases={**ATTENTION_BIAS, **_MLP_BIAS},
    ),
    "qwen2": Architecture("qwen2", constants={"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", constants={"use_sliding_window": False}, biases=ATTENTION_BIAS),
    "qwen2vl": Architecture("qwen2", constants={"use_sliding_window": False}, ignored=_OF_MEDIA),
    "qwen3vl": Architecture(
        "qwen3", constants={"use_sliding_window": False}, ignored=_OF_MEDIA, biases=ATTENTION_BIAS
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        model_type="gemma3_text",
        fields={**CAPPED, "rope_local_base_freq": "rope.freq_base_swa"},
        scaled_by_size=62,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        fields={
            **{key: CAPPED[key] for key in CAPPED if key not in _BY_KIND},
            "layer_types": WINDOWS["layer_types"],
            "head_dim": "attention.key_length_swa",
            "global_head_dim": "attention.key_length",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        },
        constants={"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        further=gemma4_fields,
        modules={
            **SANDWICH,
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        outside={
            "token_embd": "model.embed_tokens",
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "output_norm": "model.norm",
            "output": "lm_head",
        },
        ignored=frozenset(
            """
            attention.head_count_kv feed_forward_length attention.value_length_swa
            rope.dimension_count rope.dimension_count_swa rope.freq_base_swa
            """.split()
        ),
    ),
    "phi3": Architecture(
        "phi3",
        fields={**ROTARY, "sliding_window": "attention.sliding_window"},
        modules=FUSED,
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
        fields={
            **{key: ROTARY[key] for key in ROTARY if key != "rms_norm_eps"},
            "clip_qkv": "attention.clamp_kqv",
        },
        permuted=True,
        ignored=frozenset({"attention.layer_norm_epsilon"}),  # the same in all such models
        biases=ATTENTION_BIAS,
    ),
    "olmo2": Architecture("olmo2", modules=NORMS_AFTER),
    "granite": Architecture(
        "granite",
        fields=GRANITE,
        permuted=True,
        # Dense models of Granite 4 also have the keys for Mamba layers.
        ignored=frozenset({"expert_shared_feed_forward_length", *SSM}),
        required={"rope.scaling.finetuned": True},
        biases=ATTENTION_BIAS,
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
        biases=ATTENTION_BIAS,
    ),
    "smollm3": Architecture("smollm3", permuted=True, biases=ATTENTION_BIAS),
    "seed_oss": Architecture(
        "seed_oss",
        modules={**LLAMA, "post_attention_norm": "post_attention_layernorm"},
        biases={**ATTENTION_BIAS, "attention_out_bias": "blk.0.attn_output.bias"},
    ),
    "stablelm": Architecture(
        "stablelm",
        fields={**LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        stacked={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
        biases={
            "use_qkv_bias": "blk.0.attn_q.bias",
            "qk_layernorm": "blk.0.attn_q_norm.weight",
        },
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
        biases={**ATTENTION_BIAS, **_MLP_BIAS},
    ),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": "blk.0.attn_q.bias"}),
    "arcee": Architecture("arcee", permuted=True, biases={**ATTENTION_BIAS, **_MLP_BIAS}),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        modules={
            **LLAMA,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        biases=ATTENTION_BIAS,
    ),
    "apertus": Architecture(
        "apertus",
        constants={"rope_parameters": UNSCALED},
        further=check_xielu,
        modules={**LLAMA, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        numbers={
            "xielu.alpha_p": "mlp.act_fn.alpha_p",
            "xielu.alpha_n": "mlp.act_fn.alpha_n",
        },
        biases=ATTENTION_BIAS,
    ),
    "jais2": Architecture("jais2", fields=LAYER_NORM, biases={**ATTENTION_BIAS, **_MLP_BIAS}),
    "exaone4": Architecture(
        "exaone4",
        fields={**ROTARY, **WINDOWS},
        constants={"sliding_window": None},
        modules=NORMS_AFTER,
    ),
    "chatglm": Architecture(
        "glm",
        constants={"head_dim": None},  # None means hidden size / heads
        modules={**LLAMA, "ffn_up": "mlp.gate_up_proj", "attn_qkv": "self_attn.query_key_value"},
        biases={"attention_bias": "blk.0.attn_v.bias"},
    ),
    "mistral3": Architecture(
        "ministral3",
        constants={"rope_parameters": UNSCALED},
        further=ministral_rope,
        permuted=True,
        ignored=frozenset({"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"}),
    ),
    "exaone": Architecture(
        "exaone",
        fields={
            **{key: ROTARY[key] for key in ROTARY if key != "rms_norm_eps"},
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        },
        layer="transformer.h.{}.",
        modules={
            "attn_norm": "ln_1",
            "attn_q": "attn.attention.q_proj",
            "attn_k": "attn.attention.k_proj",
            "attn_v": "attn.attention.v_proj",
            "attn_output": "attn.attention.out_proj",
            "ffn_norm": "ln_2",
            "ffn_gate": "mlp.c_fc_0",
            "ffn_up": "mlp.c_fc_1",
            "ffn_down": "mlp.c_proj",
        },
        outside=OF_GPT2,
        ignored=frozenset({"attention.layer_norm_epsilon"}),
    ),
    "internlm2": Architecture(
        "internlm2",
        permuted=True,
        modules={
            "attn_norm": "attention_norm",
            "attn_q": "attention.wq",
            "attn_k": "attention.wk",
            "attn_v": "attention.wv",
            "attn_output": "attention.wo",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        outside={
            "token_embd": "model.tok_embeddings",
            "output_norm": "model.norm",
            "output": "output",
        },
        biases={"bias": "blk.0.attn_output.bias"},
    ),
    "minicpm": Architecture(
        "minicpm",
        further=minicpm_scales,
        permuted=True,
        ignored=frozenset({"embedding_scale", "residual_scale", "logit_scale"}),
        biases=ATTENTION_BIAS,
    ),
    **GPTS,
    **LINEARS,
    **HYBRIDS,
    **MIXTURES,
    "qwen3vlmoe": replace(MIXTURES["qwen3moe"], ignored=_OF_MEDIA),
}


class Variant(NamedTuple):
    """The architecture of files that have `value` for the metadata key `key`.

    If `value` is None, any value except 0 and false is accepted.
    """

    key: str
    architecture: Architecture
    value: Any = None


VARIANTS: Mapping[str, Sequence[Variant]] = {
    "llama": (Variant("expert_count", MIXTRAL),),
    "olmo2": (
        Variant(
            "attention.sliding_window",
            Architecture(
                "olmo3",
                fields={**ROTARY, **WINDOWS, "rope_local_base_freq": "rope.freq_base_swa"},
                modules=NORMS_AFTER,
            ),
        ),
    ),
    "granitehybrid": (Variant("rope.scaling.finetuned", BAMBA, True),),
    "granite_swa": (Variant("expert_count", GRANITE_MOE_WINDOWS),),
    "falcon": (Variant("attention.head_count_kv", FALCON_7B, 1),),
    "granitemoe": (Variant("expert_shared_feed_forward_length", GRANITE_SHARED),),
    "deepseek2": (Variant("expert_gating_func", DEEPSEEK_V3, 2),),
}
