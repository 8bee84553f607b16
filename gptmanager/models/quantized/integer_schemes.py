"""Schemes of GPTQ, AWQ and AutoRound, read from a checkpoint's `quantization_config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gptmanager.models.fields import MAX_SIZE
from gptmanager.models.quantized.scheme_fields import (
    Block,
    Scheme,
    field_error,
    size_of,
    unsupported,
)

_MODULE = ("bits", "group_size")  # options of a module of GPTQ or AWQ
_MAX_BLOCKS = 16  # different group sizes; each matrix is compared with all of them


def gptq_scheme(own: Mapping[str, Any], bits: Sequence[int] = (2, 3, 4, 8)) -> Scheme:
    """Return the scheme of GPTQ, version 1 or 2. `bits`: the supported sizes of an integer.

    GPTQModel has planes of single bits in layouts of 5, 6 and 7 bits, which are not supported.
    """
    given = (own.get(field) for field in ("checkpoint_format", "format"))
    layout = next((it for it in given if it is not None), "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise unsupported("checkpoint_format", layout, "must be 'gptq' or 'gptq_v2'")
    symmetric = own.get("sym", False)
    if not isinstance(symmetric, bool):
        raise field_error("sym", symmetric, "must be true or false")
    desc_act = own.get("desc_act")
    if not (desc_act is None or isinstance(desc_act, bool)):
        raise field_error("desc_act", desc_act, "must be true or false")
    return Scheme(
        "gptq",
        **_packings(own, bits),
        symmetric=symmetric and all(it.get("sym", True) is True for _, it in _overrides(own)),
        offset=1 if layout == "gptq" else 0,
        reordered=desc_act is True,
    )


def auto_round_scheme(own: Mapping[str, Any]) -> Scheme:
    """Return the scheme of GPTQ or AWQ: AutoRound packs its integers in the layout of either."""
    packing, act_bits = own.get("packing_format", "auto_round:auto_gptq"), own.get("act_bits", 16)
    if not isinstance(packing, str) or not packing.startswith("auto_round"):
        raise unsupported("packing_format", packing, "must begin with 'auto_round'")
    if own.get("data_type", "int") != "int":
        raise unsupported("data_type", own["data_type"], "must be 'int'")
    if act_bits not in (None, 16, 32):
        raise unsupported("act_bits", act_bits, "must be 16")
    if own.get("rotation_config"):
        raise unsupported("rotation_config", own["rotation_config"])
    if "awq" in packing:
        return awq_scheme({**own, "version": "gemm"})
    is_old = "gptq" in packing and "gptqmodel" not in packing
    layout = "gptq" if is_old else "gptq_v2"
    return gptq_scheme({**own, "checkpoint_format": layout}, range(2, 9))


def awq_scheme(own: Mapping[str, Any]) -> Scheme:
    """Return the scheme of AWQ, version GEMM."""
    layout = own.get("version", own.get("format", "gemm"))
    if not isinstance(layout, str) or layout.lower() != "gemm":
        raise unsupported("version", layout, "must be 'gemm'")
    if own.get("zero_point", True) is not True:
        raise field_error("zero_point", own.get("zero_point"), "must be true")
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
            raise unsupported(f"{field}.data_type", given["data_type"], "must be 'int'")
        bits.add(_bits(f"{field}.bits", number, supported))
        blocks.add(_group(f"{field}.group_size", size))
        if len(blocks) > _MAX_BLOCKS:
            raise field_error(
                f"{field}.group_size", size, f"at most {_MAX_BLOCKS} sizes are supported"
            )
    return {"bits": tuple(sorted(bits)), "blocks": tuple(sorted(blocks))}


def _overrides(own: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the fields with options for some modules: of AutoRound, and of GPTQModel."""
    for name in ("extra_config", "dynamic"):
        given = own.get(name) or {}
        if not isinstance(given, dict):
            raise field_error(name, given, "must be an object")
        for key, options in given.items():
            if key.startswith("-:"):  # modules of GPTQModel that are floats
                continue
            if not isinstance(options, dict):
                raise field_error(f"{name}.{key}", options, "must be an object")
            yield f"{name}.{key}", options


def _bits(field: str, bits: Any, supported: Sequence[int]) -> int:
    if type(bits) is not int or bits not in supported:
        raise unsupported(field, bits, f"must be one of {[*supported]}")
    return bits


def _group(field: str, size: Any) -> Block:
    return 1, MAX_SIZE if size == -1 else size_of(field, size)
