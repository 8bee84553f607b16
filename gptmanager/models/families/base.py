"""Values that families share: norms, spellings of fields, and base families to derive from."""

from __future__ import annotations

from dataclasses import replace

from gptmanager.models.families.family import Family
from gptmanager.models.spec import Norms

LAYER_NORM = Norms("layer", bias=True)
FOUR_NORMS = Norms(after_attention=True, after_mlp=True)
NORMS_AFTER_ONLY = Norms(
    before_attention=False, before_mlp=False, after_attention=True, after_mlp=True
)
RMS_EPS = {"norm_eps": "rms_norm_eps"}
LAYER_EPS = {"norm_eps": "layer_norm_eps"}
_LLAMA_FIELDS = {
    "hidden_act": "silu",
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}


def llama_fields(**changes: object) -> dict[str, object]:
    """Return the defaults of Llama's config fields, with `changes` added or replaced."""
    return {**_LLAMA_FIELDS, **changes}


LLAMA = Family(
    "Llama 1, 2, 3",
    spellings=RMS_EPS,
    defaults=_LLAMA_FIELDS,
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
)
BIASED_ATTENTION = replace(LLAMA, mlp_bias=False)
PLAIN = replace(LLAMA, qkv_bias=False, out_bias=False, mlp_bias=False)
