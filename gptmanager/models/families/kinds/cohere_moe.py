"""The family of Cohere's mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.kinds.layer_norms import LAYER_NORMS
from gptmanager.models.families.names import EXPERTS, IN_ONE, SHARED, layer_names, llama_names
from gptmanager.models.families.readers import experts_of
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Experts

_COHERE2 = LAYER_NORMS["cohere2"]
_PREFIX = "prefix_dense_sliding_window_pattern"
_MIXED: Mapping[str, Any] = {
    "width": "intermediate_size",
    "num_shared": "num_shared_experts",
    "is_dense": readers.listed_layers_dense,
}
_BY_SCORE = {
    "softmax": experts_of("num_experts", score="softmax_of_best", renormalize=False, **_MIXED),
    "sigmoid": experts_of("num_experts", score="sigmoid", **_MIXED),
}


def _network(fields: Fields) -> Mapping[str, Any]:
    """Return the scale of logits. Refuse dense layers without a list of the types of layers."""
    if fields.get("first_k_dense_replace") and fields.get("layer_types") is None:
        raise fields.error("layer_types", "must list the type of each layer after dense layers")
    fields.note_read("norm_topk_prob")
    return _COHERE2.network(fields)


def _attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return fields of the attention. A dense layer may have RoPE without a window."""
    is_forced = fields.size(_PREFIX) == 1 and readers.listed_layers_dense(fields, layer)
    return {} if is_forced else readers.unrotated_full_layers(fields, layer)


def _mlp(fields: Fields, _: int) -> Mapping[str, Any]:
    """Return the width of the MLP of a dense layer."""
    width = fields.size("intermediate_size")
    return {"width": fields.size("prefix_dense_intermediate_size", width)}


def _experts(fields: Fields, layer: int) -> tuple[Experts, int] | None:
    score, way = fields.get("expert_selection_fn"), fields.get("shared_expert_combination_strategy")
    if score not in [*_BY_SCORE]:
        raise fields.error("expert_selection_fn", f"must be one of {[*_BY_SCORE]}")
    if way not in ("average", "sum"):
        raise fields.error(
            "shared_expert_combination_strategy", "must be one of ['average', 'sum']"
        )
    found = _BY_SCORE[score](fields, layer)
    if found is None or not found[0].shared_width:
        return found
    return replace(found[0], averaged=way == "average"), found[1]


COHERE_MOE = replace(
    _COHERE2,
    title="Cohere North",
    tensors=llama_names(**{**EXPERTS, "mlp_norm": None}, **SHARED),
    other_tensors=layer_names(**IN_ONE),
    defaults={
        **_COHERE2.defaults,
        "head_dim": 128,
        "rms_norm_eps": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "norm_topk_prob": True,
        "expert_selection_fn": "softmax",
        "shared_expert_combination_strategy": "average",
        "first_k_dense_replace": 0,
        _PREFIX: 1,
        "prefix_dense_intermediate_size": None,
    },
    network=_network,
    attention=_attention,
    mlp=_mlp,
    experts=_experts,
)
