"""`Scheme`: how a checkpoint is quantized, read from its `quantization_config` with checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gptmanager.errors import ConfigError, quoted
from gptmanager.memory.tensor_sources import tensor_name
from gptmanager.models.converted_tensors import FIELD
from gptmanager.models.fields import MAX_SIZE
from gptmanager.models.quantized.mlx_options import MLX_FIELD, OPTIONS, Packings, read_packings

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
Block = tuple[int, int]
# Algorithm of ModelOpt -> blocks, see `Scheme`. The blocks of 4-bit floats are always the same.
_MODELOPT_ALGORITHMS: Mapping[str, tuple[Block, ...]] = {
    "FP8": (),
    "FP8_PER_CHANNEL_PER_TOKEN": (),
    "FP8_PB_WO": ((128, 128),),
    "MXFP8": ((1, 32),),
    "NVFP4": (),
    "W4A16_NVFP4": (),
    "MXFP4": (),
    "W4A8_MXFP4_FP8": (),
}
_MIXED, _LAYERS = "MIXED_PRECISION", "quantized_layers"
_QUARK_DTYPES = ("fp8_e4m3", "int8", "fp4")
_CT_TYPES = {("int", 4), ("int", 8), ("float", 8), ("float", 4)}
_PER_GROUP = ("group", "tensor_group")
_MODULE = ("bits", "group_size")  # options of a module of GPTQ or AWQ
_MAX_BLOCKS = 16  # different group sizes; each matrix is compared with all of them
_BY_GROUP = ("group", "dynamic", True)  # values of `actorder` that need `g_idx`


class Scheme(NamedTuple):
    """The options of a quantized checkpoint.

    `method`: `quant_method` of the config. `bits`: the allowed sizes of a packed integer, in bits.
    `blocks`: the allowed numbers of rows and columns that share a scale, except in GPTQ and AWQ in
    addition to whole rows and the whole matrix. `symmetric`: zero points must be the middle of the
    range. `offset`: a number that is added to stored zero points. `asymmetric`: matrices of
    integers must have zero points. `reordered`: matrices of integers with a scale per group of
    columns must have a tensor `g_idx`, which holds the group of each column. `packings`: of MLX,
    see `read_packings`.
    """

    method: str
    bits: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    symmetric: bool = False
    offset: int = 0
    asymmetric: bool = False
    reordered: bool = False
    packings: Packings = MappingProxyType({})


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
    given = {name: own.get(name) for name in ("quant_algo", _LAYERS)}
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
        raise _error(
            "quant_method",
            method,
            f"must be one of {[*_READERS]}; pass the checkpoint in floats, or quantized with one "
            "of these methods, or a GGUF file",
        )
    return _READERS[method](own)


def _is_mlx(config: Mapping[str, Any]) -> bool:
    """Return whether MLX has quantized a checkpoint. It writes the same object in two fields."""
    own = config.get(MLX_FIELD)
    is_alone = config.get(FIELD) in (None, own)
    return isinstance(own, dict) and not own.keys().isdisjoint(OPTIONS) and is_alone


def _find(config: Mapping[str, Any]) -> str | None:
    return next((name for name in _SPELLINGS if config.get(name) is not None), None)


def _error(field: str, value: Any, need: str) -> ConfigError:
    # a field may have the name of a module, which is as untrusted as the name of a tensor
    return ConfigError(f"config.json: {tensor_name(f'{FIELD}.{field}')} = {quoted(value)}: {need}")


def _unsupported(field: str, value: Any, need: str = "not supported") -> ConfigError:
    """Return the error for a checkpoint in a format that only other libraries read."""
    way_out = "pass the model in floats, in another format, or as a GGUF file"
    return _error(field, value, f"{need}; {way_out}")


def _compressed_tensors(own: Mapping[str, Any]) -> Scheme:
    for field in ("transform_config", "sparsity_config"):
        given = own.get(field)
        if given and not (isinstance(given, dict) and given.get("format") == "dense"):
            raise _unsupported(field, given)
    groups = own.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(it, dict) for it in groups.values()):
        raise _error("config_groups", groups, "must be an object of objects")
    formats = [("format", own)] + [
        (f"config_groups.{name}.format", groups[name]) for name in groups
    ]
    for field, place in formats:
        given = place.get("format")
        if given is not None and (not isinstance(given, str) or given not in _CT_FORMATS):
            raise _unsupported(field, given, f"must be one of {sorted(_CT_FORMATS)}")
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
        raise _error(field, weights, "must be an object: groups without weights are not supported")
    kind: Any = weights.get("type", "int") or "int"
    bits: Any = weights.get("num_bits")
    strategy: Any = weights.get("strategy")
    is_known = isinstance(kind, str) and type(bits) is int and (kind, bits) in _CT_TYPES
    if not is_known:
        given = {"type": kind, "num_bits": bits}
        raise _unsupported(field, given, "must be int with 4 or 8 bits, or float with 4 or 8")
    if strategy in _PER_GROUP:
        return bits, (1, _size(f"{field}.group_size", weights.get("group_size")))
    if strategy == "block":
        return bits, _block(f"{field}.block_structure", weights.get("block_structure"))
    if strategy not in (None, "tensor", "channel"):
        allowed = "must be tensor, channel, group, tensor_group or block"
        raise _error(f"{field}.strategy", strategy, allowed)
    return bits, None


def _fp8(own: Mapping[str, Any]) -> Scheme:
    if own.get("fmt") not in (None, "e4m3"):
        raise _unsupported("fmt", own.get("fmt"), "must be 'e4m3'")
    given = own.get("weight_block_size")
    return Scheme("fp8", blocks=() if given is None else (_block("weight_block_size", given),))


def _modelopt(own: Mapping[str, Any]) -> Scheme:
    if _upper(own.get("quant_algo")) != _MIXED:
        return Scheme("modelopt", blocks=_modelopt_blocks("quant_algo", own, [_MIXED]))
    layers = own.get(_LAYERS)
    if not isinstance(layers, dict) or not all(isinstance(it, dict) for it in layers.values()):
        raise _error(_LAYERS, layers, "must be an object of objects")
    found = (_modelopt_blocks(f"{_LAYERS}.{n}.quant_algo", it) for n, it in layers.items())
    return Scheme("modelopt", blocks=tuple(dict.fromkeys(itertools.chain.from_iterable(found))))


def _modelopt_blocks(
    field: str, own: Mapping[str, Any], others: Sequence[str] = ()
) -> tuple[Block, ...]:
    algorithm = own.get("quant_algo")
    found = _MODELOPT_ALGORITHMS.get(_upper(algorithm))
    if found is None:
        raise _unsupported(field, algorithm, f"must be one of {[*_MODELOPT_ALGORITHMS, *others]}")
    return found


def _upper(value: Any) -> str:
    """Return a string in upper case; "" for other values. ModelOpt also writes "fp8_pb_wo"."""
    return value.upper() if isinstance(value, str) else ""


def _quark(own: Mapping[str, Any]) -> Scheme:
    """Return the scheme of AMD's Quark. The tensors show which module has which of its formats."""
    places: dict[str, Any] = {"global_quant_config": own.get("global_quant_config") or {}}
    for name in ("layer_quant_config", "layer_type_quant_config"):
        given = own.get(name) or {}
        if not isinstance(given, dict):
            raise _error(name, given, "must be an object")
        places |= {f"{name}.{key}": value for key, value in given.items()}
    for field, place in places.items():
        if not isinstance(place, dict):
            raise _error(field, place, "must be an object")
        weight = place.get("weight")
        if weight is None:
            continue
        if not isinstance(weight, dict) or weight.get("dtype") not in [*_QUARK_DTYPES]:
            given = weight.get("dtype") if isinstance(weight, dict) else weight
            raise _unsupported(f"{field}.weight.dtype", given, f"must be one of {[*_QUARK_DTYPES]}")
    return Scheme("quark")


def _gptq(own: Mapping[str, Any]) -> Scheme:
    layout = own.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", layout, "must be 'gptq' or 'gptq_v2'")
    symmetric = own.get("sym", False)
    if not isinstance(symmetric, bool):
        raise _error("sym", symmetric, "must be true or false")
    desc_act = own.get("desc_act")
    if not (desc_act is None or isinstance(desc_act, bool)):
        raise _error("desc_act", desc_act, "must be true or false")
    return Scheme(
        "gptq",
        **_packings(own, (2, 4, 8)),
        symmetric=symmetric and all(it.get("sym", True) is True for _, it in _overrides(own)),
        offset=1 if layout == "gptq" else 0,
        reordered=desc_act is True,
    )


def _auto_round(own: Mapping[str, Any]) -> Scheme:
    """Return the scheme of GPTQ or AWQ: AutoRound packs its integers in the layout of either."""
    packing, act_bits = own.get("packing_format", "auto_round:auto_gptq"), own.get("act_bits", 16)
    if not isinstance(packing, str) or not packing.startswith("auto_round"):
        raise _unsupported("packing_format", packing, "must begin with 'auto_round'")
    if own.get("data_type", "int") != "int":
        raise _unsupported("data_type", own["data_type"], "must be 'int'")
    if act_bits not in (None, 16, 32):
        raise _unsupported("act_bits", act_bits, "must be 16")
    if own.get("rotation_config"):
        raise _unsupported("rotation_config", own["rotation_config"])
    if "awq" in packing:
        return _awq({**own, "version": "gemm"})
    is_old = "gptq" in packing and "gptqmodel" not in packing
    return _gptq({**own, "checkpoint_format": "gptq" if is_old else "gptq_v2"})


def _awq(own: Mapping[str, Any]) -> Scheme:
    layout = own.get("version", own.get("format", "gemm"))
    if not isinstance(layout, str) or layout.lower() != "gemm":
        raise _unsupported("version", layout, "must be 'gemm'")
    if own.get("zero_point", True) is not True:
        raise _error("zero_point", own.get("zero_point"), "must be true")
    return Scheme("awq", **_packings(own, (4,)))


def _packings(own: Mapping[str, Any], supported: Sequence[int]) -> dict[str, Any]:
    """Return the fields `bits` and `blocks` of a scheme with integers in groups of columns.

    If modules have options of their own, their tensors show which bits and groups each of them has.
    """
    bits_field = "w_bit" if "w_bit" in own else "bits"
    size_field = "q_group_size" if "q_group_size" in own else "group_size"
    default = own.get(bits_field), own.get(size_field)
    bits = {_bits(bits_field, default[0], supported)}
    blocks = {_group(size_field, default[1])}
    for field, given in _overrides(own):
        number, size = (given.get(it, usual) for it, usual in zip(_MODULE, default, strict=True))
        if number in (16, 32):  # the module is floats
            continue
        if given.get("data_type", "int") != "int":
            raise _unsupported(f"{field}.data_type", given["data_type"], "must be 'int'")
        bits.add(_bits(f"{field}.bits", number, supported))
        blocks.add(_group(f"{field}.group_size", size))
        if len(blocks) > _MAX_BLOCKS:
            raise _error(f"{field}.group_size", size, f"at most {_MAX_BLOCKS} sizes are supported")
    return {"bits": tuple(sorted(bits)), "blocks": tuple(sorted(blocks))}


def _overrides(own: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the fields with options for some modules: of AutoRound, and of GPTQModel."""
    for name in ("extra_config", "dynamic"):
        given = own.get(name) or {}
        if not isinstance(given, dict):
            raise _error(name, given, "must be an object")
        for key, options in given.items():
            if key.startswith("-:"):  # modules of GPTQModel that are floats
                continue
            if not isinstance(options, dict):
                raise _error(f"{name}.{key}", options, "must be an object")
            yield f"{name}.{key}", options


def _bits(field: str, bits: Any, supported: Sequence[int]) -> int:
    if type(bits) is not int or bits not in supported:
        raise _unsupported(field, bits, f"must be one of {[*supported]}")
    return bits


def _group(field: str, size: Any) -> Block:
    return 1, MAX_SIZE if size == -1 else _size(field, size)


def _size(field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise _error(field, value, "must be a positive integer")
    return value


def _block(field: str, value: Any) -> Block:
    if not isinstance(value, list) or len(value) != 2:
        raise _error(field, value, "must be a list of two positive integers")
    return _size(field, value[0]), _size(field, value[1])


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": lambda own: Scheme("fp8"),
    "modelopt": _modelopt,
    "quark": _quark,
    "mxfp4": lambda own: Scheme("mxfp4"),
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "bitsandbytes": lambda own: Scheme("bitsandbytes"),
}
