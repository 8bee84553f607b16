"""`MatmulPlan`: everything in a matmul that depends only on its matrix, decided once.

It selects the instructions, and decides whether packing pays on this machine.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from llvmlite import binding  # type: ignore[import-untyped]

from gptmanager.kernels.gemm import int4_matmul
from gptmanager.kernels.gemm import matmul as bodies
from gptmanager.kernels.gemm.int4_activations import block_bytes, quantize_rows_in_groups
from gptmanager.kernels.gemm.int4_groups import GROUP
from gptmanager.kernels.gemm.int4_matrix import INT4, Int4Matrix
from gptmanager.kernels.gemm.int4_tiles import has_byte_dots
from gptmanager.kernels.gemm.int8_tiles import SPAN_BYTES, has_int8_dots
from gptmanager.kernels.gemm.int16_tiles import FEW_ROWS, has_int16_dots, int16_scratch_bytes
from gptmanager.kernels.gemm.matmul_task import SCRATCH_BYTES, MatmulTask
from gptmanager.kernels.gemm.matrix_tiles import PANELS, has_matrix_unit
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, PackedMatrix, Quantized
from gptmanager.kernels.gemm.quantized_activations import quantize_rows, row_bytes
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
_kept: list[Any] = []  # keeps memory alive to which addresses refer


class Instructions(NamedTuple):
    """Machine code that computes matmuls, and the rows that it reads."""

    body: int  # address of the machine code
    dtype: torch.dtype  # dtype of the rows, if `quantize` is None
    scratch_bytes: int  # per thread
    quantize: Callable[[int], None] | None = None  # quantizes the rows of a `ConversionTask`
    row_bytes: int = 0  # bytes of a quantized row


class MatmulPlan(NamedTuple):
    """A plan for matmuls with one matrix; with `silu`, see `Kernels.linear_silu_mul`."""

    task: MatmulTask  # without the fields that depend on a call
    columns: int  # columns of the result
    depth: int  # elements of a row, including padding
    num_groups: int
    work: int  # multiplications per row
    few_rows: int
    for_few: Instructions  # for up to `few_rows` rows
    for_many: Instructions


def plan_matmul(matrix: PackedMatrix, *, silu: bool, deterministic: bool) -> MatmulPlan:
    """Return the plan. `deterministic`: use the same instructions for any number of rows."""
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
    few, many = _instructions(matrix, deterministic)
    work = num_panels * PANEL_ROWS * matrix.depth
    few_rows = int4_matmul.FEW_ROWS if isinstance(matrix, Int4Matrix) else FEW_ROWS
    return MatmulPlan(task, columns, matrix.depth, num_groups, work, few_rows, few, many)


def _scale_fields(matrix: PackedMatrix) -> dict[str, int]:
    if matrix.scales is None:
        return {}
    scales = matrix.scales.data_ptr()
    if not isinstance(matrix, Int4Matrix):
        return {"scales": scales}
    minima = 0 if matrix.minima is None else matrix.minima.data_ptr() - scales
    return {"groups": scales, "minima": minima}


def _instructions(matrix: PackedMatrix, deterministic: bool) -> tuple[Instructions, Instructions]:
    """Return the instructions for few rows, and those for many rows."""
    stored, num_bytes = matrix.values.dtype, SCRATCH_BYTES
    if stored is torch.bfloat16 and (has_matrix_unit() or has_fast_pairs()):
        body = bodies.multiply_by_unit if has_matrix_unit() else bodies.multiply_pairs
        pairs = Instructions(compiled(body), torch.bfloat16, num_bytes)
        return pairs, pairs
    wide_bytes = num_bytes + PANELS * bodies.WIDE_BYTES
    lanes = Instructions(compiled(_BY_LANES[stored]), torch.float32, wide_bytes)
    if deterministic or stored not in (torch.int8, INT4):
        return lanes, lanes
    if stored is INT4:
        return _for_int4(matrix, lanes)
    few = many = lanes
    if has_int16_dots():
        few_bytes = num_bytes + int16_scratch_bytes(matrix.depth)
        few = Instructions(compiled(bodies.multiply_int8_by_int16), matrix.dtype, few_bytes)
    if has_matrix_unit():
        unit = compiled(bodies.multiply_int8_by_unit)
        many = Instructions(unit, torch.bfloat16, _unit_scratch_bytes(matrix))
    elif has_int8_dots():
        compiled(quantize_rows)  # now, not during the first request
        many = Instructions(
            *(compiled(bodies.multiply_int8_by_int8), torch.int8, num_bytes + SPAN_BYTES),
            *(quantize_rows, row_bytes(matrix.depth)),
        )
    return few, many


def _for_int4(matrix: PackedMatrix, lanes: Instructions) -> tuple[Instructions, Instructions]:
    few = many = lanes
    if has_byte_dots():
        few_bytes = SCRATCH_BYTES + int4_matmul.few_scratch_bytes(matrix.depth)
        few = Instructions(compiled(int4_matmul.multiply_int4_by_int16), matrix.dtype, few_bytes)
    if has_matrix_unit():
        body = compiled(int4_matmul.multiply_int4_by_unit)
        many = Instructions(body, torch.bfloat16, _unit_scratch_bytes(matrix))
    elif has_byte_dots():
        compiled(quantize_rows_in_groups)
        many = Instructions(
            *(compiled(int4_matmul.multiply_int4_by_int8), torch.int8, SCRATCH_BYTES),
            *(quantize_rows_in_groups, matrix.depth // GROUP * block_bytes(1)),
        )
    return few, many


def _unit_scratch_bytes(matrix: PackedMatrix) -> int:
    return SCRATCH_BYTES + PANELS * PANEL_ROWS * matrix.depth * torch.bfloat16.itemsize


def matmul_bodies(stored: torch.dtype, deterministic: bool) -> list[Callable[[int], None]]:
    """Return the functions that `_instructions` may select for matrices stored as `stored`."""
    if stored is torch.bfloat16 and (has_matrix_unit() or has_fast_pairs()):
        return [bodies.multiply_by_unit if has_matrix_unit() else bodies.multiply_pairs]
    found = [_BY_LANES[stored]]
    if stored is torch.int8 and not deterministic:
        found += [bodies.multiply_int8_by_int16] if has_int16_dots() else []
        if has_matrix_unit():
            found.append(bodies.multiply_int8_by_unit)
        elif has_int8_dots():
            found += [bodies.multiply_int8_by_int8, quantize_rows]
    if stored is INT4 and not deterministic:
        found += [int4_matmul.multiply_int4_by_int16] if has_byte_dots() else []
        if has_matrix_unit():
            found.append(int4_matmul.multiply_int4_by_unit)
        elif has_byte_dots():
            found += [int4_matmul.multiply_int4_by_int8, quantize_rows_in_groups]
    return found


def can_be_packed(dtype: torch.dtype, quantized: Quantized | None = None) -> bool:
    """Return whether matrices of `dtype` are packed.

    int8 matrices always are. int4 matrices are if the processor can convert float16.
    """
    if quantized == "int4":
        return dtype in DTYPES and HAS_FLOAT16
    return dtype in DTYPES and (quantized is not None or packing_pays())


@functools.cache
def registers(rows: int) -> int:
    """Return the address of the matrix unit's configuration for `rows` rows of x."""
    palette, line, lines = b"\1", (64).to_bytes(2, "little"), bytes([rows] * 5 + [16] * 3)
    table = palette.ljust(16, b"\0") + (8 * line).ljust(32, b"\0") + lines.ljust(16, b"\0")
    _kept.append(ctypes.create_string_buffer(table, 64))
    return ctypes.addressof(_kept[-1])


@functools.cache
def packing_pays() -> bool:
    """Return whether packed matmuls are faster than torch's, as they are with 8-lane FMA.

    This is not measured, because a measurement on a busy machine is sometimes wrong. Results would
    then differ in bits from run to run on the same machine.
    """
    features = binding.get_host_cpu_features()
    pays = bool(features.get("avx2") and features.get("fma"))
    widest = "AVX-512" if features.get("avx512f") else "AVX2"
    unit = "a matrix unit for bfloat16" if has_matrix_unit() else "no matrix unit"
    logger.info(
        "weights on the CPU are %s: the processor has %s, and %s",
        "packed" if pays else "not packed",
        widest if pays else "no AVX2",
        "fast dot products of bfloat16 pairs" if has_fast_pairs() else unit,
    )
    return pays
