"""Families with the state spaces of Mamba-2 in most layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.kernels.recurrent.state_space_formulas import StateSpaceShape
from gptmanager.models.families import readers
from gptmanager.models.families.base import LLAMA, llama_fields
from gptmanager.models.families.family import Family
from gptmanager.models.families.kinds.llamas import LLAMAS
from gptmanager.models.families.kinds.mixtures import GRANITE_IN_ONE
from gptmanager.models.families.layer_types import LINEAR
from gptmanager.models.families.names import (
    BY_EXPERT,
    DENSE,
    SWITCHED_BLOCK,
    layer_names,
    llama_names,
)
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import Fields
from gptmanager.models.recurrent.state_space import StateSpace

_MODULES = {
    "space_in": "in_proj",
    "space_conv": "conv1d",
    "space_decay": "A_log",
    "space_step": "dt_bias",
    "space_skip": "D",
    "space_norm": "norm",
    "space_out": "out_proj",
}


def mamba_names(module: str) -> dict[str, str]:
    """Return the names of the modules of a state space, for `layer_names`."""
    return {ours: f"{module}.{theirs}" for ours, theirs in _MODULES.items()}


# The only limits with which transformers computes prompts and new tokens in the same way, as it
# writes them
_NO_LIMITS = (math.inf, "Infinity", {"__float__": "Infinity"})
_FIELDS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_OF_TRAINING = ("mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor")


def read_state_space(fields: Fields, head_dim: int) -> StateSpace:
    """Return a state space with heads of `head_dim` elements.

    The output of each group of heads is normalized by itself.
    """
    heads, groups = fields.size("mamba_n_heads"), fields.size("mamba_n_groups")
    if heads % groups:
        raise fields.error("mamba_n_groups", f"must divide {fields.as_given('mamba_n_heads')}")
    limits = fields.get("time_step_limit")
    is_pair = isinstance(limits, (list, tuple)) and len(limits) == 2
    if limits is not None and not (is_pair and limits[0] == 0 and limits[1] in _NO_LIMITS):
        raise fields.error("time_step_limit", "must be [0.0, Infinity]")
    fields.note_read(*_OF_TRAINING)
    width, state = fields.size("mamba_d_conv"), fields.size("mamba_d_state")
    return StateSpace(
        StateSpaceShape(heads, head_dim, state, groups, width, norm_groups=groups),
        biased=fields.flag("mamba_proj_bias"),
        conv_biased=fields.flag("mamba_conv_bias"),
    )


def _state_space(fields: Fields) -> StateSpace:
    heads = fields.size("mamba_n_heads")
    inner = fields.size("mamba_expand") * fields.size("hidden_size")
    is_auto = fields.get("mamba_d_head") == "auto"
    head_dim = inner // heads if is_auto else fields.size("mamba_d_head")
    if heads * head_dim != inner:
        need = f"with heads of {head_dim}, must be {inner}: mamba_expand x hidden_size"
        raise fields.error("mamba_n_heads", need)
    if fields.get("hidden_act") not in ("silu", "swish"):
        raise fields.error("hidden_act", "must be 'silu' with Mamba layers, which apply it")
    return read_state_space(fields, head_dim)


def _recurrent(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return further fields of a layer's `Attention`: its state space, if it has one."""
    if fields.layer_type(layer) != LINEAR:
        return {}
    own = fields.once("state space", lambda: _state_space(fields))
    return {"rope": None, "recurrent": own}


def _granite_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    return _recurrent(fields, layer) or readers.granite4_attention(fields, layer)


def _bamba_network(fields: Fields) -> Mapping[str, Any]:
    """Refuse a share of rotated dimensions other than a half, which transformers assumes."""
    head_dim = fields.size("hidden_size") // fields.size("num_attention_heads")
    half = fields.size("head_dim", head_dim) // 2
    for name, value in (("partial_rotary_factor", 0.5), ("attn_rotary_emb", half)):
        if fields.get(name) not in (None, value):
            raise fields.error(name, f"must be {value}: transformers rotates half of each head")
    return {}


def _granite_network(fields: Fields) -> Mapping[str, Any]:
    """Return Granite's scales. Without Mamba layers, their fields have no effect."""
    if LINEAR not in fields.layer_types:
        unread = (it for it in fields.unread() if it.startswith(("mamba_", "time_step_")))
        fields.note_read(*unread)
    return readers.granite_scales(fields)


STATE_SPACES: Mapping[str, Family] = {
    "bamba": replace(
        LLAMA,
        title="Bamba",
        tensors=llama_names(
            **mamba_names("mamba"),
            mlp_norm="pre_ff_layernorm",
            gate="feed_forward.gate_proj",
            up="feed_forward.up_proj",
            down="feed_forward.down_proj",
            final_norm="model.final_layernorm",
        ),
        defaults=llama_fields(
            norm_eps=1e-5,
            max_position_embeddings=262144,
            num_key_value_heads=8,
            partial_rotary_factor=0.5,
            attn_layer_indices=None,
            **_FIELDS,
        ),
        windows="mamba",
        network=_bamba_network,
        attention=_recurrent,
    ),
    "granitemoehybrid": replace(
        LLAMAS["granite"],
        title="Granite 4",
        tensors=llama_names(
            **mamba_names("mamba"),
            **dict.fromkeys(DENSE),
            dense_gate_up="shared_mlp.input_linear",
            dense_down="shared_mlp.output_linear",
            router="block_sparse_moe.router.layer",
            stacked_up="block_sparse_moe.input_linear.weight",
            stacked_down="block_sparse_moe.output_linear.weight",
        ),
        other_tensors={
            **layer_names(**BY_EXPERT, **SWITCHED_BLOCK, **GRANITE_IN_ONE),
            **layer_names(**{f"dense_{it}": f"mlp.{it}_proj" for it in ("gate", "up", "down")}),
            **layer_names(
                dense_gate="mlp.shared_experts.gate_proj", dense_up="mlp.shared_experts.up_proj"
            ),
        },
        spellings={**LLAMAS["granite"].spellings, "layer_types": "layers_block_type"},
        defaults={
            **LLAMAS["granite"].defaults,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "position_embedding_type": None,
            **_FIELDS,
        },
        mlp_bias=False,
        windows="mamba",
        network=_granite_network,
        attention=_granite_attention,
        mlp=lambda fields, _: {"width": fields.size("shared_intermediate_size")},
        experts=experts_of(
            "num_local_experts",
            width="intermediate_size",
            score="softmax_of_best",
            renormalize=False,
            shared="shared_intermediate_size",
        ),
    ),
}
