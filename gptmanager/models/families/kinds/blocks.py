"""Families in which a layer has attention, a state space or an MLP alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families.base import PLAIN, llama_fields
from gptmanager.models.families.family import ROTARY_BUFFERS, Family
from gptmanager.models.families.kinds.state_spaces import mamba_names, read_state_space
from gptmanager.models.families.layer_types import LINEAR, MLP, MOE
from gptmanager.models.families.names import layer_names, tensor_names
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Norms

_LAYER = "backbone.layers.{}."
_WITHOUT_EFFECT = (
    *("chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "residual_in_fp32"),
    *("rescale_prenorm_residual", "time_step_rank", "use_mamba_kernels"),
)


def _network(fields: Fields) -> Mapping[str, Any]:
    fields.note_read(*_WITHOUT_EFFECT)
    return {}


def _attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return fields of the attention: a state space, or that a layer has no attention."""
    kind = fields.layer_type(layer)
    if kind == LINEAR:
        head_dim = fields.size("mamba_d_head")
        own = fields.once("state space", lambda: read_state_space(fields, head_dim))
        return {"rope": None, "recurrent": own}
    return {"rope": None, "absent": kind in (MLP, MOE)}


def _mlp(fields: Fields, layer: int) -> Mapping[str, Any] | None:
    return {} if fields.layer_type(layer) in (MLP, MOE) else None


BLOCKS: Mapping[str, Family] = {
    "nemotron_h": replace(
        PLAIN,
        title="Nemotron-H, Nemotron Nano 2, Nemotron 3",
        tensors=tensor_names(
            _LAYER,
            embedding="backbone.embeddings",
            final_norm="backbone.norm_f",
            attention_norm="norm",
            **{it: f"mixer.{it}_proj" for it in ("q", "k", "v")},
            out="mixer.o_proj",
            **mamba_names("mixer"),
            fc="mixer.up_proj",
            down="mixer.down_proj",
            router="mixer.gate",
            correction="mixer.gate.e_score_correction_bias",
            experts_in="mixer.fc1_latent_proj",
            experts_out="mixer.fc2_latent_proj",
            expert_fc="mixer.experts.{}.up_proj",
            expert_down="mixer.experts.{}.down_proj",
            shared_fc="mixer.shared_experts.up_proj",
            shared_down="mixer.shared_experts.down_proj",
        ),
        other_tensors={
            **layer_names(
                _LAYER, stacked_up="mixer.experts.up_proj", stacked_down="mixer.experts.down_proj"
            ),
            **layer_names(  # the names that MLX writes
                _LAYER,
                stacked_up="mixer.switch_mlp.fc1.weight",
                stacked_down="mixer.switch_mlp.fc2.weight",
            ),
        },
        prefix="backbone.",
        prefixes={"model.": "backbone."},
        ignored=re.compile(rf"{ROTARY_BUFFERS.pattern}|^mtp\."),
        spellings={
            "norm_eps": "layer_norm_epsilon",
            "hidden_act": "mlp_hidden_act",
            "layer_types": "layers_block_type",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_proj_bias": "use_bias",
        },
        defaults=llama_fields(
            hidden_act="relu2",
            norm_eps=1e-5,
            max_position_embeddings=4096,
            num_key_value_heads=8,
            head_dim=128,
            hybrid_override_pattern=None,
            mamba_n_heads=128,
            mamba_n_groups=8,
            mamba_d_state=128,
            mamba_d_head=64,
            mamba_d_conv=4,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
            moe_latent_size=None,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            norm_topk_prob=True,
        ),
        norms=Norms(before_mlp=False),
        gated=False,
        mlp_bias="mlp_bias",
        windows="blocks",
        neutral={
            "attention_bias": False,
            "mamba_hidden_act": "silu",
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-5,
        },
        network=_network,
        attention=_attention,
        mlp=_mlp,
        experts=experts_of(
            "n_routed_experts",
            score="sigmoid",
            correction=True,
            shared="moe_shared_expert_intermediate_size",
            latent="moe_latent_size",
            is_dense=lambda fields, layer: fields.layer_type(layer) != MOE,
        ),
    )
}
