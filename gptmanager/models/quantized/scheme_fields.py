"""`Scheme`: how a checkpoint is quantized, and checks of the fields that describe it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gptmanager.errors import ConfigError, quoted
from gptmanager.memory.checkpoint.tensor_sources import tensor_name
from gptmanager.models.converted_tensors import FIELD
from gptmanager.models.fields import MAX_SIZE
from gptmanager.models.quantized.mlx_options import Packings

Block = tuple[int, int]
_CACHE_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")


class Scheme(NamedTuple):
    """The options of a quantized checkpoint.

    `method`: `quant_method` of the config. `bits`: the allowed sizes of a packed integer, in bits.
    `blocks`: the allowed numbers of rows and columns that share a scale, except in GPTQ and AWQ in
    addition to whole rows and the whole matrix. `symmetric`: zero points must be the middle of the
    range. `offset`: a number that is added to stored zero points. `order`: of Quark, the place of
    each integer in its word. `asymmetric`: matrices of
    integers must have zero points. `reordered`: matrices of integers with a scale per group of
    columns must have a tensor `g_idx`, which holds the group of each column. `packings`: of MLX,
    see `read_packings`. `cache_scales`: scales of the KV cache, if there are any, are those of
    numbers of 8 bits.
    """

    method: str
    bits: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    symmetric: bool = False
    offset: int = 0
    order: tuple[int, ...] = ()
    asymmetric: bool = False
    reordered: bool = False
    packings: Packings = MappingProxyType({})
    cache_scales: bool = True


def field_error(field: str, value: Any, need: str) -> ConfigError:
    """Return the error for a field below `FIELD`."""
    # a field may have the name of a module, which is as untrusted as the name of a tensor
    return ConfigError(f"config.json: {tensor_name(f'{FIELD}.{field}')} = {quoted(value)}: {need}")


def unsupported(field: str, value: Any, need: str = "not supported") -> ConfigError:
    """Return the error for a checkpoint in a format that only other libraries read."""
    way_out = "pass the model in floats, in another format, or as a GGUF file"
    return field_error(field, value, f"{need}; {way_out}")


def size_of(field: str, value: Any) -> int:
    """Return a size. Raises ConfigError if it is not a positive integer."""
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise field_error(field, value, "must be a positive integer")
    return value


def block_of(field: str, value: Any) -> Block:
    """Return two sizes. Raises ConfigError if `value` is not a list of them."""
    if not isinstance(value, list) or len(value) != 2:
        raise field_error(field, value, "must be a list of two positive integers")
    return size_of(field, value[0]), size_of(field, value[1])


def is_cache_in_8_bits(own: Mapping[str, Any]) -> bool:
    """Return whether scales of the KV cache, if there are any, are those of 8-bit numbers.

    ModelOpt names the format, such as "FP8" and "NVFP4"; others write its options.
    """
    given = cache_of(own)
    bits = given.get("num_bits") if isinstance(given, dict) else given
    return bits in (None, 8) or isinstance(bits, str) and "8" in bits


def cache_of(own: Mapping[str, Any]) -> Any:
    """Return what describes the numbers of the KV cache, or None."""
    return next((own[it] for it in _CACHE_FIELDS if own.get(it) is not None), None)
