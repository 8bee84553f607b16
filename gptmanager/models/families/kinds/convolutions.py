"""Families with short convolutions in most layers (Liquid AI)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.base import PLAIN, llama_fields
from gptmanager.models.families.family import Family
from gptmanager.models.families.layer_types import CONVOLUTION
from gptmanager.models.families.names import layer_names, llama_names, switched
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import MAX_SIZE, Fields
from gptmanager.models.recurrent.short_convolution import ShortConvolution
from gptmanager.models.spec import Norms

_MODULES = {
    "attention_norm": "operator_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "out": "self_attn.out_proj",
    "short_in": "conv.in_proj",
    "short_conv": "conv.conv",
    "short_out": "conv.out_proj",
    "mlp_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "final_norm": "model.embedding_norm",
}
# Fields of the first configs, which transformers ignores -> the field that has the same value
_SAME = {
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "block_norm_eps": "norm_eps",
    "theta": "rope_theta",
}


def _attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return further fields of a layer's `Attention`: its short convolution, if it has one."""
    own = ShortConvolution(
        channels=fields.size("hidden_size"),
        width=fields.size("conv_L_cache"),
        biased=fields.flag("conv_bias"),
    )
    is_recurrent = fields.layer_type(layer) == CONVOLUTION
    return {"rope": None, "recurrent": own} if is_recurrent else {}


def _network(fields: Fields) -> Mapping[str, Any]:
    """Refuse fields that contradict the fields that transformers reads."""
    for name, same in _SAME.items():
        given = fields.get(name)
        if given is not None and given != fields.get(same):
            need = f"must be {fields.as_given(same)}, because transformers ignores it"
            raise fields.error(name, need)
    return {}


def _width(fields: Fields, _: int) -> Mapping[str, Any]:
    """Return the width of the MLP, which may be computed from the one in the config."""
    name = "intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim"
    width, multiple = fields.size(name), fields.size("block_multiple_of")
    factor = fields.optional_number("block_ffn_dim_multiplier")
    if fields.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if factor:
            width = multiple * -(-int(factor * width) // multiple)
        if not 0 < width <= MAX_SIZE:
            need = f"leads to a width of {width} with {fields.as_given(name)}"
            raise fields.error("block_ffn_dim_multiplier", need)
    return {"width": width}


_LFM2 = replace(
    PLAIN,
    title="LFM2, LFM2.5",
    tensors=llama_names(**_MODULES),
    spellings={"tie_word_embeddings": "tie_embedding"},
    defaults=llama_fields(
        norm_eps=1e-5,
        rope_theta=1e6,
        max_position_embeddings=128000,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        intermediate_size=12288,
        conv_bias=False,
        conv_L_cache=3,
        full_attn_idxs=None,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
    ),
    norms=Norms(query_key="head"),
    windows="conv",
    neutral={"block_use_swiglu": True, "use_pos_enc": True},
    network=_network,
    attention=_attention,
    mlp=_width,
)
CONVOLUTIONS: Mapping[str, Family] = {
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        title="LFM2 MoE",
        tensors=llama_names(
            **_MODULES,
            router="feed_forward.gate",
            correction="feed_forward.expert_bias",
            expert_gate="feed_forward.experts.{}.w1",
            expert_up="feed_forward.experts.{}.w3",
            expert_down="feed_forward.experts.{}.w2",
        ),
        other_tensors=layer_names(
            stacked_up="feed_forward.experts.gate_up_proj",
            stacked_down="feed_forward.experts.down_proj",
            **switched("feed_forward.switch_mlp"),
            **{it: f"feed_forward.{it}_proj" for it in ("gate", "up", "down")},
        ),
        spellings={**_LFM2.spellings, "first_k_dense_replace": "num_dense_layers"},
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=1e6,
            max_position_embeddings=128000,
            num_key_value_heads=8,
            tie_word_embeddings=True,
            conv_bias=False,
            conv_L_cache=3,
            first_k_dense_replace=2,
            moe_intermediate_size=1792,
            num_experts_per_tok=4,
            num_experts=32,
            use_expert_bias=True,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        mlp=lambda *_: {},
        experts=experts_of(
            "num_experts",
            score="sigmoid",
            sum_eps=1e-6,
            correction="use_expert_bias",
            is_dense=readers.first_layers_dense,
        ),
    ),
}
