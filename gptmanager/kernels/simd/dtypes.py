"""Lanes of any dtype: widened to float32 as they are read, rounded once as they are written.

Compiled code identifies a dtype by a number. A bfloat16 is the upper half of a float32.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.simd.lanes import (
    FLOAT,
    INDICES,
    INT,
    LANES,
    LONG,
    VECTOR,
    call,
    get_int,
    int_lanes,
    intrinsic,
    lanes_from,
    load_either,
    load_part,
    long,
    loop,
    nothing,
    put_int,
    real,
    store_either,
    store_part,
    vector,
)

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_features = cpu_features()
HAS_FLOAT16 = "sse2" not in _features or bool(_features.get("f16c"))
if HAS_FLOAT16:  # without F16C, LLVM would call a library that is not linked
    DTYPES[torch.float16] = FLOAT16

# A float of Python is a float64 in compiled code.
ZERO, ONE, NAN = np.float32(0.0), np.float32(1.0), np.float32(np.nan)
LOG2_E = np.float32(1.4426950408889634)
MINUS_LOG2_E = -LOG2_E

_BYTE = ir.IntType(8)
_SHORT = ir.IntType(16)
_SHORTS, _HALVES = ir.VectorType(_SHORT, LANES), ir.VectorType(ir.HalfType(), LANES)


_VECTORS = {"float32": VECTOR, "bfloat16": _SHORTS, "float16": _HALVES}
_NAMES = {VECTOR: "v16f32", _SHORTS: "v16i16", _HALVES: "v16f16"}


def itemsize(dtype: str) -> int:
    """Return the bytes per element of a dtype."""
    return 4 if dtype == "float32" else 2


def load_at(builder: Any, dtype: str, address: Any, index: Any, count: Any = None) -> Any:
    """Load 16 lanes as float32. If `count` is given, lanes from `count` on are zero, not read."""
    kind, size = _VECTORS[dtype], itemsize(dtype)
    pointer = _pointer(builder, address, index, kind, size)
    if count is None:
        value = builder.load(pointer, align=size)
    else:
        mask, align = lanes_from(builder, "<", count), ir.Constant(INT, size)
        name, rest = f"llvm.masked.load.{_NAMES[kind]}.p0", ir.Constant(kind, None)
        value = call(builder, name, kind, pointer, align, mask, rest)
    if dtype == "bfloat16":
        return builder.bitcast(builder.shl(builder.zext(value, INDICES), int_lanes(16)), VECTOR)
    return builder.fpext(value, VECTOR) if dtype == "float16" else value


def load_pairs(builder: Any, address: Any, index: Any) -> tuple[Any, Any]:
    """Load 32 elements of bfloat16; return those at even and at odd indices as float32."""
    both = builder.load(_pointer(builder, address, index, INDICES, 2), align=2)
    even = builder.shl(both, int_lanes(16))
    odd = builder.and_(both, int_lanes(-1 << 16))
    return builder.bitcast(even, VECTOR), builder.bitcast(odd, VECTOR)


def _pointer(builder: Any, address: Any, index: Any, kind: Any, size: int) -> Any:
    start = builder.add(address, builder.mul(index, ir.Constant(LONG, size)))
    return builder.inttoptr(start, kind.as_pointer())


def _read(builder: Any, dtype: str, address: Any, index: Any, count: Any) -> Any:
    return load_either(
        builder, count, lambda masked_to: load_at(builder, dtype, address, index, masked_to)
    )


def _write(builder: Any, address: Any, index: Any, value: Any, count: Any) -> None:
    pointer = _pointer(builder, address, index, value.type, 2)
    store_either(builder, count, value, pointer, 2, _NAMES[value.type])


@intrinsic(vector, long, long, long)
def _load_bfloat16(builder: Any, address: Any, index: Any, count: Any) -> Any:
    return _read(builder, "bfloat16", address, index, count)


@intrinsic(vector, long, long, long)
def _load_float16(builder: Any, address: Any, index: Any, count: Any) -> Any:
    return _read(builder, "float16", address, index, count)


@intrinsic(nothing, long, long, vector, long)
def _store_bfloat16(builder: Any, address: Any, index: Any, value: Any, count: Any) -> None:
    """Store lanes rounded to nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, INDICES)
    odd = builder.and_(builder.lshr(bits, int_lanes(16)), int_lanes(1))
    rounded = builder.add(bits, builder.add(odd, int_lanes(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, int_lanes(0x7FC00000), rounded)
    upper = builder.trunc(builder.lshr(rounded, int_lanes(16)), _SHORTS)
    _write(builder, address, index, upper, count)


@intrinsic(nothing, long, long, vector, long)
def _store_float16(builder: Any, address: Any, index: Any, value: Any, count: Any) -> None:
    """Store lanes rounded to nearest, ties to even."""
    _write(builder, address, index, builder.fptrunc(value, _HALVES), count)


@intrinsic(long, long, long)
def _get_short(builder: Any, address: Any, index: Any) -> Any:
    return builder.zext(builder.load(_pointer(builder, address, index, _SHORT, 2)), LONG)


@intrinsic(nothing, long, long, long)
def _put_short(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(builder.trunc(value, _SHORT), _pointer(builder, address, index, _SHORT, 2))


@intrinsic(real, long, long)
def get_byte(builder: Any, address: Any, index: Any) -> Any:
    """Return an int8 as a float."""
    byte = builder.load(_pointer(builder, address, index, _BYTE, 1))
    return builder.sitofp(byte, ir.FloatType())


@intrinsic(real, long, long, long)
def get_half_byte(builder: Any, address: Any, index: Any, is_upper: Any) -> Any:
    """Return the lower or upper four bits of a byte, from 0 to 15, as a float."""
    byte = builder.load(_pointer(builder, address, index, _BYTE, 1))
    by = builder.trunc(builder.shl(is_upper, ir.Constant(LONG, 2)), _BYTE)
    return builder.uitofp(builder.and_(builder.lshr(byte, by), ir.Constant(_BYTE, 15)), FLOAT)


@intrinsic(real, long, long)
def get_half(builder: Any, address: Any, index: Any) -> Any:
    """Return a float16 as a float. Processors without HAS_FLOAT16 never call this function."""
    if not HAS_FLOAT16:
        return ir.Constant(FLOAT, 0.0)
    return builder.fpext(builder.load(_pointer(builder, address, index, ir.HalfType(), 2)), FLOAT)


if HAS_FLOAT16:
    _load_half, _store_half = _load_float16, _store_float16
else:  # never called with float16
    _load_half, _store_half = _load_bfloat16, _store_bfloat16


@loop
def load_as(dtype: int, address: int, index: int, count: int) -> Any:
    """Load the first `count` lanes as float32; the rest are zero and their memory is not read."""
    if dtype == FLOAT32:
        return load_part(address, index, count)
    if dtype == BFLOAT16:
        return _load_bfloat16(address, index, count)
    return _load_half(address, index, count)


@loop
def store_as(dtype: int, address: int, index: int, value: Any, count: int) -> None:
    """Store the first `count` lanes; the memory of the others is not touched."""
    if dtype == FLOAT32:
        store_part(address, index, value, count)
    elif dtype == BFLOAT16:
        _store_bfloat16(address, index, value, count)
    else:
        _store_half(address, index, value, count)


@loop
def move_item(dtype: int, target: int, to: int, source: int, index: int) -> None:
    """Copy one element without conversion."""
    if dtype == FLOAT32:
        put_int(target, to, get_int(source, index))
    else:
        _put_short(target, to, _get_short(source, index))
