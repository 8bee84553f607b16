"""`HYBRIDS`: GGUF architectures with short convolutions or Mamba-2, for `architectures`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.gguf.architecture import (
    EXPERTS,
    FEED_FORWARD,
    GRANITE,
    LLAMA,
    MIXTURE,
    ROTARY,
    ROUTED,
    SHARED,
    SIZES,
    Architecture,
    Config,
)
from gptmanager.models.gguf.further_fields import (
    KV_HEADS,
    layers_with_keys,
    without_further_layers,
)
from gptmanager.models.gguf.metadata import Metadata

_HEADS, _INNER, _HIDDEN = "ssm.time_step_rank", "ssm.inner_size", "embedding_length"
_WIDTH, _INTERMEDIATE = "feed_forward_length", "intermediate_size"
_DENSE = ("first_k_dense_replace",)
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
_MAMBA_FIELDS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": _HEADS,
}
_MAMBA_MODULES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_MIXERS = {key: it.replace("mamba.", "mixer.") for key, it in _MAMBA_MODULES.items()}
_MAMBA_BIASES = {
    "mamba_conv_bias": "ssm_conv1d",
    "mamba_proj_bias": "ssm_in",
    "attention_bias": "attn_q",
    "mlp_bias": "ffn_up",
}


_BLOCK_BIASES = {"use_conv_bias": "ssm_conv1d", "use_bias": "ssm_in", "mlp_bias": "ffn_up"}


def _mamba_fields(
    metadata: Metadata, prefix: str, names: Collection[str], config: Config
) -> dict[str, Any]:
    """Return the kinds of the layers, the sizes of Mamba's heads, and which biases exist."""
    sizes = {key: metadata.integer(f"{prefix}{key}") or 0 for key in (_HEADS, _INNER, _HIDDEN)}
    for key, size in sizes.items():
        if size < 1:
            raise metadata.error(f"{prefix}{key}", "must be a positive integer")
    for part in (_HEADS, _HIDDEN):
        if sizes[_INNER] % sizes[part]:
            raise metadata.error(f"{prefix}{_INNER}", f"must be a multiple of {prefix}{part}")
    return {
        **layers_with_keys(metadata, prefix, "mamba"),
        "mamba_d_head": sizes[_INNER] // sizes[_HEADS],
        "mamba_expand": sizes[_INNER] // sizes[_HIDDEN],
        **{
            field: any(name.endswith(f".{module}.bias") for name in names)
            for field, module in _MAMBA_BIASES.items()
        },
    }


def _bamba_fields(
    metadata: Metadata, prefix: str, names: Collection[str], config: Config
) -> dict[str, Any]:
    """Return the same as `_mamba_fields`, with a list of the layers that have attention."""
    found = _mamba_fields(metadata, prefix, names, config)
    types = found.pop("layer_types")
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    return {**found, "attn_layer_indices": full}


def _block_fields(
    metadata: Metadata, prefix: str, names: Collection[str], config: Config
) -> dict[str, Any]:
    """Return the fields of Nemotron-H that a file has for each layer, and which biases exist."""
    found = {**config, **without_further_layers(metadata, prefix, names, config)}
    num_layers = metadata.integer(f"{prefix}block_count") or 0
    types = dict(layers_with_keys(metadata, prefix, "mamba"))
    widths, kinds = metadata.numbers(f"{prefix}{_WIDTH}", num_layers), types.pop("layer_types")
    for layer, width in enumerate(widths):
        if width and kinds[layer] == "mamba":
            kinds[layer] = "moe" if f"blk.{layer}.ffn_gate_inp.weight" in names else "mlp"
    heads, inner = (metadata.integer(f"{prefix}{it}") or 0 for it in (_HEADS, _INNER))
    if heads < 1 or inner % heads:
        raise metadata.error(f"{prefix}{_INNER}", f"must be a multiple of {prefix}{_HEADS}")
    return {
        **found,
        **types,
        "layers_block_type": kinds[: found["num_hidden_layers"]],
        "intermediate_size": max(widths, default=0),
        "mamba_head_dim": inner // heads,
        **{
            field: any(name.endswith(f".{module}.bias") for name in names)
            for field, module in _BLOCK_BIASES.items()
        },
    }


_NEMOTRON_H = Architecture(
    "nemotron_h",
    fields={
        **{key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", _INTERMEDIATE)},
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "n_groups": "ssm.group_count",
        "mamba_num_heads": _HEADS,
    },
    further=_block_fields,
    layer="backbone.layers.{}.",
    modules={
        **{
            "attn_norm": "norm",
            "attn_output": "mixer.o_proj",
            **{f"attn_{it}": f"mixer.{it}_proj" for it in ("q", "k", "v")},
            **{f"ffn_{it}": f"mixer.{it}_proj" for it in ("up", "down")},
        },
        **_MIXERS,
    },
    outside={
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
    },
    ignored=frozenset({KV_HEADS, _INNER, _WIDTH, "rope.dimension_count"}),
    required={
        "rope.scaling.finetuned": False,
        **dict.fromkeys(("expert_group_count", "expert_group_used_count"), 1),
    },
)
_LFM2 = Architecture(
    "lfm2",
    fields=_FIELDS,
    constants={"block_auto_adjust_ff_dim": False},
    further=lambda metadata, prefix, *_: layers_with_keys(metadata, prefix, "conv"),
    modules=_MODULES,
    outside={
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output": "lm_head",
    },
    ignored=frozenset({KV_HEADS}),
)
HYBRIDS: Mapping[str, Architecture] = {
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
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H,
        fields={
            **_NEMOTRON_H.fields,
            **{key: ROUTED[key] for key in ROUTED if key not in ROTARY and key not in _DENSE},
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "moe_latent_size": "moe_latent_size",
        },
        constants={"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        modules={
            **_NEMOTRON_H.modules,
            **{f"ffn_{it}_shexp": f"mixer.shared_experts.{it}_proj" for it in ("up", "down")},
            "ffn_gate_inp": "mixer.gate",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        stacked={f"ffn_{it}_exps": f"mixer.experts.{{}}.{it}_proj" for it in ("up", "down")},
        ignored=_NEMOTRON_H.ignored | {"nextn_predict_layers"},
        required={"rope.scaling.finetuned": False, "expert_shared_count": 1},
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        fields={
            **{key: GRANITE[key] for key in GRANITE if key != "num_key_value_heads"},
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "shared_intermediate_size": "expert_shared_feed_forward_length",
            **_MAMBA_FIELDS,
        },
        further=_mamba_fields,
        permuted=True,
        modules={
            **LLAMA,
            **SHARED,
            "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **_MAMBA_MODULES,
        },
        stacked=EXPERTS,
        ignored=frozenset({KV_HEADS, _INNER}),
        required={"rope.scaling.finetuned": False},
    ),
}
# "granitehybrid" with RoPE
BAMBA = Architecture(
    "bamba",
    fields={
        **{key: ROTARY[key] for key in ROTARY if key != "num_key_value_heads"},
        **_MAMBA_FIELDS,
    },
    further=_bamba_fields,
    permuted=True,
    modules={
        **LLAMA,
        **_MAMBA_MODULES,
        "ffn_norm": "pre_ff_layernorm",
        **{module: LLAMA[module].replace("mlp.", "feed_forward.") for module in FEED_FORWARD},
    },
    outside={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.final_layernorm",
        "output": "lm_head",
    },
    ignored=frozenset({KV_HEADS, _INNER}),
    required={"rope.scaling.finetuned": True},
)
