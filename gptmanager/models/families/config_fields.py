"""`refuse_unread`: rejects config fields that no reader has read and that may have an effect.

Without this check, a config with a feature that its family does not implement would lead to wrong
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gptmanager.models.fields import OURS_ALONE, Fields

# Fields that change what some families compute -> the value with which the field has no effect.
_NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attention_chunk_size": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "compression_ratio": 1.0,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "logits_scaling": 1.0,
    "n_group": 1,
    "num_experts": 0,
    "num_local_experts": 0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "residual_multiplier": 1.0,
    "routed_scaling_factor": 1.0,
    "scale_attn_weights": True,
    "topk_group": 1,
}
# Fields in which published configs of a family say what the family always does -> their values. A
# tuple has several values. transformers ignores these fields.
_OF_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "dots1": {
        "scoring_func": ("noaux_tc", "sigmoid"),
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "seq_aux": True,
    },
    "ernie4_5": {"use_rmsnorm": True},
    "ernie4_5_moe": {
        "use_rmsnorm": True,
        "moe_gate": "topk",
        "moe_gate_act": "softmax",
        "moe_use_aux_free": True,
    },
    "exaone_moe": {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_last_k_dense_replace": 1,
    },
    "gemma2": {"sliding_window_size": 4096},  # equal to `sliding_window`, which is read
    "glm4_moe": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "granitemoe": {"position_embedding_type": "rope"},
    "granitemoehybrid": {"normalization_function": "rmsnorm"},
    "granitemoeshared": {"position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"norm_type": "rms", "use_qk_norm": True, "use_rotary_pos_emb": True},
    "hunyuan_v1_moe": {
        **{"norm_type": "rms", "use_qk_norm": True, "use_rotary_pos_emb": True},
        **{"anyres_pooling_size": 2, "num_media_embeds": 257, "unpad_fix": True},
        **{"n_group": (1, False), "topk_group": (1, False), "routed_scaling_factor": (1.0, False)},
    },
    "minicpm": {"mup_denominator": 32},  # for a draft model
    "minimax_m2": {
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 8192,
        "shared_moe_mode": "sigmoid",
        "swa_rope_theta": -1.0,
    },
    "nemotron": dict.fromkeys(
        ("rope_percent", "rope_percentage", "rotary_percent", "rotary_percentage"), 0.5
    ),
    "opt": {"learned_embeddings": True},
    "qwen3_moe": {"use_qk_norm": True},
    "solar_open": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "stablelm": {"rope_pct": 0.25, "num_heads": 32},  # `num_attention_heads` is read
    "starcoder2": {  # `hidden_act` and `norm_epsilon` are read
        "activation_function": ("gelu", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": 1e-5,
    },
}
# Ignored: fields of training, generation, bookkeeping, task heads, and the order of arithmetic.
_IGNORED = re.compile(
    r"_.*|.*(dropout|drop_rate|layerdrop|pdrop|dropout_p|jitter_noise)|.*(initializer|init_std).*"
    r"|.*(_init_scale|xavier_init)"
    r"|.*_token_id|.*_token_ids|.*_token_index|.*loss.*|aux_.*|summary_.*|output_.*|transformers.*"
    r"|unsloth.*|use_cache|use_flash_attn|use_return_dict|return_dict.*|auto_map|architectures"
    r"|torch_dtype|dtype|model_type|model_name|name_or_path|name|id2label|label2id|num_labels"
    r"|problem_type|pretraining_tp|reorder_and_upcast_attn|attention_softmax_in_fp32"
    r"|scale_attention_softmax_in_fp32|chunk_size_feed_forward|tokenizer_class|task_specific_params"
    r"|cache_implementation|gradient_checkpointing.*|tf_legacy_loss|use_bfloat16|torchscript"
    r"|is_decoder|cross_attention_hidden_size|finetuning_task|prefix|n_ctx|ep_size|seq_length"
    r"|.*_class|(vision|audio|perceiver)_config|pixel_shuffle_factor|rope_type|pruned_heads"
    r"|tie_encoder_decoder|encoder_no.*"
    r"|(temperature|top_k|top_p|typical_p|num_beams|num_return_sequences|repetition_penalty"
    r"|length_penalty|no_repeat_ngram_size|min_length|max_length|do_sample|early_stopping"
    r"|diversity_penalty|num_beam_groups|bad_words_ids|begin_suppress_tokens|suppress_tokens"
    r"|remove_invalid_values|exponential_decay_length_penalty|forced_.*)"
    r"|embd_layer|bos_token|eos_token|pad_token|language|license|tags|base_model.*|quantization"
    r"|attn_implementation|num_nextn_predict_layers|num_logits_to_keep|original_.*|model_max_length"
    r"|max_seq(uence)?_len(gth)?|use_parallel_embedding|keys_to_ignore_at_inference"
    r"|is_\w+_config|init_method|moe_capacity|kv_channels|attention_head_dim|cla_share_factor"
    r"|.*_(start|end|newline|init)_id|pad_id|org_vocab_size|pool_type|dense_list"
    r"|is_composition|experts_per_token|use_mtp|num_mtp_modules|mtp_.*"
    r"|custom_pipelines|predict_special_tokens|fused?_.*|ignored?_index|load_balance.*"
)


def refuse_unread(fields: Fields, neutral: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unread field that may change what the network computes.

    `neutral`: unread fields of the family -> the only value, besides None, that is accepted.
    """
    of_family = _OF_FAMILIES.get(fields.get("model_type"), {})
    same = {name: fields.get(name) for name in OURS_ALONE}
    known = {**_NEUTRAL, **same, **of_family, **neutral}
    unread = fields.unread()
    plain = Fields(unread, {}, {})  # for errors with the config's own names
    for field, value in unread.items():
        if field in known:
            allowed = known[field] if isinstance(known[field], tuple) else (known[field],)
            if value is not None and value not in allowed:
                raise plain.error(field, "not supported")
        elif not _IGNORED.fullmatch(field) and not _is_off(value):
            raise plain.error(
                field,
                "an unknown field, which may change what the network computes; remove it from "
                "config.json if it does not",
            )


def _is_off(value: Any) -> bool:
    """Return whether a value means that a feature is absent."""
    return value is None or value is False or value in (0, "", [], {})
