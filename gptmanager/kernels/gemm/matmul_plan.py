"""`MatmulPlan`: everything in a matmul that depends only on its matrix, decided once.

The functions select the machine code for this processor, and decide whether packing pays on it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.gemm import int4_matmul
from gptmanager.kernels.gemm import matmul as bodies
from gptmanager.kernels.gemm.int4_activations import (
    block_bytes,
    planes_bytes,
    quantize_rows_in_groups,
    quantize_rows_in_planes,
)
from gptmanager.kernels.gemm.int4_groups import CODEBOOKS, GROUP
from gptmanager.kernels.gemm.int4_matrix import INT4, Int4Matrix
from gptmanager.kernels.gemm.int4_tiles import has_byte_dots
from gptmanager.kernels.gemm.int8_tiles import SPAN_BYTES, has_int8_dots
from gptmanager.kernels.gemm.int16_tiles import FEW_ROWS, has_int16_dots, int16_scratch_bytes
from gptmanager.kernels.gemm.matmul_task import SCRATCH_BYTES, MatmulTask
from gptmanager.kernels.gemm.matrix_tiles import PANELS, has_matrix_unit
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, PackedMatrix, Quantized
from gptmanager.kernels.gemm.quantized_activations import (
    quantize_rows,
    quantize_rows_to_bytes,
    row_bytes,
    split_row_bytes,
)
from gptmanager.kernels.gemm.unit import unit_matmul
from gptmanager.kernels.gemm.unit.int8_unit_tiles import SPAN_BYTES as UNPACKED_SPAN_BYTES
from gptmanager.kernels.gemm.unit.int8_unit_tiles import STRETCH_BYTES, has_int8_unit
from gptmanager.kernels.simd.dtypes import DTYPES, HAS_FLOAT16
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.pairs import has_fast_pairs
from gptmanager.lifecycle.log import logger

_BY_LANES: dict[torch.dtype, Callable[[int], None]] = {
    torch.float32: bodies.multiply_float32,
    torch.bfloat16: bodies.multiply_bfloat16,
    torch.float16: bodies.multiply_float16,
    torch.int8: bodies.multiply_int8,
    INT4: int4_matmul.multiply_int4,
}
ANY_ROWS = 1 << 62
_kept: list[Any] = []  # owns memory that tasks refer to by address


class _Rows(NamedTuple):
    """The format of the activation rows that a variant reads, and the scratch memory it needs."""

    dtype: torch.dtype  # before the rows are quantized
    scratch_bytes: int  # per thread
    row_bytes: int = 0  # bytes of a quantized row, or 0 if rows are not quantized


class _Variant(NamedTuple):
    """Machine code for matmuls of up to `most_rows` rows."""

    most_rows: int
    body: Callable[[int], None]
    read: Callable[[PackedMatrix], _Rows]
    quantize: Callable[[int], None] | None = None


class Instructions(NamedTuple):
    """Machine code that computes matmuls, and the format of the rows that it reads."""

    most_rows: int
    body: int  # address of the machine code
    dtype: torch.dtype  # dtype of the rows, before they are quantized
    scratch_bytes: int  # per thread
    row_bytes: int  # bytes of a quantized row
    quantize: Callable[[int], None] | None  # quantizes the rows of a `ConversionTask`


class MatmulPlan(NamedTuple):
    """A plan for `Kernels.linear` or `Kernels.linear_silu_mul` with one matrix."""

    task: MatmulTask  # without the fields that depend on a call
    columns: int  # columns of the result
    depth: int  # elements of a row of the matrix, including padding
    num_groups: int
    work: int  # multiplications per row of activations
    instructions: tuple[Instructions, ...]  # in ascending order of `most_rows`

    def for_rows(self, num_rows: int) -> Instructions:
        return next(it for it in self.instructions if num_rows <= it.most_rows)


def plan_matmul(matrix: PackedMatrix, *, silu: bool, deterministic: bool) -> MatmulPlan:
    """Return the plan for `matrix`, and compile the machine code that it needs.

    If `deterministic`, the bits of a row of the result do not depend on the number of rows.
    """
    num_rows, num_panels = len(matrix), len(matrix.values)
    columns = num_rows // 2 if silu else num_rows
    num_groups = -(-columns // (PANEL_ROWS * (PANELS // 2 if silu else PANELS)))
    task = MatmulTask(
        matrix=matrix.values.data_ptr(),
        **_scale_fields(matrix),
        columns=columns,
        depth=matrix.depth,
        num_panels=num_panels,
        num_groups=num_groups,
        second=num_panels // 2 if silu else 2 * num_groups,
        silu=silu,
        position_bytes=matrix.position_bytes,
        positions=matrix.values.shape[3],
        dtype=DTYPES[matrix.dtype],
    )
    work = num_panels * PANEL_ROWS * matrix.depth
    instructions = tuple(
        Instructions(it.most_rows, compiled(it.body), *it.read(matrix), it.quantize)
        for it in _variants(matrix.values.dtype, deterministic, _has_codebook(matrix))
    )
    for it in instructions:
        if it.quantize is not None:
            compiled(it.quantize)  # now, not during the first request
    return MatmulPlan(task, columns, matrix.depth, num_groups, work, instructions)


def _has_codebook(matrix: PackedMatrix) -> bool:
    return isinstance(matrix, Int4Matrix) and matrix.codebook is not None


def _scale_fields(matrix: PackedMatrix) -> dict[str, int]:
    if matrix.scales is None:
        return {}
    scales = matrix.scales.data_ptr()
    if not isinstance(matrix, Int4Matrix):
        return {"scales": scales}
    minima = 0 if matrix.minima is None else matrix.minima.data_ptr() - scales
    codebook = CODEBOOKS[matrix.codebook].data_ptr() if matrix.codebook else 0
    return {"groups": scales, "minima": minima, "codebook": codebook}


def _variants(
    stored: torch.dtype, deterministic: bool, has_codebook: bool = False
) -> list[_Variant]:
    """Return the variants for matrices stored as `stored`, in ascending order of `most_rows`."""
    if stored is torch.bfloat16 and (has_matrix_unit() or has_fast_pairs()):
        body = bodies.multiply_by_unit if has_matrix_unit() else bodies.multiply_pairs
        return [_Variant(ANY_ROWS, body, _read_pairs)]
    found = []
    if stored is torch.int8 and (has_int8_unit() or not deterministic):
        found = _for_int8()  # with an int8 unit, bits do not depend on the number of rows
    if stored is INT4 and not deterministic:
        found = _for_int4(has_codebook)
    if not found or found[-1].most_rows < ANY_ROWS:
        found.append(_Variant(ANY_ROWS, _BY_LANES[stored], _read_floats))
    return found


def _for_int8() -> list[_Variant]:
    found = []
    if has_int16_dots():
        found.append(_Variant(FEW_ROWS, bodies.multiply_int8_by_int16, _read_few))
    if has_int8_unit():
        body = unit_matmul.multiply_int8_in_unit
        found.append(_Variant(ANY_ROWS, body, _read_split, quantize_rows_to_bytes))
    elif has_int8_dots():
        body = bodies.multiply_int8_by_int8
        found.append(_Variant(ANY_ROWS, body, _read_bytes, quantize_rows))
    return found


def _for_int4(has_codebook: bool) -> list[_Variant]:
    by_int16, by_int8 = int4_matmul.multiply_int4_by_int16, int4_matmul.multiply_int4_by_int8
    if has_codebook:
        by_int16 = int4_matmul.multiply_codebook_by_int16
        by_int8 = int4_matmul.multiply_codebook_by_int8
    found = []
    if has_byte_dots():
        found.append(_Variant(int4_matmul.FEW_ROWS, by_int16, _read_few_in_groups))
        if not has_int8_unit():
            body = by_int8
            found.append(_Variant(ANY_ROWS, body, _read_bytes_in_groups, quantize_rows_in_groups))
    if has_int8_unit():
        several, body = unit_matmul.SEVERAL_ROWS, unit_matmul.multiply_int4_in_unit
        found.append(_Variant(several, body, _read_planes, quantize_rows_in_planes))
        found.append(_Variant(ANY_ROWS, int4_matmul.multiply_int4_by_unit, _read_for_unit))
    return found


def _read_floats(matrix: PackedMatrix) -> _Rows:
    return _Rows(torch.float32, SCRATCH_BYTES + PANELS * bodies.WIDE_BYTES)


def _read_pairs(matrix: PackedMatrix) -> _Rows:
    return _Rows(torch.bfloat16, SCRATCH_BYTES)


def _read_for_unit(matrix: PackedMatrix) -> _Rows:
    widened_bytes = PANELS * PANEL_ROWS * matrix.depth * torch.bfloat16.itemsize
    return _Rows(torch.bfloat16, SCRATCH_BYTES + widened_bytes)


def _read_few(matrix: PackedMatrix) -> _Rows:
    return _Rows(matrix.dtype, SCRATCH_BYTES + int16_scratch_bytes(matrix.depth))


def _read_few_in_groups(matrix: PackedMatrix) -> _Rows:
    return _Rows(matrix.dtype, SCRATCH_BYTES + int4_matmul.few_scratch_bytes(matrix.depth))


def _read_bytes(matrix: PackedMatrix) -> _Rows:
    return _Rows(matrix.dtype, SCRATCH_BYTES + SPAN_BYTES, row_bytes(matrix.depth))


def _read_split(matrix: PackedMatrix) -> _Rows:
    return _Rows(matrix.dtype, SCRATCH_BYTES + STRETCH_BYTES, split_row_bytes(matrix.depth))


def _read_planes(matrix: PackedMatrix) -> _Rows:
    return _Rows(matrix.dtype, SCRATCH_BYTES + UNPACKED_SPAN_BYTES, planes_bytes(matrix.depth))


def _read_bytes_in_groups(matrix: PackedMatrix) -> _Rows:
    return _Rows(matrix.dtype, SCRATCH_BYTES, matrix.depth // GROUP * block_bytes(1))


def matmul_bodies(
    stored: torch.dtype, deterministic: bool, has_codebook: bool = False
) -> list[Callable[[int], None]]:
    """Return the functions that matmuls with matrices stored as `stored` may call."""
    variants = _variants(stored, deterministic, has_codebook)
    return [body for it in variants for body in (it.body, it.quantize) if body is not None]


def can_be_packed(dtype: torch.dtype, quantized: Quantized | None = None) -> bool:
    """Return whether matrices of `dtype` are packed.

    If `dtype` is not in `DTYPES`, they are not. Otherwise int8 matrices are packed, 4-bit matrices
    if the processor can convert float16, and matrices that are not quantized if packing pays.
    """
    if quantized == "int4" or quantized in CODEBOOKS:
        return dtype in DTYPES and HAS_FLOAT16
    return dtype in DTYPES and (quantized is not None or packing_pays())


@functools.cache
def registers(rows: int) -> int:
    """Return the address of three configurations of the matrix unit (Intel AMX).

    All three are for `rows` rows of x. The first is for `unit_tile`, the second for
    `stretch_tile`, and the third for `groups_tile`.
    """
    tables = b""
    for num_rows, x_bytes, matrix_rows in ((5, 64, 16), (6, 64, 16), (5, 32, 8)):
        sizes = [64] * 4 + [x_bytes] * (num_rows - 4) + [64] * (8 - num_rows)
        lines = bytes([rows] * num_rows + [matrix_rows] * (8 - num_rows))
        widths = b"".join(size.to_bytes(2, "little") for size in sizes)
        tables += b"\1".ljust(16, b"\0") + widths.ljust(32, b"\0") + lines.ljust(16, b"\0")
    _kept.append(ctypes.create_string_buffer(tables, len(tables)))
    return ctypes.addressof(_kept[-1])


@functools.cache
def all_registers() -> int:
    """Return the address of an int64 array of `registers(0)` to `registers(15)`."""
    addresses = (ctypes.c_int64 * 16)(*map(registers, range(16)))
    _kept.append(addresses)
    return ctypes.addressof(addresses)


@functools.cache
def packing_pays() -> bool:
    """Return whether packed matmuls are faster than torch's: true with AVX2 and FMA.

    The speed is not measured, because a measurement on a busy machine is sometimes wrong. A wrong
    choice would change the bits of results from run to run on the same machine.
    """
    features = cpu_features()
    pays = bool(features.get("avx2") and features.get("fma"))
    widest = "AVX-512" if features.get("avx512f") else "AVX2"
    unit = "a matrix unit for bfloat16" if has_matrix_unit() else "no matrix unit"
    logger.info(
        "weights on the CPU are %s: the processor has %s, and %s",
        "packed" if pays else "not packed",
        widest if pays else "no AVX2 with FMA",
        "fast dot products of bfloat16 pairs" if has_fast_pairs() else unit,
    )
    return pays
