"""`read_spec`: converts a `config.json` to the `ModelSpec` of its network.

A field that changes the mathematics is either applied, or rejected with a `ConfigError` that names
it. Absent fields have transformers' defaults. Most sizes have no default, and are required, except
in the `text_config` of a multimodal model.
`config_fields` lists the fields that are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gptmanager.arguments import at_least
from gptmanager.errors import ConfigError, quoted
from gptmanager.kernels.activations.activation_kinds import Activation
from gptmanager.memory.checkpoint.untrusted_files import check_depth
from gptmanager.models.families import FAMILIES, Family
from gptmanager.models.families.config_fields import refuse_unread
from gptmanager.models.families.layer_types import CHUNKED, listed_layers, read_windows
from gptmanager.models.families.wrappers import text_config, ties_by_wrapper, without_wrapper
from gptmanager.models.fields import Fields
from gptmanager.models.other_folders import describe_other_type
from gptmanager.models.recurrent.delta_rule import DeltaRule
from gptmanager.models.rope_scaling import Rope, read_rope
from gptmanager.models.spec import Attention, Layer, Mlp, ModelSpec, Norms

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_MAX_LAYERS = 10_000  # each layer has a dozen named parameters
_MAX_PARTS = 100_000  # query heads, linear key heads or experts of all layers: loading lists each
_MAX_EPS = 1.0  # epsilon is added to a mean square, and is far smaller in real models
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
    tensors: Collection[str] | None = None,
) -> ModelSpec:
    """Return the network that a `config.json` describes.

    `dtype` is by default the config's, or float32. `max_seq_len`, by default the config's
    `max_position_embeddings`, bounds the positions, and decides between longrope's short and long
    factors. `tensors`: the names of the tensors in the checkpoint. Their number bounds the number
    of layers, and the output matrix shows whether the model has one of its own. Raises ConfigError
    for a value that is not supported.
    """
    check_depth("config.json", config)
    of_wrapper, config = ties_by_wrapper(config), text_config(config)
    name = config.get("model_type")
    if name not in [*FAMILIES]:
        why = describe_other_type(config) or f"must be one of {[*FAMILIES]}"
        raise ConfigError(f"config.json: model_type = {quoted(name)}: {why}")
    family = FAMILIES[name]
    fields = Fields(config, family.defaults, family.spellings)
    num_layers = _read_num_layers(fields, tensors)
    max_seq_len = _read_max_seq_len(fields, family.rotary, max_seq_len)
    _check_chunks(fields, max_seq_len)
    windows, types = read_windows(fields, family.windows, num_layers, max_seq_len)
    fields.set_layer_types(types)
    layers = _read_layers(fields, family, windows, max_seq_len)
    _check_counts(layers)
    spec = ModelSpec(
        family=name,
        vocab_size=fields.size("vocab_size"),
        num_layers=num_layers,
        hidden_size=fields.size("hidden_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        max_seq_len=max_seq_len,
        dtype=_read_dtype(fields, dtype),
        layers=layers,
        norms=_read_norms(fields, family),
        tied_embeddings=_read_tied(fields, of_wrapper, tensors),
        qkv_bias=fields.decided(family.qkv_bias),
        out_bias=fields.decided(family.out_bias),
        mlp_bias=fields.decided(family.mlp_bias),
        head_bias=fields.decided(family.head_bias),
        parallel=fields.decided(family.parallel),
        position_offset=family.position_offset,
        **family.network(fields),
    )
    refuse_unread(fields, family.neutral)
    return spec


def _read_layers(
    fields: Fields, family: Family, windows: Sequence[int | None], max_seq_len: int
) -> tuple[Layer, ...]:
    heads, kv_heads, head_dim = _read_heads(fields, family.rotary)
    interleaved = fields.decided(family.interleaved)
    ropes: dict[tuple[str, int], Rope] = {}

    def rope(*kind: Any) -> Rope | None:
        if family.rotary and kind not in ropes:
            layer_type, dim = kind
            ropes[kind] = read_rope(
                *(fields, dim, max_seq_len),
                layer_type=layer_type,
                interleaved=interleaved,
                backward=family.backward,
            )
        return ropes.get(kind)

    mlp = _read_mlp(fields, family)
    layers = []
    for index, window in enumerate(windows):
        own_type = fields.layer_types[index] if fields.layer_types else "full_attention"
        further = family.attention(fields, index)
        own_rope = rope(own_type, further.get("rope_dim", further.get("head_dim", head_dim)))
        if own_rope is not None and "rope_theta" in further:
            own_rope = replace(own_rope, theta=further["rope_theta"])
        attention = Attention(
            heads,
            kv_heads,
            head_dim,
            scale=_read_scale(fields, head_dim, index),
            window=window,
            chunked=own_type == CHUNKED and window is not None,
            rope=own_rope,
        )
        changes = {it: further[it] for it in further if it not in ("rope_dim", "rope_theta")}
        attention = replace(attention, **changes)
        found = family.experts(fields, index) if family.experts is not None else None
        own = family.mlp(fields, index)
        if own is not None and found is not None:
            own = {**own, "experts": found[0], "width": found[1]}
        layers.append(Layer(attention, None if own is None else replace(mlp, **own), family.scaled))
    return tuple(layers)


def _check_counts(layers: Sequence[Layer]) -> None:
    kinds = (layer.attention.recurrent for layer in layers)
    heads = sum(layer.attention.num_heads for layer in layers)
    key_heads = sum(it.shape.key_heads for it in kinds if isinstance(it, DeltaRule))
    experts = sum(0 if it.experts is None else it.experts.count for it in layers)
    counted = (heads, "query heads"), (key_heads, "linear_num_key_heads"), (experts, "experts")
    for count, what in counted:
        if count > _MAX_PARTS:
            raise ConfigError(
                f"config.json: {count} {what} in all layers: at most {_MAX_PARTS} are supported"
            )


def _read_mlp(fields: Fields, family: Family) -> Mlp:
    given = fields.get("hidden_act")
    has_xielu = family.xielu and given == "xielu"
    if not has_xielu and given not in [*_ACTIVATIONS]:
        raise fields.error("hidden_act", f"must be one of {[*_ACTIVATIONS]}")
    is_optional = family.defaults.get("intermediate_size", 0) is None
    default = 4 * fields.size("hidden_size") if is_optional else None
    width = fields.size("intermediate_size", default)
    activation = family.activation or ("silu" if has_xielu else _ACTIVATIONS[given])
    return Mlp(width, activation, family.gated, xielu=has_xielu)


def _read_norms(fields: Fields, family: Family) -> Norms:
    norms = family.norms
    has_query_key = norms.query_key != "none" and fields.decided(family.qk_norm)
    has_own = norms.before_mlp and not fields.decided(family.one_norm)
    eps = fields.number("norm_eps", limit=_MAX_EPS)
    if fields.has_default("rms_norm_eps") and fields.get("rms_norm_eps") is not None:
        norms = replace(norms, kind="rms")  # Cohere's mixtures have either kind
        eps = fields.number("rms_norm_eps", limit=_MAX_EPS)
    return replace(
        norms,
        eps=eps,
        query_key=norms.query_key if has_query_key else "none",
        before_mlp=has_own,
    )


def _read_tied(fields: Fields, of_wrapper: Any, tensors: Collection[str] | None) -> bool:
    """Return whether the output matrix is the embedding.

    If the fields of a text model and of its wrapper (`of_wrapper`) differ, the tensors decide.
    """
    tied = fields.flag("tie_word_embeddings")
    if of_wrapper is not None:
        of_wrapper = Fields({"tie_word_embeddings": of_wrapper}, {}, {}).flag("tie_word_embeddings")
    if tensors is None:
        return tied if of_wrapper is None else of_wrapper
    if of_wrapper in (None, tied):
        return tied
    return "lm_head.weight" not in map(without_wrapper, tensors)


def _read_num_layers(fields: Fields, tensors: Collection[str] | None) -> int:
    num_layers = fields.size("num_hidden_layers", listed_layers(fields), limit=_MAX_LAYERS)
    if tensors is not None and num_layers > len(tensors):
        raise fields.error("num_hidden_layers", f"the checkpoint has only {len(tensors)} tensors")
    return num_layers


def _read_heads(fields: Fields, rotary: bool) -> tuple[int, int, int]:
    """Return the numbers of query heads and KV heads, and the head dimension."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads", limit=_MAX_PARTS)
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"must divide {fields.as_given('num_attention_heads')}"
        )
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error("num_attention_heads", f"must divide {fields.as_given('hidden_size')}")
    head_dim = fields.size("head_dim", hidden // heads)
    if rotary and head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} must be even, because rotation needs pairs")
    return heads, kv_heads, head_dim


def _read_max_seq_len(fields: Fields, rotary: bool, max_seq_len: int | None) -> int:
    max_positions = fields.size("max_position_embeddings")
    if max_seq_len is None:
        return max_positions
    max_seq_len = at_least(1, "max_seq_len", max_seq_len)
    if max_seq_len > max_positions and not rotary:
        raise ConfigError(
            f"max_seq_len = {max_seq_len}: must be at most {max_positions}, because the checkpoint "
            f"has learned positions for {max_positions} tokens"
        )
    return max_seq_len


def _check_chunks(fields: Fields, max_seq_len: int) -> None:
    """Refuse sequences that dual chunk attention divides. In one chunk, it is normal attention."""
    name = "dual_chunk_attention_config"
    if not fields.has_default(name) or fields.get(name) is None:
        return
    if not isinstance(fields.get(name), Mapping):
        raise fields.error(name, "must be an object")
    own = Fields(fields.get(name), {}, {}, f"config.json: {name}.")
    longest = own.size("chunk_size") - own.size("local_size")
    if max_seq_len > longest:
        raise ConfigError(
            f"max_seq_len = {max_seq_len}: must be at most {longest}, because {name} divides "
            "longer sequences into chunks, which is not supported"
        )


def read_dtype(config: Mapping[str, Any], dtype: str | torch.dtype | None) -> torch.dtype:
    """Return `dtype`; if it is None, the dtype in the `config.json`, by default float32."""
    return _read_dtype(Fields(config, {}, {}), dtype)


def _read_dtype(fields: Fields, dtype: str | torch.dtype | None) -> torch.dtype:
    source = "dtype"
    given = fields.get("dtype"), fields.get("torch_dtype")
    if dtype is None:
        source = "config.json: " + ("torch_dtype" if given[0] is None else "dtype")
        dtype = given[1] if given[0] is None else given[0]
        dtype = "float32" if dtype is None else dtype
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else ""
    if name not in _DTYPES:
        raise ConfigError(f"{source} = {quoted(dtype)}: must be one of {list(_DTYPES)}")
    return _DTYPES[name]


def _read_scale(fields: Fields, head_dim: int, layer: int) -> float:
    scale: float = head_dim**-0.5
    if not fields.has_default("scale_attn_weights"):
        return scale
    scale = scale if fields.flag("scale_attn_weights", if_null=True) else 1.0
    return scale / (layer + 1) if fields.flag("scale_attn_by_inverse_layer_idx") else scale
