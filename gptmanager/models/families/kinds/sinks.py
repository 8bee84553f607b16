"""Families with attention sinks: learned scores that add to the denominator of the softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.base import PLAIN, llama_fields
from gptmanager.models.families.family import Family
from gptmanager.models.families.kinds.llamas import LLAMAS
from gptmanager.models.families.kinds.mixtures import MIXTURES
from gptmanager.models.families.names import (
    BY_EXPERT,
    SWITCHED_EXPERTS,
    layer_names,
    llama_names,
)
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import Fields

_WINDOWS = {"sliding_window": 128, "layer_rope_theta": None}
_SINKS = {"model.layers.{}.self_attn.sinks": ("sinks", None)}


def _granite_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return fields of the attention. `layer_rope_theta` has the base of RoPE in each layer."""
    found = {**readers.granite_attention(fields, layer), "sinks": True}
    given, num_layers = fields.get("layer_rope_theta"), fields.size("num_hidden_layers")
    if given is None:
        return found
    if not isinstance(given, list) or len(given) != num_layers:
        raise fields.error("layer_rope_theta", f"must be a list of {num_layers} numbers")
    own = Fields({"layer_rope_theta": given[layer]}, {}, {})
    theta = own.number_or_zero("layer_rope_theta")
    if 0 < theta <= 1:
        raise own.error("layer_rope_theta", "must be 0, for a layer without RoPE, or above 1")
    return {**found, "rope_theta": theta} if theta else {**found, "rope": None}


SINKS: Mapping[str, Family] = {
    "gpt_oss": replace(
        PLAIN,
        title="gpt-oss",
        tensors=llama_names(
            gate=None,
            up=None,
            down=None,
            sinks="self_attn.sinks",
            router="mlp.router",
            mixed_up="mlp.experts.gate_up_proj",
            mixed_down="mlp.experts.down_proj",
        ),
        other_tensors=layer_names(**BY_EXPERT, **SWITCHED_EXPERTS),
        defaults=llama_fields(
            norm_eps=1e-5,
            max_position_embeddings=131072,
            num_key_value_heads=8,
            head_dim=64,
            attention_bias=True,
            sliding_window=128,
            num_local_experts=128,
            num_experts_per_tok=4,
            rope_theta=150000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        activation="clamped_swiglu",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        windows=2,
        neutral={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "initial_context_length": 4096},
        attention=lambda *_: {"sinks": True},
        experts=experts_of(
            "num_local_experts",
            width="intermediate_size",
            score="softmax_of_best",
            renormalize=False,
            router_bias=True,
            bias=True,
        ),
    ),
    "granite_swa": replace(
        LLAMAS["granite"],
        title="Granite with windows",
        tensors={**LLAMAS["granite"].tensors, **_SINKS},
        defaults={
            **LLAMAS["granite"].defaults,
            **_WINDOWS,
            "norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        windows=-4,
        attention=_granite_attention,
    ),
    "granitemoe_swa": replace(
        MIXTURES["granitemoeshared"],
        title="Granite MoE with windows",
        tensors={**MIXTURES["granitemoeshared"].tensors, **_SINKS},
        other_tensors={
            **MIXTURES["granitemoeshared"].other_tensors,
            **layer_names(  # names in packed checkpoints
                **{it: BY_EXPERT[it].replace("mlp", "block_sparse_moe") for it in BY_EXPERT}
            ),
        },
        defaults={**MIXTURES["granitemoeshared"].defaults, **_WINDOWS},
        windows=-4,
        attention=_granite_attention,
    ),
}
