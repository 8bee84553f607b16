"""Families after GPT-2 with one KV head, or with attention in parallel to the MLP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.families import readers
from gptmanager.models.families.base import LAYER_NORM, PLAIN, llama_fields
from gptmanager.models.families.family import Family
from gptmanager.models.families.kinds.layer_norms import LAYER_NORMS
from gptmanager.models.families.names import GPT2, layer_names, tensor_names
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Norms

_GPT2 = LAYER_NORMS["gpt2"]


def _rotary_attention(fields: Fields, _: int) -> Mapping[str, Any]:
    fields.size("rotary_dim")  # without it, transformers rotates by the angles of all heads
    return {}


def _one_kv_head(fields: Fields, layer: int) -> Mapping[str, Any]:
    """Return one KV head with multi-query attention. Without it, refuse grouped heads."""
    if fields.flag("multi_query"):
        return {"num_kv_heads": 1}
    return readers.as_many_kv_heads(fields, layer)


def _falcon_attention(fields: Fields, layer: int) -> Mapping[str, Any]:
    fields.note_read("multi_query")
    return {} if fields.flag("new_decoder_architecture") else _one_kv_head(fields, layer)


def _is_parallel(fields: Fields) -> bool:
    """Return whether a layer of Falcon adds up attention and MLP of the same residual."""
    return fields.flag("parallel_attn") or fields.flag("new_decoder_architecture")


def _has_one_norm(fields: Fields) -> bool:
    """Return whether attention and MLP of a layer of Falcon read the output of one norm."""
    count = fields.size("num_ln_in_parallel_attn", 2)
    has_two = fields.flag("new_decoder_architecture") and count == 2
    return _is_parallel(fields) and not has_two


GPTS: Mapping[str, Family] = {
    "gptj": replace(
        PLAIN,
        title="GPT-J",
        tensors=tensor_names(
            "transformer.h.{}.",
            embedding="transformer.wte",
            final_norm="transformer.ln_f",
            attention_norm="ln_1",
            q="attn.q_proj",
            k="attn.k_proj",
            v="attn.v_proj",
            out="attn.out_proj",
            fc="mlp.fc_in",
            down="mlp.fc_out",
        ),
        prefix="transformer.",
        ignored=_GPT2.ignored,
        spellings=_GPT2.spellings,
        defaults=llama_fields(
            hidden_act="gelu_new", norm_eps=1e-5, intermediate_size=None, rotary_dim=64
        ),
        norms=Norms("layer", bias=True, before_mlp=False),
        interleaved=True,
        gated=False,
        parallel=True,
        mlp_bias=True,
        head_bias=True,
        neutral={"rotary": True},
        attention=_rotary_attention,
    ),
    "gpt_bigcode": replace(
        _GPT2,
        title="StarCoder 1, SantaCoder",
        tensors={**GPT2, **layer_names("transformer.h.{}.", qkv_by_head="attn.c_attn")},
        defaults={**_GPT2.defaults, "hidden_act": "gelu_pytorch_tanh", "multi_query": True},
        transposed=False,
        neutral={"pad_key_length": True, "validate_runner_input": True},
        attention=_one_kv_head,
    ),
    "falcon": replace(
        PLAIN,
        title="Falcon 1, 2",
        tensors=tensor_names(
            "transformer.h.{}.",
            embedding="transformer.word_embeddings",
            final_norm="transformer.ln_f",
            attention_norm="input_layernorm",
            qkv_by_head="self_attention.query_key_value",
            out="self_attention.dense",
            mlp_norm="post_attention_layernorm",
            fc="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        other_tensors=layer_names(
            "transformer.h.{}.",
            attention_norm="ln_attn",
            mlp_norm="ln_mlp",
            qkv_in_order="self_attention.qkv",  # in GGUF files
        ),
        prefix="transformer.",
        ignored=re.compile(r"(^|\.)rotary(_emb)?\.inv_freq$"),
        spellings={
            "norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation",
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_hidden_size",
        },
        defaults=llama_fields(
            hidden_act="gelu",
            norm_eps=1e-5,
            intermediate_size=None,
            multi_query=True,
            parallel_attn=True,
            tie_word_embeddings=True,
        ),
        norms=LAYER_NORM,
        gated=False,
        parallel=_is_parallel,
        one_norm=_has_one_norm,
        qkv_bias="bias",
        out_bias="bias",
        mlp_bias="bias",
        neutral={"alibi": False},
        attention=_falcon_attention,
    ),
}
