"""Families that transformers does not have, as renamed models of families that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Config = Mapping[str, Any]
State = Mapping[str, Tensor]
_EXAONE = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "post_attention_layernorm": "ln_2",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
_INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_SARVAM = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn": "attention",
    "e_score_correction_bias": "expert_bias",
}


class Renamed(NamedTuple):
    """A family of transformers, and how its config and its tensors become those of another one.

    `config` maps a published config to that of transformers' family. `state` maps tensors of
    transformers' model, given the published config, to published tensors.
    """

    family: str
    config: Callable[[Config], Config]
    state: Callable[[State, Config], State]


def _same(state: State, _: Config) -> State:
    return state


def _by_names(names: Mapping[str, str]) -> Callable[[State, Config], State]:
    def renamed(state: State, _: Config) -> State:
        found = {}
        for name, tensor in state.items():
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            found[name] = tensor
        return found

    return renamed


def _internlm2(state: State, config: Config) -> State:
    """Join the queries of each KV head with its key and its value."""
    found = dict(_by_names(_INTERNLM2)(state, config))
    for name in [it for it in found if ".q_proj." in it]:
        parts = [found.pop(name.replace("q_proj", f"{it}_proj")) for it in "qkv"]
        heads = [it.unflatten(0, (config["num_key_value_heads"], -1)) for it in parts]
        found[name.replace("q_proj", "wqkv")] = torch.cat(heads, 1).flatten(0, 1)
    return found


def _sarvam(state: State, config: Config) -> State:
    """Join queries, keys and values."""
    found = dict(_by_names(_SARVAM)(state, config))
    for name in [it for it in found if ".q_proj." in it]:
        parts = [found.pop(name.replace("q_proj", f"{it}_proj")) for it in "qkv"]
        found[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    return found


def _without(config: Config, *names: str, **changes: Any) -> Config:
    return {**{key: it for key, it in config.items() if key not in names}, **changes}


RENAMED: Mapping[str, Renamed] = {
    "exaone": Renamed(
        "llama",
        lambda given: _without(
            given,
            *("num_layers", "layer_norm_epsilon", "activation_function"),
            num_hidden_layers=given["num_layers"],
            rms_norm_eps=given["layer_norm_epsilon"],
            rope_theta=500000.0,
        ),
        _by_names(_EXAONE),
    ),
    "internlm2": Renamed("llama", lambda given: _without(given, "bias"), _internlm2),
    "internlm3": Renamed(
        "llama",
        lambda given: _without(
            given,
            *("qkv_bias", "bias"),
            attention_bias=given["qkv_bias"],
            mlp_bias=given["bias"],
            rms_norm_eps=1e-5,
        ),
        _same,
    ),
    "minicpm": Renamed(
        "granite",
        lambda given: _without(
            given,
            *("scale_emb", "scale_depth", "dim_model_base"),
            embedding_multiplier=given["scale_emb"],
            residual_multiplier=given["scale_depth"] / given["num_hidden_layers"] ** 0.5,
            logits_scaling=given["hidden_size"] / given["dim_model_base"],
            attention_multiplier=(given["hidden_size"] / given["num_attention_heads"]) ** -0.5,
            rms_norm_eps=1e-6,
        ),
        _same,
    ),
    "sarvam_moe": Renamed(
        "glm4_moe",
        lambda given: _without(
            given,
            *("num_experts", "num_shared_experts", "use_qkv_bias"),
            n_routed_experts=given["num_experts"],
            n_shared_experts=given["num_shared_experts"],
            attention_bias=given["use_qkv_bias"],
            **{"partial_rotary_factor": 1.0, "use_qk_norm": True, "rms_norm_eps": 1e-6},
            **{"rope_theta": 8e6, "first_k_dense_replace": 1},
        ),
        _sarvam,
    ),
    "sarvam_mla": Renamed(
        "deepseek_v3",
        lambda given: _without(
            given,
            *("num_experts", "num_shared_experts"),
            n_routed_experts=given["num_experts"],
            n_shared_experts=given["num_shared_experts"],
            rope_parameters={**given["rope_parameters"], "rope_type": "yarn"},
            **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        ),
        _same,
    ),
    "mimo": Renamed("qwen2", lambda given: _without(given, "attention_bias"), _same),
}
