"""The families of Gemma: norms that store weights minus 1, and scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gptmanager.models.families import readers
from gptmanager.models.families.base import (
    BIASED_ATTENTION,
    FOUR_NORMS,
    RMS_EPS,
    llama_fields,
)
from gptmanager.models.families.family import Family
from gptmanager.models.families.gemma4 import GEMMA4
from gptmanager.models.families.names import SANDWICH, llama_names
from gptmanager.models.spec import Norms

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
    network=readers.gemma_network,
)
_GEMMA2 = replace(
    _GEMMA,
    title="Gemma 2",
    tensors=llama_names(**SANDWICH),
    spellings={**RMS_EPS, "hidden_act": "hidden_activation"},
    defaults={
        **_GEMMA.defaults,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    norms=_GEMMA_NORMS,
    windows=2,
    attention=readers.gemma_attention,
)
_GEMMA3 = replace(
    _GEMMA2,
    title="Gemma 3",
    defaults={
        **_GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    norms=replace(_GEMMA_NORMS, query_key="head"),
    windows=6,
)
GEMMAS: Mapping[str, Family] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma4_text": GEMMA4,
}
