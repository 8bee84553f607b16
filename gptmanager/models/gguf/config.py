"""Converts the metadata of a GGUF file to the `config.json` of its checkpoint.

Unknown keys of the architecture are rejected, because they may change what the network computes.
Most values are checked by the code that reads the config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gptmanager.errors import ConfigError, quoted, quoted_path
from gptmanager.models.gguf.architecture import Architecture
from gptmanager.models.gguf.architectures import ARCHITECTURES, VARIANTS
from gptmanager.models.gguf.header import Header
from gptmanager.models.gguf.metadata import Metadata

# Keys that are ignored, because other keys or tensors define the value, or it is always the same.
_IGNORED = frozenset(
    """
    vocab_size tensor_data_layout rope.scaling.finetuned attention.key_length
    attention.value_length expert_used_count
    """.split()
)
_ROPE = frozenset(
    """
    rope.dimension_count rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    """.split()
)
_ONE_VALUE: Mapping[str, Any] = {"expert_count": 0, "attention.causal": True}
_ZERO_IS_NONE = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
_MAX_FACTORS = 1 << 16  # the most numbers that a tensor of RoPE divisors may have


def architecture_of(header: Header) -> Architecture:
    """Return the `Architecture` of a file. Raises ConfigError if it is not supported."""
    metadata = Metadata(header.path, header.metadata)
    name = metadata.text("general.architecture")
    if name is None or name not in ARCHITECTURES:
        raise ConfigError(
            f"{quoted_path(header.path)}: general.architecture = {quoted(name)} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    for variant in VARIANTS.get(name, ()):
        value = metadata.get(f"{name}.{variant.key}")
        if isinstance(value, np.ndarray):
            raise metadata.error(f"{name}.{variant.key}", "must be one number for all layers")
        if value == variant.value if variant.value is not None else value:
            return variant.architecture
    return ARCHITECTURES[name]


def config_of(header: Header) -> dict[str, Any]:
    """Return the content of the checkpoint's `config.json`.

    Raises a ConfigError that names the key or tensor that is missing or not supported.
    """
    own, metadata = architecture_of(header), Metadata(header.path, header.metadata)
    prefix = f"{header.metadata['general.architecture']}."
    _refuse_unknown(metadata, own, prefix)
    config: dict[str, Any] = {"model_type": own.model_type, **own.constants}
    for field, key in own.fields.items():
        if (value := metadata.get(prefix + key)) is not None:
            if field == "layer_types":
                config |= _layer_types(value)
                continue
            if isinstance(value, np.ndarray):
                value = _of_all_layers(metadata, prefix + key, value)
            if value or field not in _ZERO_IS_NONE:
                config[field] = value
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{quoted_path(header.path)} has no tensor token_embd.weight")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config |= {field: tensor in header.tensors for field, tensor in own.biases.items()}
    config["dtype"] = _dtype(header)
    if own.scaled_by_size is not None:
        config["query_pre_attn_scalar"] = _score_scalar(config, own.scaled_by_size)
    if "rope_theta" in own.fields:
        config |= _rope(header, metadata, prefix, config)
        if "rope.dimension_count" not in own.ignored | {*own.fields.values()}:
            config |= _partial(metadata, prefix, config)
    if "rope_scaling" in config:
        config.pop("rope_parameters", None)
    return {**config, **own.further(metadata, prefix, header.tensors.keys(), config)}


def _layer_types(pattern: Any) -> dict[str, Any]:
    """Return the config field that defines which layers have a sliding window.

    `pattern` is a flag for each layer, or a number n if all layers except every n-th have a window.
    """
    if not isinstance(pattern, np.ndarray):
        return {"sliding_window_pattern": pattern}
    kinds = [f"{'sliding' if is_sliding else 'full'}_attention" for is_sliding in pattern.tolist()]
    return {"layer_types": kinds}


def _of_all_layers(metadata: Metadata, key: str, values: np.ndarray) -> Any:
    if len({*values.tolist()}) != 1:
        raise metadata.error(key, "must be one number for all layers")
    return values[0].item()


def _refuse_unknown(metadata: Metadata, own: Architecture, prefix: str) -> None:
    required = {**_ONE_VALUE, **own.required}
    known = (_IGNORED | _ROPE | own.ignored | {*own.fields.values()}) - own.required.keys()
    for key in metadata:
        name = key.removeprefix(prefix)
        if name == key or name in known:
            continue
        if name not in required or metadata.plain(key) != required[name]:
            raise metadata.error(key, "not supported: it may change what the network computes")
    lengths = [metadata.plain(f"{prefix}attention.{end}_length") for end in ("value", "key")]
    if "attention.value_length" not in own.ignored and lengths[0] not in (None, lengths[1]):
        raise metadata.error(f"{prefix}attention.value_length", "must equal attention.key_length")


def _dtype(header: Header) -> str:
    """Return the dtype that stores the most bytes. Quantized tensors count as float32."""
    num_bytes: dict[str, int] = {}
    for tensor in header.tensors.values():
        own = tensor.num_rows * tensor.row_bytes
        num_bytes[tensor.type.dtype] = num_bytes.get(tensor.type.dtype, 0) + own
    return max(num_bytes, key=lambda dtype: num_bytes[dtype], default="float32")


def _score_scalar(config: Mapping[str, Any], num_layers: int) -> Any:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("num_hidden_layers") == num_layers and isinstance(hidden, int) and heads:
        return hidden // int(heads)
    return config.get("head_dim", 256)


def _rope(
    header: Header, metadata: Metadata, prefix: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config fields of RoPE scaling; empty if the model has no scaling."""

    def get(key: str) -> Any:
        return metadata.plain(f"{prefix}rope.scaling.{key}")

    kind, factor = get("type"), get("factor")
    if factor is None:
        factor = metadata.plain(f"{prefix}rope.scale_linear")  # the key's former name
    original = get("original_context_length")
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise metadata.error(f"{prefix}rope.scaling.type", "must be none, linear, yarn or longrope")
    factors = _factors(header)
    if factors is not None:
        if kind == "yarn":
            raise metadata.error(f"{prefix}rope.scaling.type", "not supported with rope_freqs")
        # llama.cpp divides by these divisors and by the linear factor
        linear = 1 if kind == "none" or factor in (None, 0) else factor
        if not isinstance(linear, int | float):
            raise metadata.error(f"{prefix}rope.scaling.factor", "must be a number")
        short, long = ([number * linear for number in numbers] for numbers in factors)
        scaling = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "factor": 1.0,
            "attention_factor": get("attn_factor") or 1.0,
        }
        given = original or config.get("max_position_embeddings")
        return {"rope_scaling": scaling, "original_max_position_embeddings": given}
    if get("attn_factor") not in (None, 1):
        raise metadata.error(f"{prefix}rope.scaling.attn_factor", "not supported without factors")
    if kind == "yarn":
        names = {
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling |= {ours: get(key) for ours, key in names.items() if get(key) is not None}
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        return {"rope_scaling": scaling}
    if kind != "none" and factor not in (None, 0, 1):
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    return {}


def _partial(metadata: Metadata, prefix: str, config: Mapping[str, Any]) -> dict[str, Any]:
    key = f"{prefix}rope.dimension_count"
    rotated, head = metadata.integer(key), config.get("head_dim")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if head is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head = hidden // heads
    if rotated is None or rotated == head or not isinstance(head, int) or head < 1:
        return {"partial_rotary_factor": 1.0}
    if not 0 < rotated < head:
        raise metadata.error(key, f"must be 1 to {head}, the size of a head")
    return {"partial_rotary_factor": rotated / head}


def _factors(header: Header) -> tuple[list[float], list[float]] | None:
    """Return the divisors of the RoPE frequencies: those for short, and those for long sequences.

    Returns None if the file has no tensors of divisors.
    """
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if "rope_freqs.weight" in header.tensors:  # Llama 3: the same for every length
        names = ("rope_freqs.weight",) * 2
    if not all(name in header.tensors for name in names):
        return None
    found = []
    for name in names:
        tensor = header.tensors[name]
        count = math.prod(tensor.shape)
        if len(tensor.shape) != 1 or count > _MAX_FACTORS or tensor.type.name != "F32":
            raise ConfigError(
                f"{quoted_path(header.path)}: tensor {name} of {tensor.type.name}, shape "
                f"{list(tensor.shape)}: must be F32, with one number for each rotated pair"
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            data = bytearray(file.read(count * 4))
        found.append(torch.frombuffer(data, dtype=torch.float32).tolist())
    return found[0], found[1]
