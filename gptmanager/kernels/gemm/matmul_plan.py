"""`MatmulPlan`: the part of a matmul that depends on its matrix alone, decided once.

It selects the instructions, and decides whether packing pays on this machine.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from llvmlite import binding  # type: ignore[import-untyped]

from gptmanager.kernels.gemm import matmul as bodies
from gptmanager.kernels.gemm.int8_tiles import SPAN_BYTES, has_int8_dots
from gptmanager.kernels.gemm.int16_tiles import has_int16_dots, int16_scratch_bytes
from gptmanager.kernels.gemm.matmul import MatmulTask
from gptmanager.kernels.gemm.matrix_tiles import PANELS, has_matrix_unit
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, PackedMatrix
from gptmanager.kernels.gemm.quantized_activations import quantize_rows
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.pairs import has_fast_pairs
from gptmanager.lifecycle.log import logger

_BY_LANES: dict[torch.dtype, Callable[[int], None]] = {
    torch.float32: bodies.multiply_float32,
    torch.bfloat16: bodies.multiply_bfloat16,
    torch.float16: bodies.multiply_float16,
    torch.int8: bodies.multiply_int8,
}
_kept: list[Any] = []  # memory behind addresses


class Instructions(NamedTuple):
    body: int  # address of the machine code
    dtype: torch.dtype  # of the rows it reads; int8: see `quantize_rows`
    scratch_bytes: int  # per thread


class MatmulPlan(NamedTuple):
    """A plan for matmuls with one matrix; with `silu`, see `Kernels.linear_silu_mul`."""

    task: MatmulTask  # without the fields of rows
    columns: int  # of the result
    depth: int  # of the rows, with padding
    num_groups: int
    work: int  # multiplications per row
    for_few: Instructions  # up to `FEW_ROWS` rows
    for_many: Instructions


def plan_matmul(matrix: PackedMatrix, *, silu: bool, deterministic: bool) -> MatmulPlan:
    """Return the plan; `deterministic`: the same instructions for any number of rows."""
    num_rows, num_panels = len(matrix), len(matrix.values)
    columns = num_rows // 2 if silu else num_rows
    num_groups = -(-columns // (PANEL_ROWS * (PANELS // 2 if silu else PANELS)))
    task = MatmulTask(
        matrix=matrix.values.data_ptr(),
        scales=0 if matrix.scales is None else matrix.scales.data_ptr(),
        columns=columns,
        depth=matrix.depth,
        num_panels=num_panels,
        num_groups=num_groups,
        second=num_panels // 2 if silu else 2 * num_groups,
        silu=silu,
        position_bytes=matrix.values.itemsize * PANEL_ROWS,
        positions=matrix.values.shape[3],
        dtype=DTYPES[matrix.dtype],
    )
    few, many = _instructions(matrix, deterministic)
    work = num_panels * PANEL_ROWS * matrix.depth
    return MatmulPlan(task, columns, matrix.depth, num_groups, work, few, many)


def _instructions(matrix: PackedMatrix, deterministic: bool) -> tuple[Instructions, Instructions]:
    """Return the instructions for few rows and for many."""
    stored, num_bytes = matrix.values.dtype, bodies.SCRATCH_BYTES
    if stored is torch.bfloat16 and (has_matrix_unit() or has_fast_pairs()):
        body = bodies.multiply_by_unit if has_matrix_unit() else bodies.multiply_pairs
        pairs = Instructions(compiled(body), torch.bfloat16, num_bytes)
        return pairs, pairs
    wide_bytes = num_bytes + PANELS * bodies.WIDE_BYTES
    lanes = Instructions(compiled(_BY_LANES[stored]), torch.float32, wide_bytes)
    few = many = lanes
    if stored is torch.int8 and not deterministic:
        if has_int16_dots():
            few_bytes = num_bytes + int16_scratch_bytes(matrix.depth)
            few = Instructions(compiled(bodies.multiply_int8_by_int16), matrix.dtype, few_bytes)
        if has_matrix_unit():
            num_bytes += PANELS * PANEL_ROWS * matrix.depth * torch.bfloat16.itemsize
            many = Instructions(compiled(bodies.multiply_int8_by_unit), torch.bfloat16, num_bytes)
        elif has_int8_dots():
            compiled(quantize_rows)  # now, not during the first request
            num_bytes += SPAN_BYTES
            many = Instructions(compiled(bodies.multiply_int8_by_int8), torch.int8, num_bytes)
    return few, many


def matmul_bodies(stored: torch.dtype, deterministic: bool) -> list[Callable[[int], None]]:
    """Return the bodies that multiply with matrices of that dtype, as `_instructions` selects."""
    if stored is torch.bfloat16 and (has_matrix_unit() or has_fast_pairs()):
        return [bodies.multiply_by_unit if has_matrix_unit() else bodies.multiply_pairs]
    found = [_BY_LANES[stored]]
    if stored is torch.int8 and not deterministic:
        found += [bodies.multiply_int8_by_int16] if has_int16_dots() else []
        if has_matrix_unit():
            found.append(bodies.multiply_int8_by_unit)
        elif has_int8_dots():
            found += [bodies.multiply_int8_by_int8, quantize_rows]
    return found


def can_be_packed(dtype: torch.dtype, quantized: bool) -> bool:
    """Whether matrices of that dtype are packed. Those in 8 bits always are."""
    return dtype in DTYPES and (quantized or packing_pays())


@functools.cache
def registers(rows: int) -> int:
    """Return the address of a tile configuration: `rows` rows for sums and x, 16 for a matrix."""
    palette, line, lines = b"\1", (64).to_bytes(2, "little"), bytes([rows] * 5 + [16] * 3)
    table = palette.ljust(16, b"\0") + (8 * line).ljust(32, b"\0") + lines.ljust(16, b"\0")
    _kept.append(ctypes.create_string_buffer(table, 64))
    return ctypes.addressof(_kept[-1])


@functools.cache
def packing_pays() -> bool:
    """Whether packed matmuls beat torch's: where there are fused multiply-adds of eight lanes.

    This is not measured: a measurement on a busy machine is sometimes wrong, and results would
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
