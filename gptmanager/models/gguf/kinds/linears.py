"""`LINEARS`: the GGUF architectures with linear attention, for the table in `architectures`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from gptmanager.models.gguf.architecture import (
    FEED_FORWARD,
    LLAMA,
    MIXTURE,
    ROTARY,
    Architecture,
    Config,
)
from gptmanager.models.gguf.further_fields import without_further_layers
from gptmanager.models.gguf.kinds.mixtures import MIXTURES
from gptmanager.models.gguf.metadata import Metadata

_KEYS, _VALUES, _INNER = "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"
_STATE: Mapping[str, str] = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": _KEYS,
    "linear_num_value_heads": _VALUES,
}
_IGNORED = frozenset(
    """
    ssm.inner_size full_attention_interval attention.recurrent_layers rope.dimension_sections
    nextn_predict_layers
    """.split()
)
_NORMS = {"post_attention_norm": "post_attention_layernorm"}
_LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SEPARATE = {"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}
_MIXTURE = MIXTURES["qwen2moe"]
_ATTENTION = {key: LLAMA[key] for key in LLAMA if key not in ("ffn_norm", *FEED_FORWARD)}
_EXPERTS = {key: _MIXTURE.modules[key] for key in _MIXTURE.modules if key not in LLAMA}
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}


def _fields(
    metadata: Metadata, prefix: str, names: Collection[str], config: Config
) -> dict[str, Any]:
    """Return the kinds of the layers, the size of a value head, and the number of layers."""
    found = dict(without_further_layers(metadata, prefix, names, config))
    layers = found.get("num_hidden_layers", config.get("num_hidden_layers"))
    sizes = {key: metadata.integer(f"{prefix}{key}") or 0 for key in (*_STATE.values(), _INNER)}
    for key, size in sizes.items():
        if size < 1:
            raise metadata.error(f"{prefix}{key}", "must be a positive integer")
    for key, part in ((_VALUES, _KEYS), (_INNER, _VALUES)):
        if sizes[key] % sizes[part]:
            raise metadata.error(f"{prefix}{key}", f"must be a multiple of {prefix}{part}")
    found["linear_value_head_dim"] = sizes[_INNER] // sizes[_VALUES]
    recurrent = metadata.plain(f"{prefix}attention.recurrent_layers")
    if recurrent is None:
        interval = metadata.integer(f"{prefix}full_attention_interval")
        return {**found, "full_attention_interval": 4 if interval is None else interval}
    if not isinstance(recurrent, list) or not isinstance(layers, int):
        raise metadata.error(f"{prefix}attention.recurrent_layers", "must be an array of booleans")
    kinds = [f"{'linear' if it else 'full'}_attention" for it in recurrent[:layers]]
    return {**found, "layer_types": kinds}


_DENSE = Architecture(
    "qwen3_5_text",
    fields={**ROTARY, **_STATE},
    further=_fields,
    modules={**LLAMA, **_LINEAR, **_SEPARATE, **_NORMS},
    plus_one=True,
    tiles_values=True,
    ignored=_IGNORED,
)
LINEARS: Mapping[str, Architecture] = {
    "qwen35": _DENSE,
    "qwen35moe": replace(
        _DENSE,
        model_type="qwen3_5_moe_text",
        fields={**MIXTURE, **_STATE, **_SHARED},
        modules={**_ATTENTION, **_LINEAR, **_SEPARATE, **_NORMS, **_EXPERTS},
        stacked=_MIXTURE.stacked,
        single_rows=_MIXTURE.single_rows,
    ),
    "qwen3next": replace(
        _DENSE,
        model_type="qwen3_next",
        fields={**MIXTURE, **_STATE, **_SHARED},
        modules={
            **LLAMA,
            **_LINEAR,
            "ssm_ba": "linear_attn.in_proj_ba",
            **_NORMS,
            **_EXPERTS,
        },
        stacked=_MIXTURE.stacked,
        single_rows=_MIXTURE.single_rows,
        tiles_values=False,
    ),
}
