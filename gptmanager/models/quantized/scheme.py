"""`read_scheme`: reads how a checkpoint is quantized from its config.json, with checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gptmanager.errors import ConfigError, quoted
from gptmanager.models.converted_tensors import FIELD
from gptmanager.models.quantized.integer_schemes import auto_round_scheme, awq_scheme, gptq_scheme
from gptmanager.models.quantized.mlx_options import MLX_FIELD, OPTIONS, read_packings
from gptmanager.models.quantized.scheme_fields import (
    Block,
    Scheme,
    block_of,
    field_error,
    is_cache_in_8_bits,
    size_of,
    unsupported,
)
from gptmanager.models.quantized.vendor_schemes import LAYERS, modelopt_scheme, quark_scheme

_SPELLINGS = (FIELD, "compression_config")  # the second one is an older name
_CT_FORMATS = frozenset(
    [
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
        "dense",
    ]
)
MODELOPT_FILE = "hf_quant_config.json"  # how ModelOpt has quantized a checkpoint
_CT_TYPES = {*(("int", bits) for bits in range(2, 9)), ("float", 8), ("float", 4)}
_PER_GROUP = ("group", "tensor_group")
_BY_GROUP = ("group", "dynamic", True)  # values of `actorder` that need `g_idx`


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the fields that describe its quantization.

    In a multimodal checkpoint, they may be in the `text_config`.
    """
    kept, inner = _floats(config), config.get("text_config")
    return {**kept, "text_config": _floats(inner)} if isinstance(inner, dict) else kept


def _floats(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {MLX_FIELD, FIELD} if _is_mlx(config) else {_find(config)}
    return {field: value for field, value in config.items() if field not in found}


def with_modelopt(config: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with what ModelOpt writes to a file of its own, if the config lacks it."""
    own, producer = other.get("quantization"), other.get("producer")
    is_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    if _find(config) is not None or not is_modelopt or not isinstance(own, dict):
        return config
    given = {name: own.get(name) for name in ("quant_algo", "kv_cache_quant_algo", LAYERS)}
    return {**config, FIELD: {"quant_method": "modelopt", **given}}


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a quantized checkpoint, or None for a checkpoint of floats.

    Raises ConfigError for a method, format or value that is not supported.
    """
    inner = config.get("text_config")
    if isinstance(inner, dict) and not _is_mlx(config) and _find(config) is None:
        config = inner
    if _is_mlx(config):
        return Scheme("mlx", packings=read_packings(config[MLX_FIELD]))
    name = _find(config)
    if name is None:
        return None
    own = config[name]
    if not isinstance(own, dict):
        raise ConfigError(f"config.json: {name} = {quoted(own)}: must be an object")
    usual = "modelopt" if "quant_algo" in own else "compressed-tensors"
    method = own.get("quant_method", usual if "config_groups" in own else None)
    if not isinstance(method, str) or method not in _READERS:
        raise field_error(
            "quant_method",
            method,
            f"must be one of {[*_READERS]}; pass the checkpoint in floats, or quantized with one "
            "of these methods, or a GGUF file",
        )
    return _READERS[method](own)._replace(cache_scales=is_cache_in_8_bits(own))


def _is_mlx(config: Mapping[str, Any]) -> bool:
    """Return whether MLX has quantized a checkpoint. It writes the same object in two fields."""
    own = config.get(MLX_FIELD)
    is_alone = config.get(FIELD) in (None, own)
    return isinstance(own, dict) and not own.keys().isdisjoint(OPTIONS) and is_alone


def _find(config: Mapping[str, Any]) -> str | None:
    return next((name for name in _SPELLINGS if config.get(name) is not None), None)


def _compressed_tensors(own: Mapping[str, Any]) -> Scheme:
    for field in ("transform_config", "sparsity_config"):
        given = own.get(field)
        if given and not (isinstance(given, dict) and given.get("format") == "dense"):
            raise unsupported(field, given)
    groups = own.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(it, dict) for it in groups.values()):
        raise field_error("config_groups", groups, "must be an object of objects")
    formats = [("format", own)] + [
        (f"config_groups.{name}.format", groups[name]) for name in groups
    ]
    for field, place in formats:
        given = place.get("format")
        if given is not None and (not isinstance(given, str) or given not in _CT_FORMATS):
            raise unsupported(field, given, f"must be one of {sorted(_CT_FORMATS)}")
    found = [_ct_weights(name, group.get("weights")) for name, group in groups.items()]
    bits = {count for count, _ in found}
    weights = [group["weights"] for group in groups.values()]
    return Scheme(
        "compressed-tensors",
        bits=tuple(sorted(bits)),
        blocks=tuple(dict.fromkeys(block for _, block in found if block is not None)),
        # If only some groups have zero points, the tensors show which modules have them.
        asymmetric=bool(weights) and all(it.get("symmetric") is False for it in weights),
        reordered=bool(weights) and all(it.get("actorder") in _BY_GROUP for it in weights),
    )


def _ct_weights(name: str, weights: Any) -> tuple[int, Block | None]:
    """Return the bits of a weight in a group of modules, and the shape of a block with one scale.

    The shape is None if a scale is shared by a whole row or matrix.
    """
    field = f"config_groups.{name}.weights"
    if not isinstance(weights, dict):
        raise field_error(
            field, weights, "must be an object: groups without weights are not supported"
        )
    kind: Any = weights.get("type", "int") or "int"
    bits: Any = weights.get("num_bits")
    strategy: Any = weights.get("strategy")
    is_known = isinstance(kind, str) and type(bits) is int and (kind, bits) in _CT_TYPES
    if not is_known:
        given = {"type": kind, "num_bits": bits}
        raise unsupported(field, given, "must be int with 2 to 8 bits, or float with 4 or 8")
    if strategy in _PER_GROUP:
        return bits, (1, size_of(f"{field}.group_size", weights.get("group_size")))
    if strategy == "block":
        return bits, block_of(f"{field}.block_structure", weights.get("block_structure"))
    if strategy not in (None, "tensor", "channel"):
        allowed = "must be tensor, channel, group, tensor_group or block"
        raise field_error(f"{field}.strategy", strategy, allowed)
    return bits, None


def _fp8(own: Mapping[str, Any]) -> Scheme:
    if own.get("fmt") not in (None, "e4m3"):
        raise unsupported("fmt", own.get("fmt"), "must be 'e4m3'")
    usual = [1, 32] if own.get("quant_method") == "mxfp8" else None
    given = usual if own.get("weight_block_size") is None else own["weight_block_size"]
    return Scheme("fp8", blocks=() if given is None else (block_of("weight_block_size", given),))


def _torchao(own: Mapping[str, Any]) -> Scheme:
    """Return the scheme of torchao. The tensors show which module has which of its formats."""
    given = own.get("quant_type")
    for kind in given.values() if isinstance(given, dict) else [given]:
        name = kind.get("_type") if isinstance(kind, dict) else kind
        if isinstance(name, str) and name.lower().startswith(("int4", "uint4", "mx", "nvfp4")):
            raise unsupported("quant_type", name, "must be of 8 bits, or unpacked to int8")
    return Scheme("torchao")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": lambda own: Scheme("fp8"),
    "modelopt": modelopt_scheme,
    "quark": quark_scheme,
    "mxfp4": lambda own: Scheme("mxfp4"),
    "mxfp8": _fp8,
    "gptq": gptq_scheme,
    "awq": awq_scheme,
    "auto-round": auto_round_scheme,
    "intel/auto-round": auto_round_scheme,
    "bitsandbytes": lambda own: Scheme("bitsandbytes"),
    "torchao": _torchao,
}
