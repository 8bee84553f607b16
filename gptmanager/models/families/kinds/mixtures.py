"""The model families with mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from gptmanager.models.families import readers
from gptmanager.models.families.base import (
    BIASED_ATTENTION,
    LAYER_NORM,
    NORMS_AFTER_ONLY,
    llama_fields,
)
from gptmanager.models.families.family import ROTARY_BUFFERS, Family
from gptmanager.models.families.kinds.llama4 import LLAMA4
from gptmanager.models.families.kinds.llamas import LLAMAS
from gptmanager.models.families.names import (
    BLOCK,
    BLOCK_IN_ONE,
    BY_EXPERT,
    DENSE,
    EXPERTS,
    IN_ONE,
    NORMS_AFTER,
    ONLY_EXPERTS,
    SHARED_EXPERT,
    SHARED_HALVES,
    SWITCHED,
    SWITCHED_BLOCK,
    layer_names,
    llama_names,
)
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Experts, Norms

GRANITE_IN_ONE = {
    "router": "block_sparse_moe.router",
    "stacked_up": "block_sparse_moe.experts.gate_up_proj",
    "stacked_down": "block_sparse_moe.experts.down_proj",
}
_GRANITE_BLOCK = {
    "gate": None,
    "up": None,
    "down": None,
    "router": "block_sparse_moe.router.layer",
    "stacked_up": "block_sparse_moe.input_linear.weight",
    "stacked_down": "block_sparse_moe.output_linear.weight",
}
_PREDICTORS = re.compile(rf"{ROTARY_BUFFERS.pattern}|^mtp\.")
_QWEN3_MOE = replace(
    LLAMAS["qwen3"],
    title="Qwen3-MoE",
    tensors=llama_names(**EXPERTS),
    other_tensors=layer_names(**IN_ONE),
    spellings={**LLAMAS["qwen3"].spellings, "num_experts": "num_local_experts"},
    defaults={
        **LLAMAS["qwen3"].defaults,
        "head_dim": None,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "use_sliding_window": False,
    },
    windows="all",  # unlike in other families of Qwen, `max_window_layers` has no effect
    experts=experts_of("num_experts", is_dense=readers.sparse_steps_dense),
)
_OLMOE = replace(
    BIASED_ATTENTION,
    title="OLMoE",
    tensors=llama_names(**ONLY_EXPERTS),
    other_tensors=layer_names(**IN_ONE),
    defaults=llama_fields(
        norm_eps=1e-5,
        max_position_embeddings=4096,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    norms=Norms(query_key="all_heads"),
    experts=experts_of("num_experts", width="intermediate_size"),
)
_GRANITE_MOE = replace(
    LLAMAS["granite"],
    title="Granite 3 MoE",
    tensors=llama_names(**_GRANITE_BLOCK),
    other_tensors=layer_names(**BY_EXPERT, **SWITCHED_BLOCK, **GRANITE_IN_ONE),
    defaults={
        **LLAMAS["granite"].defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    mlp_bias=False,
    experts=experts_of(
        "num_local_experts",
        width="intermediate_size",
        score="softmax_of_best",
        renormalize=False,
    ),
)
_HUNYUAN = experts_of(
    "num_experts",
    width="intermediate_size",
    per_token="moe_topk",
    renormalize=True,
    shared="intermediate_size",
)


def _hunyuan_experts(fields: Fields, layer: int) -> tuple[Experts, int] | None:
    """Return a layer's experts, and their width. `moe_topk` may be a list with a number a layer."""
    num_layers, width = fields.size("num_hidden_layers"), fields.size("intermediate_size")
    for name, same in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        given = fields.get(name)
        if given not in (None, same) and given != [same] * num_layers:
            raise fields.error(
                name, f"must be {same} in each layer, because transformers ignores it"
            )
    given = fields.get("moe_topk")
    if not isinstance(given, list):
        return _HUNYUAN(fields, layer)
    if len(given) != num_layers:
        raise fields.error("moe_topk", f"must be a number, or a list of {num_layers} numbers")
    own = {name: fields.get(name) for name in ("num_experts", "intermediate_size")}
    return _HUNYUAN(Fields({**own, "moe_topk": given[layer]}, {}, {}), layer)


_PHIMOE = experts_of(
    "num_local_experts", width="intermediate_size", score="sparse_mixer", renormalize=False
)


def _phimoe_experts(fields: Fields, layer: int) -> tuple[Experts, int] | None:
    """Return a layer's experts, of which a token has two as in transformers, and their width."""
    tolerance = 2 * fields.number("router_jitter_noise", limit=1.0)
    found = _PHIMOE(fields, layer)
    if fields.size("num_experts_per_tok") != 2:
        raise fields.error("num_experts_per_tok", "must be 2")
    if found is None:
        return None
    experts, width = found
    return replace(experts, routing=experts.routing._replace(tolerance=tolerance)), width


MIXTURES: Mapping[str, Family] = {
    "mixtral": replace(
        LLAMAS["mistral"],
        title="Mixtral",
        tensors=llama_names(**BLOCK),
        other_tensors=layer_names(**BLOCK_IN_ONE),
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=1e6,
            max_position_embeddings=131072,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        experts=experts_of("num_local_experts", width="intermediate_size", renormalize=True),
    ),
    "phimoe": replace(
        BIASED_ATTENTION,
        title="Phi-3.5-MoE, Phi-mini-MoE",
        tensors=llama_names(**BLOCK),
        other_tensors=layer_names(**{**BLOCK_IN_ONE, "router": "mlp.router"}),
        defaults=llama_fields(
            norm_eps=1e-5,
            rope_theta=1e6,
            max_position_embeddings=131072,
            num_key_value_heads=8,
            num_local_experts=16,
            num_experts_per_tok=2,
            router_jitter_noise=0.01,
            short_mscale=None,  # in its RoPE
        ),
        norms=LAYER_NORM,
        head_bias="lm_head_bias",
        windows="all",
        experts=_phimoe_experts,
    ),
    "qwen2_moe": replace(
        LLAMAS["qwen2"],
        title="Qwen1.5-MoE, Qwen2-MoE",
        tensors=llama_names(**EXPERTS, **SHARED_EXPERT),
        other_tensors=layer_names(**IN_ONE),
        defaults={
            **LLAMAS["qwen2"].defaults,
            "num_key_value_heads": 16,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        qkv_bias="qkv_bias",
        network=readers.listed_windows,
        experts=experts_of(
            "num_experts",
            shared="shared_expert_intermediate_size",
            shared_gate=True,
            is_dense=readers.sparse_steps_dense,
        ),
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": replace(
        _QWEN3_MOE,
        title="Qwen3-VL-MoE (text)",
        tensors=llama_names(
            **DENSE,
            router="mlp.gate",
            transposed_up="mlp.experts.gate_up_proj",
            transposed_down="mlp.experts.down_proj",
        ),
        other_tensors=layer_names(**BY_EXPERT, **SWITCHED),
        defaults={
            **_QWEN3_MOE.defaults,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "tie_word_embeddings": True,
        },
        neutral={"norm_topk_prob": True},
        experts=experts_of("num_experts", renormalize=True, is_dense=readers.sparse_steps_dense),
    ),
    "mellum": replace(
        _QWEN3_MOE,
        title="Mellum 2",
        defaults=llama_fields(
            max_position_embeddings=131072,
            num_key_value_heads=4,
            head_dim=128,
            sliding_window=1024,
            moe_intermediate_size=896,
            num_experts_per_tok=8,
            num_experts=64,
            norm_topk_prob=True,
            first_k_dense_replace=0,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        ignored=_PREDICTORS,
        windows=1,
        experts=experts_of("num_experts", is_dense=readers.listed_layers_dense),
    ),
    "olmoe": _OLMOE,
    "flex_olmo": replace(
        _OLMOE,
        title="FlexOlmo",
        tensors=llama_names(**ONLY_EXPERTS, **NORMS_AFTER),
        defaults=llama_fields(
            norm_eps=1e-6,
            rope_theta=500000.0,
            max_position_embeddings=4096,
            num_experts=7,
            num_experts_per_tok=5,
        ),
        norms=replace(NORMS_AFTER_ONLY, query_key="all_heads"),
    ),
    "llama4_text": LLAMA4,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(
        _GRANITE_MOE,
        title="Granite 3 MoE with a shared MLP",
        tensors=llama_names(
            **_GRANITE_BLOCK,
            shared_gate_up="shared_mlp.input_linear",
            shared_down="shared_mlp.output_linear",
        ),
        other_tensors=layer_names(**BY_EXPERT, **SWITCHED_BLOCK, **GRANITE_IN_ONE, **SHARED_HALVES),
        experts=experts_of(
            "num_local_experts",
            width="intermediate_size",
            score="softmax_of_best",
            renormalize=False,
            shared="shared_intermediate_size",
        ),
    ),
    "hunyuan_v1_moe": replace(
        LLAMAS["hunyuan_v1_dense"],
        title="HunYuan (MoE)",
        tensors=llama_names(
            **{**ONLY_EXPERTS, "router": "mlp.gate.wg"},
            q_norm="self_attn.query_layernorm",
            k_norm="self_attn.key_layernorm",
            shared_gate_proj="mlp.shared_mlp.gate_proj",
            shared_up="mlp.shared_mlp.up_proj",
            shared_down="mlp.shared_mlp.down_proj",
        ),
        other_tensors=layer_names(**IN_ONE),
        defaults={**LLAMAS["hunyuan_v1_dense"].defaults, "num_experts": 1, "moe_topk": 1},
        neutral={"norm_topk_prob": True, "use_mixed_mlp_moe": True},
        experts=_hunyuan_experts,
    ),
}
