"""Llama 4: attention in chunks, layers without RoPE, experts with scaled inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.base import BIASED_ATTENTION, llama_fields
from gptmanager.models.families.names import layer_names, llama_names, switched
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Norms, QueryTemperature


def _attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return the fields of attention in a layer without RoPE, with its query temperature, if any.

    For a layer with RoPE, return no fields.
    """
    found = readers.unrotated_layers(fields, layer)
    tuning = fields.get("attn_temperature_tuning")
    fields.note_read("attn_scale", "floor_scale")
    if type(tuning) is int:  # the first checkpoints have 4 instead of true
        tuning = tuning > 0
    elif tuning is not None and not isinstance(tuning, bool):
        raise fields.error("attn_temperature_tuning", "must be true or false")
    if not found or not tuning:
        return found
    length = fields.size("floor_scale")
    return {**found, "temperature": QueryTemperature(fields.number("attn_scale"), length, offset=1)}


def _is_dense(fields: Fields, layer: int) -> bool:
    step = fields.size("interleave_moe_layer_step")
    if fields.get("moe_layers") is None:
        return (layer + 1) % step != 0
    return layer not in fields.layers("moe_layers")


LLAMA4 = replace(
    BIASED_ATTENTION,
    title="Llama 4",
    tensors=llama_names(
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        router="feed_forward.router",
        transposed_up="feed_forward.experts.gate_up_proj",
        transposed_down="feed_forward.experts.down_proj",
        shared_gate_proj="feed_forward.shared_expert.gate_proj",
        shared_up="feed_forward.shared_expert.up_proj",
        shared_down="feed_forward.shared_expert.down_proj",
    ),
    other_tensors=layer_names(
        **switched("feed_forward.experts"),
        expert_gate="feed_forward.experts.{}.gate_proj",
        expert_up="feed_forward.experts.{}.up_proj",
        expert_down="feed_forward.experts.{}.down_proj",
    ),
    defaults=llama_fields(
        norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        use_qk_norm=True,
        no_rope_layer_interval=4,
        attention_chunk_size=8192,
        attn_temperature_tuning=True,
        floor_scale=8192,
        attn_scale=0.1,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    ),
    norms=Norms(query_key="rotated"),
    qk_norm="use_qk_norm",
    interleaved=True,
    windows="chunks",
    attention=_attention,
    mlp=lambda fields, _: {"width": fields.size("intermediate_size_mlp")},
    experts=readers.experts_of(
        "num_local_experts",
        width="intermediate_size",
        score="sigmoid_of_best",
        renormalize=False,
        shared="intermediate_size",
        is_dense=_is_dense,
    ),
)
