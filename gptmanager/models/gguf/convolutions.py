"""`CONVOLUTIONS`: GGUF architectures with short convolutions, for the table in `architectures`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.gguf.architecture import MIXTURE, ROTARY, Architecture, Config
from gptmanager.models.gguf.metadata import Metadata

_KV_HEADS = "attention.head_count_kv"
_FIELDS: Mapping[str, str] = {
    **{key: ROTARY[key] for key in ROTARY if key not in ("rms_norm_eps", "num_key_value_heads")},
    "norm_eps": ROTARY["rms_norm_eps"],
    "conv_L_cache": "shortconv.l_cache",
}
_FEED_FORWARD = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
_MODULES: Mapping[str, str] = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    **{module: f"feed_forward.{theirs}" for module, theirs in _FEED_FORWARD.items()},
}


def _fields(metadata: Metadata, prefix: str, _: Collection[str], config: Config) -> dict[str, Any]:
    """Return the kinds of the layers: a layer with a convolution has 0 KV heads."""
    key, num_layers = f"{prefix}{_KV_HEADS}", metadata.integer(f"{prefix}block_count")
    counts = metadata.numbers(key, num_layers or 0)
    others = {*counts} - {0}
    if len(others) != 1:
        raise metadata.error(key, "must have the same number for all layers with attention")
    return {
        "num_key_value_heads": others.pop(),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
    }


_LFM2 = Architecture(
    "lfm2",
    fields=_FIELDS,
    constants={"block_auto_adjust_ff_dim": False},
    further=_fields,
    modules=_MODULES,
    outside={
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output": "lm_head",
    },
    ignored=frozenset({_KV_HEADS}),
)
CONVOLUTIONS: Mapping[str, Architecture] = {
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        fields={
            **_FIELDS,
            **{key: MIXTURE[key] for key in MIXTURE if key not in ROTARY},
            "num_dense_layers": "leading_dense_block_count",
        },
        constants={},
        modules={
            **_MODULES,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        stacked={
            f"{module}_exps": f"feed_forward.experts.{{}}.{theirs}"
            for module, theirs in _FEED_FORWARD.items()
        },
        required={"expert_gating_func": 2},
    ),
}
