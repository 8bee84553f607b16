"""Schemes of ModelOpt (NVIDIA) and Quark (AMD), read from a checkpoint's `quantization_config`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from gptmanager.kernels.gemm.panels.word_loops import AWQ_ORDER
from gptmanager.models.quantized.scheme_fields import (
    Block,
    Scheme,
    cache_of,
    field_error,
    size_of,
    unsupported,
)

# Algorithm of ModelOpt -> blocks, see `Scheme`. The blocks of 4-bit floats are always the same.
_MODELOPT_ALGORITHMS: Mapping[str, tuple[Block, ...]] = {
    "FP8": (),
    "FP8_PER_CHANNEL_PER_TOKEN": (),
    "FP8_PB_WO": ((128, 128),),
    "MXFP8": ((1, 32),),
    "NVFP4": (),
    "NVFP4_AWQ": (),
    "W4A16_NVFP4": (),
    "W4A8_NVFP4_FP8": (),
    "MXFP4": (),
    "W4A8_MXFP4_FP8": (),
    "W4A16_AWQ": (),
    "W4A8_AWQ": (),
    "W8A16": (),
    "W8A8_SQ_PER_CHANNEL": (),
}
_MIXED, LAYERS = "MIXED_PRECISION", "quantized_layers"
_PACKED = ("int4", "uint4")
_QUARK_DTYPES = ("fp8_e4m3", "int8", "fp4", *_PACKED)
_ORDERS = {"reorder": AWQ_ORDER, "order": tuple(range(8))}  # `pack_method` of Quark


def modelopt_scheme(own: Mapping[str, Any]) -> Scheme:
    """Return the scheme of ModelOpt. The tensors show which module has which format."""
    if (
        own.get("quant_algo") is None and cache_of(own) is not None
    ):  # only the KV cache is quantized
        return Scheme("modelopt")
    if _upper(own.get("quant_algo")) != _MIXED:
        return Scheme("modelopt", blocks=_modelopt_blocks("quant_algo", own, [_MIXED]))
    layers = own.get(LAYERS)
    if not isinstance(layers, dict) or not all(isinstance(it, dict) for it in layers.values()):
        raise field_error(LAYERS, layers, "must be an object of objects")
    found = (_modelopt_blocks(f"{LAYERS}.{n}.quant_algo", it) for n, it in layers.items())
    return Scheme("modelopt", blocks=tuple(dict.fromkeys(itertools.chain.from_iterable(found))))


def _modelopt_blocks(
    field: str, own: Mapping[str, Any], others: Sequence[str] = ()
) -> tuple[Block, ...]:
    algorithm = own.get("quant_algo")
    found = _MODELOPT_ALGORITHMS.get(_upper(algorithm))
    if found is None:
        raise unsupported(field, algorithm, f"must be one of {[*_MODELOPT_ALGORITHMS, *others]}")
    return found


def _upper(value: Any) -> str:
    """Return a string in upper case; "" for other values. ModelOpt also writes "fp8_pb_wo"."""
    return value.upper() if isinstance(value, str) else ""


def quark_scheme(own: Mapping[str, Any]) -> Scheme:
    """Return the scheme of AMD's Quark. The tensors show which module has which of its formats."""
    places: dict[str, Any] = {"global_quant_config": own.get("global_quant_config") or {}}
    for name in ("layer_quant_config", "layer_type_quant_config"):
        given = own.get(name) or {}
        if not isinstance(given, dict):
            raise field_error(name, given, "must be an object")
        places |= {f"{name}.{key}": value for key, value in given.items()}
    found = []
    for field, place in places.items():
        if not isinstance(place, dict):
            raise field_error(field, place, "must be an object")
        if place.get("weight") is not None:
            found.append(_quark_weight(f"{field}.weight", place["weight"]))
    dtypes = {dtype for dtype, _ in found if dtype in _PACKED}
    if len(dtypes) > 1:
        raise unsupported("layer_quant_config", sorted(dtypes), "one of them must be alone")
    exported = own.get("export")
    method = exported.get("pack_method") if isinstance(exported, dict) else None
    order = _ORDERS.get(method) if isinstance(method, str) else None
    if dtypes and order is None:
        raise unsupported("export.pack_method", method, f"must be one of {[*_ORDERS]}")
    return Scheme(
        "quark",
        blocks=tuple(dict.fromkeys(block for _, block in found if block is not None)),
        offset=8 if dtypes == {"int4"} else 0,
        order=order if dtypes and order is not None else (),
    )


def _quark_weight(field: str, weight: Any) -> tuple[str, Block | None]:
    """Return the dtype of weights, and the shape of a block with one scale; see `Scheme.blocks`."""
    dtype = weight.get("dtype") if isinstance(weight, dict) else weight
    if not isinstance(weight, dict) or dtype not in [*_QUARK_DTYPES]:
        raise unsupported(f"{field}.dtype", dtype, f"must be one of {[*_QUARK_DTYPES]}")
    kind = weight.get("qscheme")
    if dtype in (*_PACKED, "int8") and (kind == "per_group") != (dtype in _PACKED):
        need = "must be 'per_group' for 4 bits, and 'per_tensor' or 'per_channel' for int8"
        raise unsupported(f"{field}.qscheme", kind, need)
    if kind != "per_group" or dtype == "fp4":
        return dtype, None
    return dtype, (1, size_of(f"{field}.group_size", weight.get("group_size")))
