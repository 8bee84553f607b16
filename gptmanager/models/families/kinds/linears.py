"""Families with linear attention in most layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.kernels.recurrent.delta_formulas import DeltaShape
from gptmanager.models.families import readers
from gptmanager.models.families.base import BIASED_ATTENTION, llama_fields
from gptmanager.models.families.family import ROTARY_BUFFERS, Family
from gptmanager.models.families.layer_types import LINEAR
from gptmanager.models.families.names import (
    EXPERTS,
    IN_ONE,
    ONLY_EXPERTS,
    SHARED_EXPERT,
    layer_names,
    llama_names,
)
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import Fields
from gptmanager.models.recurrent.delta_rule import DeltaRule
from gptmanager.models.spec import Norms

_STATE = {
    "q": None,
    "gated_q": "self_attn.q_proj",
    "delta_conv": "linear_attn.conv1d",
    "delta_decay": "linear_attn.A_log",
    "delta_step": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm",
    "delta_out": "linear_attn.out_proj",
}
_JOINED = {"delta_qkvz": "linear_attn.in_proj_qkvz", "delta_ba": "linear_attn.in_proj_ba"}
_IN_GGUF = {"delta_qkv": "linear_attn.in_proj_qkv", "delta_z": "linear_attn.in_proj_z"}
_SEPARATE = {
    **_IN_GGUF,
    "delta_b": "linear_attn.in_proj_b",
    "delta_a": "linear_attn.in_proj_a",
}
_PREDICTORS = re.compile(rf"{ROTARY_BUFFERS.pattern}|^mtp\.")


def _attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return further fields of a layer's `Attention`.

    A layer with linear attention is recurrent and has no RoPE. A layer with full attention is
    `gated`. Raise ConfigError for activations that linear attention does not support.
    """
    delta = DeltaShape(
        key_heads=fields.size("linear_num_key_heads"),
        value_heads=fields.size("linear_num_value_heads"),
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        width=fields.size("linear_conv_kernel_dim"),
    )
    if delta.value_heads % delta.key_heads:
        need = f"must be a multiple of {fields.as_given('linear_num_key_heads')}"
        raise fields.error("linear_num_value_heads", need)
    is_linear = fields.layer_type(layer) == LINEAR
    if is_linear and fields.get("hidden_act") not in ("silu", "swish"):
        raise fields.error("hidden_act", "must be 'silu' with linear attention, which applies it")
    return {"rope": None, "recurrent": DeltaRule(delta)} if is_linear else {"gated": True}


_DENSE = replace(
    BIASED_ATTENTION,
    title="Qwen3.5, 3.6 (dense, text)",
    tensors=llama_names(**_STATE, **_SEPARATE),
    ignored=_PREDICTORS,
    defaults=llama_fields(
        max_position_embeddings=32768,
        num_key_value_heads=4,
        head_dim=256,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
    norms=Norms(plus_one=True, query_key="head"),
    windows="linear",
    neutral={"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
    attention=_attention,
)
LINEARS: Mapping[str, Family] = {
    "qwen3_next": replace(
        _DENSE,
        title="Qwen3-Next",
        tensors=llama_names(**_STATE, **_JOINED, **EXPERTS, **SHARED_EXPERT),
        other_tensors=layer_names(**IN_ONE, **_IN_GGUF),
        defaults={
            **_DENSE.defaults,
            "num_key_value_heads": 2,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        experts=experts_of(
            "num_experts",
            shared="shared_expert_intermediate_size",
            shared_gate=True,
            is_dense=readers.sparse_steps_dense,
        ),
    ),
    "qwen3_5_text": _DENSE,
    "qwen3_5_moe_text": replace(
        _DENSE,
        title="Qwen3.5, 3.6 MoE (text)",
        tensors=llama_names(**_STATE, **_SEPARATE, **ONLY_EXPERTS, **SHARED_EXPERT),
        other_tensors=layer_names(**IN_ONE),
        spellings={**_DENSE.spellings, "intermediate_size": "moe_intermediate_size"},
        defaults={
            **_DENSE.defaults,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        experts=experts_of(
            "num_experts",
            renormalize=True,
            shared="shared_expert_intermediate_size",
            shared_gate=True,
        ),
    ),
}
