"""The families Gemma 1 to 4, which scale their embeddings.

Checkpoints of Gemma 1 to 3 store the weights of norms minus 1. In Gemma 4, the number and size of
KV heads differ between layers, keys may be used as values, the last layers may read the keys and
values of earlier layers, and experts run in parallel with an MLP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.base import (
    BIASED_ATTENTION,
    FOUR_NORMS,
    RMS_EPS,
    llama_fields,
)
from gptmanager.models.families.family import Family
from gptmanager.models.families.layer_types import FULL
from gptmanager.models.families.names import SANDWICH, layer_names, llama_names, switched
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Experts, Norms, TokenInputs

_HEAD_FIELDS = {"head_dim", "num_key_value_heads"}
_LAYER = re.compile(r"[0-9]{1,9}")


def _network(fields: Fields) -> Mapping[str, Any]:
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise fields.error("use_bidirectional_attention", "must be null or 'vision'")
    found: dict[str, Any] = {
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }
    given = fields.get("hidden_size_per_layer_input")
    width = 0 if given is None else fields.count("hidden_size_per_layer_input")
    fields.note_read("vocab_size_per_layer_input", "pad_token_id")
    if not width:
        return found
    known = fields.size("vocab_size_per_layer_input")
    if known < fields.size("vocab_size"):
        need = f"must be at least {fields.as_given('vocab_size')}"
        raise fields.error("vocab_size_per_layer_input", need)
    padding = 0 if fields.get("pad_token_id") is None else fields.count("pad_token_id")
    if padding >= known:
        need = f"must be less than {fields.as_given('vocab_size_per_layer_input')}"
        raise fields.error("pad_token_id", need)
    return {**found, "token_inputs": TokenInputs(width, known, padding)}


def _attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    found = {"scale": 1.0, **_heads(fields, layer)}
    is_full = fields.layer_type(layer) == FULL
    if layer == fields.size("num_hidden_layers") - 1 and not is_full:
        raise fields.error("layer_types", f"must be {FULL!r} for the last layer")
    first = _first_shared(fields)
    if layer >= first:
        kind = fields.layer_type(layer)
        same = next((it for it in range(first)[::-1] if fields.layer_type(it) == kind), None)
        if same is None or _heads(fields, same) != _heads(fields, layer):
            need = f"no earlier layer of {kind} has the same heads as layer {layer}"
            raise fields.error("num_kv_shared_layers", need)
        return {**found, "kv_layer": same}
    return {**found, "keys_as_values": is_full and fields.flag("attention_k_eq_v")}


def _heads(fields: Fields, layer: int) -> Mapping[str, int]:
    """Return `num_kv_heads` and `head_dim` of a layer, each only if the layer has its own value."""
    given, is_full = fields.get("per_layer_config"), fields.layer_type(layer) == FULL
    fields.note_read("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v")
    if given is None and not is_full:
        return {}
    if given is None:
        source = fields
        names = {"head_dim": "global_head_dim"}
        own_heads = "num_global_key_value_heads"
        if fields.flag("attention_k_eq_v") and fields.get(own_heads) is not None:
            names["num_kv_heads"] = own_heads
    else:
        own = fields.once("per_layer_config", lambda: _by_layer(fields)).get(layer, {})
        if not isinstance(own, Mapping):
            raise fields.error("per_layer_config", "must be an object of objects by layer")
        if own.keys() - _HEAD_FIELDS:
            raise fields.error("per_layer_config", f"may only have {sorted(_HEAD_FIELDS)}")
        source = Fields(own, {}, {}, f"config.json: per_layer_config.{layer}.")
        known = {"head_dim": "head_dim", "num_kv_heads": "num_key_value_heads"}
        names = {ours: theirs for ours, theirs in known.items() if theirs in own}
    found = {ours: source.size(theirs) for ours, theirs in names.items()}
    if found.get("head_dim", 2) % 2:
        raise source.error(names["head_dim"], "must be even, because rotation needs pairs")
    heads = fields.size("num_attention_heads")
    if heads % found.get("num_kv_heads", 1):
        need = f"must divide {fields.as_given('num_attention_heads')}"
        raise source.error(names["num_kv_heads"], need)
    return found


def _by_layer(fields: Fields) -> Mapping[int, Any]:
    given = fields.get("per_layer_config")
    if not isinstance(given, Mapping) or not all(map(_LAYER.fullmatch, map(str, given))):
        raise fields.error("per_layer_config", "must be an object of objects by layer")
    return {int(it): given[it] for it in given}  # "05" is layer 5


def _mlp(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return the MLP width of a layer if it is doubled, otherwise no fields.

    `use_double_wide_mlp` doubles the MLP width of the layers that read the keys of another layer.
    """
    is_wide = fields.flag("use_double_wide_mlp") and layer >= _first_shared(fields)
    return {"width": 2 * fields.size("intermediate_size")} if is_wide else {}


def _experts(fields: Fields, layer: int) -> tuple[Experts, int] | None:
    """Return the experts in parallel with the MLP of a layer, if the config has experts."""
    fields.note_read("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block"):
        return None
    for field in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        fields.size(field)
    found = _ROUTED(fields, layer)
    assert found is not None
    shared = _mlp(fields, layer).get("width", fields.size("intermediate_size"))
    return replace(found[0], shared_width=shared, apart=True), found[1]


_ROUTED = experts_of("num_experts", per_token="top_k_experts", renormalize=True)


def _first_shared(fields: Fields) -> int:
    """Return the index of the first layer that reads the keys and values of another layer.

    If no layer does, return the number of layers.
    """
    num_layers = fields.size("num_hidden_layers")
    shared = fields.count("num_kv_shared_layers")
    if shared >= num_layers:
        need = f"must be less than {fields.as_given('num_hidden_layers')}"
        raise fields.error("num_kv_shared_layers", need)
    return num_layers - shared


_GEMMA4 = replace(
    BIASED_ATTENTION,
    title="Gemma 4",
    tensors={
        **llama_names(
            **SANDWICH,
            scale="layer_scalar",
            token_gate="per_layer_input_gate",
            token_out="per_layer_projection",
            token_out_norm="post_per_layer_input_norm",
            gate=None,
            up=None,
            down=None,
            dense_gate="mlp.gate_proj",
            dense_up="mlp.up_proj",
            dense_down="mlp.down_proj",
            router="router.proj",
            router_norm="router.scale",
            expert_factors="router.per_expert_scale",
            stacked_up="experts.gate_up_proj",
            stacked_down="experts.down_proj",
            experts_norm="pre_feedforward_layernorm_2",
            experts_out_norm="post_feedforward_layernorm_2",
            shared_out_norm="post_feedforward_layernorm_1",
        ),
        "model.embed_tokens_per_layer": ("token_embedding", None),
        "model.per_layer_model_projection": ("token_projection", None),
        "model.per_layer_projection_norm": ("token_norm", None),
    },
    other_tensors=layer_names(
        **switched("experts.switch_glu"),
        expert_gate="experts.{}.gate_proj",
        expert_up="experts.{}.up_proj",
        expert_down="experts.{}.down_proj",
    ),
    # in some checkpoints, layers that read the keys of another layer have unused projections
    ignored=re.compile(r"rotary_emb|\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."),
    spellings={**RMS_EPS, "hidden_act": "hidden_activation"},
    defaults=llama_fields(
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=131072,
        head_dim=256,
        global_head_dim=512,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        sliding_window=512,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    ),
    norms=replace(FOUR_NORMS, query_key="head", value=True),
    windows=6,
    scaled=True,
    network=_network,
    attention=_attention,
    mlp=_mlp,
    experts=_experts,
)
_GEMMA_NORMS = replace(FOUR_NORMS, plus_one=True)
_GEMMA = replace(
    BIASED_ATTENTION,
    title="Gemma 1",
    defaults=llama_fields(
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=8192,
        head_dim=256,
        num_key_value_heads=16,
        tie_word_embeddings=True,
    ),
    norms=Norms(plus_one=True),
    activation="gelu_tanh",
    network=readers.gemma1_network,
)
_WINDOWED = {
    **_GEMMA.defaults,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = replace(
    _GEMMA,
    title="Gemma 2",
    tensors=llama_names(**SANDWICH),
    spellings={**RMS_EPS, "hidden_act": "hidden_activation"},
    defaults={**_WINDOWED, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    norms=_GEMMA_NORMS,
    activation=None,
    windows=2,
    network=readers.gemma_network,
    attention=readers.gemma_attention,
)
_GEMMA3 = replace(
    _GEMMA2,
    title="Gemma 3",
    defaults={
        **_WINDOWED,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
    },
    norms=replace(_GEMMA_NORMS, query_key="head"),
    windows="pattern",
    attention=readers.query_scale,
)
GEMMAS: Mapping[str, Family] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "vaultgemma": replace(
        _GEMMA2,
        title="VaultGemma",
        tensors=llama_names(mlp_norm="pre_feedforward_layernorm"),
        norms=Norms(plus_one=True),
    ),
}
