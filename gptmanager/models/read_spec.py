"""`read_spec`: from a `config.json` to the `ModelSpec` of the network that it describes.

A field that changes the mathematics is honored, or refused with a `ConfigError` that names it.
Ignored are the fields about training (dropouts, initializer_range, ...), generation (token ids,
use_cache, ...), bookkeeping (architectures, transformers_version, auto_map, ...), task heads
(summary_*, id2label, ...), and those that only reorder the arithmetic (pretraining_tp,
reorder_and_upcast_attn). An absent field has the default that transformers gives it; sizes must
be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from gptmanager.errors import ConfigError, quoted
from gptmanager.memory.checkpoint_files import check_depth
from gptmanager.models.families import FAMILIES, Family
from gptmanager.models.fields import Fields
from gptmanager.models.rope import read_rope
from gptmanager.models.spec import ModelSpec

# Fields that change the mathematics of relatives of these families -> the value that does not.
_NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "logits_scaling": 1.0,
    "num_experts": 0,
    "num_local_experts": 0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "residual_multiplier": 1.0,
}
_MAX_LAYERS = 10_000  # each has a dozen parameters, all with names
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def read_spec(
    config: Mapping[str, Any],
    *,
    dtype: str | torch.dtype | None = None,
    max_seq_len: int | None = None,
    num_tensors: int | None = None,
) -> ModelSpec:
    """The network that a `config.json` describes.

    `dtype` None: the config's, else float32. `max_seq_len` None: `max_position_embeddings`. It
    bounds the positions, and decides once which of longrope's factors hold. `num_tensors`:
    how many tensors the checkpoint has. Each layer has several of them.
    """
    check_depth("config.json", config)
    name = config.get("model_type")
    if name not in [*FAMILIES]:
        raise ConfigError(
            f"config.json: model_type = {quoted(name)}: needed is one of {[*FAMILIES]}"
        )
    family = FAMILIES[name]
    fields = Fields(config, family.defaults, family.spellings)
    _refuse_unsupported(fields, family)
    hidden, num_layers = (fields.size("hidden_size"), _read_num_layers(fields, num_tensors))
    num_heads, num_kv_heads, head_dim = _read_heads(fields, hidden, family.rotary)
    max_seq_len = _read_max_seq_len(fields, family.rotary, max_seq_len)
    return ModelSpec(
        family=name,
        vocab_size=fields.size("vocab_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", None if family.rotary else 4 * hidden),
        max_position_embeddings=fields.size("max_position_embeddings"),
        max_seq_len=max_seq_len,
        dtype=_read_dtype(fields, dtype),
        norm=family.norm,
        norm_eps=fields.number("norm_eps"),
        activation=family.activations[fields.get("hidden_act")],
        rope=read_rope(fields, head_dim, max_seq_len) if family.rotary else None,
        qk_norm=family.qk_norm,
        qkv_bias=_read_bias(fields, family.qkv_bias),
        out_bias=_read_bias(fields, family.out_bias),
        mlp_bias=_read_bias(fields, family.mlp_bias),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        windows=_read_windows(fields, family.windows, num_layers, max_seq_len),
        attention_scales=_read_scales(fields, head_dim, num_layers),
    )


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    for field, neutral in _NEUTRAL.items():
        if fields.get(field) not in (None, neutral):
            raise fields.error(field, "not supported")
    if fields.get("hidden_act") not in [*family.activations]:
        raise fields.error("hidden_act", f"needed is one of {[*family.activations]}")


def _read_num_layers(fields: Fields, num_tensors: int | None) -> int:
    num_layers = fields.size("num_hidden_layers", limit=_MAX_LAYERS)
    if num_tensors is not None and num_layers > num_tensors:
        raise fields.error("num_hidden_layers", f"the checkpoint has only {num_tensors} tensors")
    return num_layers


def _read_heads(fields: Fields, hidden: int, rotary: bool) -> tuple[int, int, int]:
    """(query heads, KV heads, head dim)."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} query heads is needed")
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error(
            "num_attention_heads", f"a divisor of the hidden size {hidden} is needed"
        )
    head_dim = fields.size("head_dim", hidden // heads)
    if rotary and head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd, rotation needs pairs")
    return heads, kv_heads, head_dim


def _read_max_seq_len(fields: Fields, rotary: bool, max_seq_len: int | None) -> int:
    max_positions = fields.size("max_position_embeddings")
    if max_seq_len is None:
        return max_positions
    if max_seq_len < 1:
        raise ConfigError(f"max_seq_len = {max_seq_len}: a positive integer is needed")
    if max_seq_len > max_positions and not rotary:
        raise ConfigError(
            f"max_seq_len = {max_seq_len}: the checkpoint has learned positions for {max_positions}"
        )
    return max_seq_len


def _read_dtype(fields: Fields, dtype: str | torch.dtype | None) -> torch.dtype:
    source = "dtype"
    if dtype is None:
        source = "torch_dtype" if fields.get("dtype") is None else "dtype"
        dtype = fields.get(source)
        dtype = "float32" if dtype is None else dtype
        source = f"config.json: {source}"
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else ""
    if name not in _DTYPES:
        raise ConfigError(f"{source} = {quoted(dtype)}: needed is one of {list(_DTYPES)}")
    return _DTYPES[name]


def _read_bias(fields: Fields, bias: bool | str) -> bool:
    return fields.flag(bias) if isinstance(bias, str) else bias


def _read_scales(fields: Fields, head_dim: int, num_layers: int) -> tuple[float, ...]:
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", if_null=True) else 1.0
    if fields.flag("scale_attn_by_inverse_layer_idx"):
        return tuple(scale / (layer + 1) for layer in range(num_layers))
    return (scale,) * num_layers


def _read_windows(
    fields: Fields, concerned: Literal["none", "all", "some"], num_layers: int, max_seq_len: int
) -> tuple[int | None, ...]:
    """A window for each layer; one that no position can leave is none."""
    window = None
    if fields.get("sliding_window") is not None:
        if concerned == "none":
            raise fields.error("sliding_window", "not supported in this family")
        if concerned == "all" or fields.flag("use_sliding_window"):
            window = fields.size("sliding_window")
    first = num_layers if window is None else 0
    if window is not None and concerned == "some":
        first = fields.count("max_window_layers")
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    given = types if fields.get("layer_types") is None else fields.get("layer_types")
    possible = ["full_attention", "sliding_attention"][: 1 if window is None else 2]
    if given != types and (
        concerned != "some"
        or not isinstance(given, list)
        or len(given) != num_layers
        or not all(kind in possible for kind in given)
    ):
        need = f"needed are {num_layers} of {possible}" if concerned == "some" else "not supported"
        raise fields.error("layer_types", need)
    if window is not None and window >= max_seq_len:
        window = None
    return tuple(window if kind == "sliding_attention" else None for kind in given)
