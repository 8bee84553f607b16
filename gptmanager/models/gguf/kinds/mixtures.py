"""`MIXTURES`: the GGUF architectures with experts, for the table in the module `architectures`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gptmanager.models.gguf.architecture import (
    ATTENTION_BIAS,
    CORRECTED,
    EXPERTS,
    FEED_FORWARD,
    GRANITE,
    LLAMA,
    MIXTURE,
    ROTARY,
    ROUTED,
    ROUTED_DEFAULTS,
    SHARED,
    UNSCALED,
    WINDOWS,
    Architecture,
)
from gptmanager.models.gguf.further_fields import (
    cohere_moe_fields,
    deepseek_fields,
    gpt_oss_rope,
    granite_window_ropes,
    hunyuan3_fields,
    llama4_fields,
    minicpm3_fields,
    mistral4_fields,
    windowed_ropes,
    without_further_layers,
)

_SIGMOID = {"expert_gating_func": 2}
_ATTENTION = {key: LLAMA[key] for key in LLAMA if key not in FEED_FORWARD}
_LOCAL = {
    **ROTARY,
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
# for models in which all layers have experts
_ALL_SPARSE = {**_LOCAL, "intermediate_size": "expert_feed_forward_length"}
_BLOCK_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
MIXTRAL = Architecture(
    "mixtral",
    fields=_LOCAL,
    permuted=True,
    modules={**_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    stacked=_BLOCK_EXPERTS,
)
_GRANITE_MOE = Architecture(
    "granitemoe",
    fields={**GRANITE, **_LOCAL},
    permuted=True,
    modules={
        **_ATTENTION,
        **SHARED,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    stacked=EXPERTS,
    required={"rope.scaling.finetuned": True},
    biases=ATTENTION_BIAS,
)
GRANITE_SHARED = replace(
    _GRANITE_MOE,
    model_type="granitemoeshared",
    fields={
        **_GRANITE_MOE.fields,
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
)
GRANITE_WINDOWS = Architecture(
    "granite_swa",
    fields={**GRANITE, **WINDOWS},
    further=granite_window_ropes,
    permuted=True,
    modules={**LLAMA, "attn_sinks.weight": "self_attn.sinks"},
    ignored=frozenset({"attention.rope_pattern"}),
    biases=ATTENTION_BIAS,
)
GRANITE_MOE_WINDOWS = replace(
    GRANITE_WINDOWS,
    model_type="granitemoe_swa",
    fields={
        **{**GRANITE_WINDOWS.fields, **_LOCAL},
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
    constants={"shared_intermediate_size": 0},
    modules={
        **{**_ATTENTION, "attn_sinks.weight": "self_attn.sinks"},
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_up_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    stacked=EXPERTS,
)
_GLM4_MOE = Architecture(
    "glm4_moe",
    fields=ROUTED,
    constants=ROUTED_DEFAULTS,
    further=without_further_layers,
    modules={
        **{key: CORRECTED[key] for key in CORRECTED if key != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
    },
    stacked=EXPERTS,
    ignored=frozenset({"nextn_predict_layers"}),
    required=_SIGMOID,
    biases={**ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
)
_DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    fields={
        **{key: ROUTED[key] for key in ROUTED if key not in ("num_key_value_heads", "head_dim")},
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
    },
    constants=ROUTED_DEFAULTS,
    further=deepseek_fields,
    modules={
        **CORRECTED,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
    },
    stacked={
        **EXPERTS,
        "attn_k_b": "self_attn.k_b_proj.{}",
        "attn_v_b": "self_attn.v_b_proj.{}",
    },
    ignored=frozenset(
        """
        attention.head_count_kv attention.value_length attention.key_length_mla
        attention.value_length_mla rope.scaling.yarn_log_multiplier nextn_predict_layers
        """.split()
    ),
    required={"expert_gating_func": 1},
    biases={"attention_bias": "blk.0.attn_kv_a_mqa.bias"},
)
_MINICPM3 = replace(
    _DEEPSEEK_V2,
    model_type="minicpm3",
    fields={
        **{key: ROTARY[key] for key in ROTARY if key != "head_dim"},
        **{key: _DEEPSEEK_V2.fields[key] for key in ("q_lora_rank", "kv_lora_rank")},
        "qk_rope_head_dim": "rope.dimension_count",
    },
    constants={"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
    further=minicpm3_fields,
    ignored=frozenset(),
    required={},
)
DEEPSEEK_V3 = replace(_DEEPSEEK_V2, model_type="deepseek_v3", required=_SIGMOID)
MIXTURES: Mapping[str, Architecture] = {
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
        stacked=EXPERTS,
        single_rows=frozenset({"ffn_gate_inp_shexp"}),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        fields=MIXTURE,
        constants={"use_sliding_window": False, "norm_topk_prob": True},
        modules={**LLAMA, "ffn_gate_inp": "mlp.gate"},
        stacked=EXPERTS,
        biases=ATTENTION_BIAS,
    ),
    "mellum": Architecture(
        "mellum",
        fields={**MIXTURE, **WINDOWS},
        constants={"norm_topk_prob": True},
        further=windowed_ropes,
        modules={**LLAMA, "ffn_gate_inp": "mlp.gate"},
        stacked=EXPERTS,
        ignored=frozenset({"rope.freq_base_swa"}),
        biases=ATTENTION_BIAS,
    ),
    "cohere2moe": Architecture(
        "cohere2_moe",
        fields={
            **{key: MIXTURE[key] for key in MIXTURE if key != "moe_intermediate_size"},
            **WINDOWS,
            "intermediate_size": "expert_feed_forward_length",
            "prefix_dense_intermediate_size": "feed_forward_length",
            "first_k_dense_replace": "leading_dense_block_count",
            "num_shared_experts": "expert_shared_count",
            "norm_topk_prob": "expert_weights_norm",
            "layer_norm_eps": "attention.layer_norm_epsilon",
            "logit_scale": "logit_scale",
        },
        constants={"norm_topk_prob": False},
        further=cohere_moe_fields,
        modules={**LLAMA, **SHARED, "ffn_gate_inp": "mlp.gate"},
        stacked=EXPERTS,
        ignored=frozenset(
            "expert_gating_func expert_shared_feed_forward_length nextn_predict_layers".split()
        ),
    ),
    "granite_swa": GRANITE_WINDOWS,
    "hy_v3": Architecture(
        "hy_v3",
        fields={
            **MIXTURE,
            "router_scaling_factor": "expert_weights_scale",
            "route_norm": "expert_weights_norm",
        },
        constants={"router_scaling_factor": 1.0},
        further=hunyuan3_fields,
        modules={
            **{**LLAMA, "ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert_bias"},
            **{key: SHARED[key].replace("shared_experts", "shared_mlp") for key in SHARED},
        },
        stacked=EXPERTS,
        ignored=frozenset({"expert_shared_feed_forward_length", "nextn_predict_layers"}),
        required=_SIGMOID,
        biases=ATTENTION_BIAS,
    ),
    "mistral4": replace(
        _DEEPSEEK_V2,
        model_type="mistral4",
        constants={**ROUTED_DEFAULTS, "rope_parameters": UNSCALED},
        further=mistral4_fields,
        ignored=_DEEPSEEK_V2.ignored
        | {f"attention.temperature_{it}" for it in ("scale", "length")},
    ),
    "olmoe": Architecture(
        "olmoe",
        fields={key: MIXTURE[key] for key in MIXTURE if key != "moe_intermediate_size"},
        constants={"norm_topk_prob": False},
        modules={**LLAMA, "ffn_gate_inp": "mlp.gate"},
        stacked=EXPERTS,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        fields={**_ALL_SPARSE, "sliding_window": "attention.sliding_window"},
        constants={"rope_parameters": UNSCALED},
        further=gpt_oss_rope,
        modules={
            **{key: _ATTENTION[key] for key in _ATTENTION if key != "ffn_norm"},
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
        },
        stacked=EXPERTS,
        ignored=frozenset({"feed_forward_length"}),
        biases=ATTENTION_BIAS,
    ),
    "granitemoe": _GRANITE_MOE,
    "glm4moe": _GLM4_MOE,
    "dots1": replace(_GLM4_MOE, model_type="dots1", modules=CORRECTED, biases=ATTENTION_BIAS),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        fields={
            **ROTARY,
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        constants={"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        modules={
            **CORRECTED,
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        stacked=EXPERTS,
        single_rows=frozenset({"exp_probs_b"}),
        ignored=frozenset({"expert_shared_feed_forward_length"}),
        biases={"use_bias": "blk.0.attn_q.bias"},
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        fields={
            **{
                key: ROUTED[key]
                for key in ROUTED
                if key not in ("n_routed_experts", "n_shared_experts")
            },
            **WINDOWS,
            "num_experts": "expert_count",
            "num_shared_experts": "expert_shared_count",
        },
        constants={
            **{key: ROUTED_DEFAULTS[key] for key in ROUTED_DEFAULTS if key != "n_shared_experts"},
            "num_shared_experts": 0,
        },
        further=without_further_layers,
        modules={**CORRECTED, "exp_probs_b.bias": "mlp.e_score_correction_bias"},
        stacked=EXPERTS,
        ignored=frozenset({"expert_shared_feed_forward_length", "nextn_predict_layers"}),
        required=_SIGMOID,
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        fields={**ROTARY, "num_experts": "expert_count", "moe_topk": "expert_used_count"},
        modules={
            **LLAMA,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            **{key: SHARED[key].replace("shared_experts", "shared_mlp") for key in SHARED},
        },
        stacked=EXPERTS,
        ignored=frozenset(
            f"expert_{key}"
            for key in ("feed_forward_length", "shared_feed_forward_length", "shared_count")
        ),
        biases=ATTENTION_BIAS,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        fields=_ALL_SPARSE,
        modules={
            **_ATTENTION,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        stacked=_BLOCK_EXPERTS,
        ignored=frozenset({"feed_forward_length"}),
        required=_SIGMOID,
    ),
    "afmoe": Architecture(
        "afmoe",
        fields={
            **MIXTURE,
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
            "route_scale": "expert_weights_scale",
            "route_norm": "expert_weights_norm",
            **WINDOWS,
        },
        constants={"mup_enabled": True, "num_dense_layers": 0, "route_scale": 1.0},
        modules={
            **CORRECTED,
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        stacked=EXPERTS,
        required=_SIGMOID,
    ),
    "deepseek2": _DEEPSEEK_V2,
    "minicpm3": _MINICPM3,
    "llama4": Architecture(
        "llama4_text",
        fields={
            **_ALL_SPARSE,
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        further=llama4_fields,
        modules={
            **{
                key: _ATTENTION[key] for key in _ATTENTION if not key.endswith(("q_norm", "k_norm"))
            },
            **{key: LLAMA[key].replace("mlp.", "feed_forward.") for key in FEED_FORWARD},
            **{
                key: SHARED[key].replace("mlp.shared_experts", "feed_forward.shared_expert")
                for key in SHARED
            },
            "ffn_gate_inp": "feed_forward.router",
        },
        stacked={key: EXPERTS[key].replace("mlp.", "feed_forward.") for key in EXPERTS},
        biases=ATTENTION_BIAS,
    ),
}
