"""Readers of config fields that families use: mixtures of experts, layers, scales.

A reader returns fields of the spec, or raises ConfigError for a variant that is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from gptmanager.kernels.experts.routing import Routing, Score
from gptmanager.models.families.layer_types import is_rotated
from gptmanager.models.fields import Fields
from gptmanager.models.rope_scaling import with_original_length
from gptmanager.models.spec import Experts, QueryTemperature

ReadExperts = Callable[[Fields, int], tuple[Experts, int] | None]
_ATTENTION_SCALE = "attention_multiplier"
# fields that are read only if the family has defaults for them
_OF_SOME_FAMILIES = ("n_group", "topk_group", "routed_scaling_factor")


def granite_scales(fields: Fields) -> Mapping[str, Any]:
    """Return Granite's scales of embeddings, of additions to the residual stream, and of logits."""
    return {
        "embedding_scale": fields.number("embedding_multiplier"),
        "residual_scale": fields.number("residual_multiplier"),
        "logit_scale": 1 / fields.number("logits_scaling"),
    }


def hyperclova_scales(fields: Fields) -> Mapping[str, Any]:
    """Return Granite's scales, but `logits_scaling` multiplies the logits."""
    return {**granite_scales(fields), "logit_scale": fields.number("logits_scaling")}


def hyperclova_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return the scale of attention scores, if the config has one."""
    return granite_attention(fields, layer) if fields.optional_number(_ATTENTION_SCALE) else {}


def granite_attention(fields: Fields, _: int) -> Mapping[str, Any]:
    """Return Granite's scale of attention scores."""
    return {"scale": fields.number(_ATTENTION_SCALE)}


def granite4_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return the scale of attention scores; turn off RoPE unless the config asks for it."""
    found = granite_attention(fields, layer)
    given = fields.get("position_embedding_type")
    if given not in (None, "nope", "rope"):
        raise fields.error("position_embedding_type", "must be null, 'nope' or 'rope'")
    return found if given == "rope" else {**found, "rope": None}


def minicpm_scales(fields: Fields) -> Mapping[str, Any]:
    """Return MiniCPM's scales of embeddings, of additions to the residual stream, and of logits."""
    num_layers, hidden = fields.size("num_hidden_layers"), fields.size("hidden_size")
    return {
        "embedding_scale": fields.number("scale_emb"),
        "residual_scale": fields.number("scale_depth", num_layers**0.5) / num_layers**0.5,
        "logit_scale": fields.size("dim_model_base", hidden) / hidden,
    }


def gemma_network(fields: Fields) -> Mapping[str, Any]:
    """Return the scale of Gemma's embeddings, and the softcap of its logits if it has one."""
    if fields.get("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "must be false for text generation")
    return {
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def gemma1_network(fields: Fields) -> Mapping[str, Any]:
    """Return the same as `gemma_network`. Refuse activations other than Gemma 1's.

    The first checkpoints have "gelu", which means the approximation with tanh there.
    """
    for field, is_optional in (("hidden_act", False), ("hidden_activation", True)):
        given = fields.get(field)
        if given not in ("gelu", "gelu_pytorch_tanh") and not (given is None and is_optional):
            raise fields.error(field, "must be 'gelu_pytorch_tanh'")
    return gemma_network(fields)


def minimax_network(fields: Fields) -> Mapping[str, Any]:
    """Refuse MiniMax models that have layers with linear attention."""
    kinds = fields.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(it != 1 for it in kinds)):
        raise fields.error("attn_type_list", "must be a list of ones")
    return {}


def listed_windows(fields: Fields) -> Mapping[str, Any]:
    """Refuse a sliding window without a list of its layers.

    The default of transformers for these layers contradicts its documentation.
    """
    is_used = fields.get("sliding_window") is not None and fields.flag("use_sliding_window")
    if is_used and fields.get("layer_types") is None:
        need = "must list the type of each layer if use_sliding_window is true"
        raise fields.error("layer_types", need)
    return {}


def opt_network(fields: Fields) -> Mapping[str, Any]:
    """Refuse the variants of OPT that are not supported.

    They have norms after attention, no final norm, norms without weights, or projected embeddings.
    """
    for field, needed in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
    ):
        if fields.flag(field) is not needed:
            raise fields.error(field, f"must be {str(needed).lower()}")
    hidden = fields.size("hidden_size")
    if fields.size("word_embed_proj_dim", hidden) != hidden:
        raise fields.error("word_embed_proj_dim", f"must be {fields.as_given('hidden_size')}")
    return {}


def as_many_kv_heads(fields: Fields, _: int) -> Mapping[str, Any]:
    """Refuse a number of KV heads other than that of query heads."""
    heads = fields.size("num_attention_heads")
    if fields.size("num_key_value_heads", heads) != heads:
        need = f"must be {fields.as_given('num_attention_heads')}"
        raise fields.error("num_key_value_heads", need)
    return {}


def query_scale(fields: Fields, _: int) -> Mapping[str, Any]:
    """Return Gemma's scale of attention scores."""
    return {"scale": fields.number("query_pre_attn_scalar") ** -0.5}


def gemma_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return the scale and the softcap of Gemma 2's attention scores."""
    softcap = fields.optional_number("attn_logit_softcapping")
    return {**query_scale(fields, layer), "softcap": softcap}


def unrotated_full_layers(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Turn off RoPE in full-attention layers if there is a sliding window (Cohere 2, EXAONE 4)."""
    if fields.get("sliding_window") is None or fields.layer_type(layer) == "sliding_attention":
        return {}
    return {"rope": None}


def unrotated_layers(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Turn off RoPE in the layers that have a 0 in `no_rope_layers` (SmolLM 3, Llama 4)."""
    return {} if is_rotated(fields, layer) else {"rope": None}


def query_temperature(fields: Fields, _: int) -> Mapping[str, Any]:
    """Return the query temperature, which Ministral 3 stores in the RoPE parameters."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope = with_original_length(fields, rope) if isinstance(rope, Mapping) else {}
    own = Fields(rope, {}, {}, "config.json: rope_parameters.")
    beta = own.number_or_zero("llama_4_scaling_beta")
    if not beta:
        return {}
    return {"temperature": QueryTemperature(beta, own.size("original_max_position_embeddings"))}


def experts_of(
    count: str,
    *,
    width: str = "moe_intermediate_size",
    per_token: str = "num_experts_per_tok",
    score: Score = "softmax",
    renormalize: bool | str = "norm_topk_prob",
    sum_eps: float = 1e-20,
    correction: bool | str = False,
    group_score: Literal["two_best", "best"] = "two_best",
    shared: str | None = None,
    num_shared: str | None = None,
    shared_gate: bool = False,
    latent: str | None = None,
    router_bias: bool = False,
    bias: bool = False,
    is_dense: Callable[[Fields, int], bool] = lambda *_: False,
) -> ReadExperts:
    """Return a reader of a layer's mixture of experts and of the width of an expert.

    The reader returns None if the config has no experts, or if `is_dense` is true for the layer.
    Names of config fields are `count`, `width`, `per_token`, `shared` (width of the shared MLP),
    `num_shared` (number of shared experts, each as wide as an expert), `latent` (size of the inputs
    and outputs of experts, if not the hidden size), and any other str.
    """

    def read(fields: Fields, layer: int) -> tuple[Experts, int] | None:
        own = width, per_token, shared, num_shared, renormalize, correction, latent
        fields.note_read(*(it for it in (*own, *_further(fields)) if isinstance(it, str)))
        number = 0 if fields.get(count) is None else fields.count(count)
        if is_dense(fields, layer) or not number:  # `is_dense` first, as it marks fields as read
            return None
        each, most = fields.size(width), fields.size(per_token)
        if most > number:
            raise fields.error(per_token, f"must be at most {fields.as_given(count)}")
        groups, top_groups = _groups(fields, count, per_token)
        routing = Routing(
            per_token=most,
            score=score,
            renormalize=fields.decided(renormalize),
            factor=_factor(fields),
            groups=groups,
            top_groups=top_groups,
            group_score=group_score,
            scales_inputs=score == "sigmoid_of_best",  # Llama 4
            sum_eps=sum_eps,
        )
        experts = Experts(
            number,
            routing,
            correction=fields.decided(correction),
            shared_width=_shared_width(fields, shared, num_shared, each),
            shared_gate=shared_gate,
            latent=fields.size(latent) if latent and fields.get(latent) is not None else 0,
            router_bias=router_bias,
            bias=bias,
        )
        return experts, each

    return read


def _shared_width(fields: Fields, shared: str | None, num_shared: str | None, each: int) -> int:
    if shared is not None and fields.get(shared) is not None:
        return fields.count(shared)
    if num_shared is not None and fields.get(num_shared) is not None:
        return each * fields.count(num_shared)
    return 0


def _further(fields: Fields) -> Iterator[str]:
    return filter(fields.has_default, _OF_SOME_FAMILIES)


def _factor(fields: Fields) -> float:
    name = "routed_scaling_factor"
    return fields.number(name, 1.0) if fields.has_default(name) else 1.0


def _groups(fields: Fields, count: str, per_token: str) -> tuple[int, int]:
    if not fields.has_default("n_group") or fields.get("n_group") is None:
        return 1, 1
    groups, top = fields.size("n_group"), fields.size("topk_group", 1)
    if fields.size(count) % groups:
        raise fields.error("n_group", f"must divide {fields.as_given(count)}")
    if top > groups:
        raise fields.error("topk_group", f"must be at most {fields.as_given('n_group')}")
    most = top * fields.size(count) // groups
    if fields.size(per_token) > most:
        raise fields.error(per_token, f"must be at most {most}, the experts of topk_group groups")
    return groups, top


def first_layers_dense(fields: Fields, layer: int) -> bool:
    """Return whether a layer is one of the first `first_k_dense_replace`, which have no experts."""
    return layer < fields.count("first_k_dense_replace")


def listed_layers_dense(fields: Fields, layer: int) -> bool:
    """Return whether a layer is dense by `mlp_layer_types`, or without it, is one of the first."""
    first = first_layers_dense(fields, layer)  # read in any case
    given, num_layers = fields.get("mlp_layer_types"), fields.size("num_hidden_layers")
    if given is None:
        return first
    is_list = isinstance(given, list) and len(given) == num_layers
    if not is_list or given[layer] not in ("dense", "sparse"):
        raise fields.error("mlp_layer_types", f"must be {num_layers} of ['dense', 'sparse']")
    return bool(given[layer] == "dense")


def sparse_steps_dense(fields: Fields, layer: int) -> bool:
    """Return whether a layer of Qwen's mixtures is dense, which means that it has no experts."""
    step = fields.size("decoder_sparse_step")
    return layer in fields.layers("mlp_only_layers") or (layer + 1) % step != 0


def ernie_dense(fields: Fields, layer: int) -> bool:
    """Return whether a layer of ERNIE is dense.

    A layer is dense if it is outside the range of MoE layers, or if its number, from 1, is not a
    multiple of `moe_layer_interval`.
    """
    start, interval = fields.count("moe_layer_start_index"), fields.size("moe_layer_interval")
    end = fields.get("moe_layer_end_index")
    num_layers = fields.size("num_hidden_layers")
    last = num_layers - 1 if end in (None, -1) else fields.count("moe_layer_end_index")
    return not ((layer + 1) % interval == 0 and start <= layer <= last)
