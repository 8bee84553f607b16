"""Matmuls of tokens with a 4-bit matrix, one function for each kind of instruction."""

from __future__ import annotations

from typing import Any

from gptmanager.kernels.gemm.int4_activations import block_bytes, quantize_groups
from gptmanager.kernels.gemm.int4_groups import GROUP
from gptmanager.kernels.gemm.int4_tiles import (
    GROUP_BYTES,
    SCALE_BYTES,
    has_byte_dots,
    int4_tile,
    widen_group,
    widen_group_to_pairs,
    widen_numbers,
    widen_numbers_to_pairs,
)
from gptmanager.kernels.gemm.int8_tiles import has_int8_dots
from gptmanager.kernels.gemm.matmul import BLOCK, WIDE_BYTES, multiply_by_tiles
from gptmanager.kernels.gemm.matmul_task import (
    MATMUL_TASK,
    SCRATCH_BYTES,
    begin,
    finish,
    panels,
    part_of,
)
from gptmanager.kernels.gemm.matrix_tiles import over_rows, release
from gptmanager.kernels.simd.lanes import LANES, claim, loop, loop_named, task_at
from gptmanager.kernels.simd.threads import NEXT_PART

FEW_ROWS = 8  # up to this number of rows, each thread quantizes all rows itself, to int16
_multiply_lanes = over_rows("float32")


def few_scratch_bytes(depth: int) -> int:
    """Return the bytes of scratch that FEW_ROWS rows take, quantized to int16 blocks."""
    return FEW_ROWS * depth // GROUP * block_bytes(2)


@loop
def scales_of(t: Any, panel: int) -> int:
    """Return the address of a panel's scales; `panel` is the address of its values."""
    return int(t.groups + (panel - t.matrix) // GROUP_BYTES * SCALE_BYTES)


@loop
def _widen(t: Any, target: int, panel: int, first: int, count: int) -> None:
    """Widen the columns `first` to `first + count` of a panel to float32 at `target`."""
    values, scales = panel + first // GROUP * GROUP_BYTES, scales_of(t, panel)
    scales += first // GROUP * SCALE_BYTES
    for n in range(count // GROUP):
        at, own = target + 4 * GROUP * LANES * n, scales + SCALE_BYTES * n
        if t.codebook:
            widen_numbers(at, values + GROUP_BYTES * n, own, t.codebook)
        else:
            widen_group(at, values + GROUP_BYTES * n, own, t.minima)


@loop
def _widen_to_pairs(t: Any, target: int, panel: int) -> None:
    """Widen a panel to bfloat16 at `target`."""
    scales, minima, codebook = scales_of(t, panel), t.minima, t.codebook
    for n in range(t.depth // GROUP):
        at, own = target + 2 * GROUP * LANES * n, scales + SCALE_BYTES * n
        if codebook:
            widen_numbers_to_pairs(at, panel + GROUP_BYTES * n, own, codebook)
        else:
            widen_group_to_pairs(at, panel + GROUP_BYTES * n, own, minima)


@loop
def _share_by_lanes(t: Any, address: int) -> None:
    """Compute the parts that a thread claims, in SIMD lanes, from panels widened to float32."""
    scratch, counter = begin(t, address)
    w0 = scratch + SCRATCH_BYTES
    w1, w2, w3 = w0 + WIDE_BYTES, w0 + 2 * WIDE_BYTES, w0 + 3 * WIDE_BYTES
    part = claim(counter, NEXT_PART)
    while part < t.num_parts:
        groups, first, rows = part_of(t, part)
        x, stride = t.x + 4 * first * t.depth, 4 * t.depth
        for group in groups:
            b0, b1, b2, b3 = panels(t, group)
            for k in range(0, t.depth, BLOCK):
                count = min(BLOCK, t.depth - k)
                _widen(t, w0, b0, k, count)
                _widen(t, w1, b1, k, count)
                _widen(t, w2, b2, k, count)
                _widen(t, w3, b3, k, count)
                more = k > 0
                _multiply_lanes(scratch, x + 4 * k, stride, w0, w1, w2, w3, count, more, rows)
            finish(t, scratch, group, first, rows)
        part = claim(counter, NEXT_PART)


def _share_by_dots(levels: int, is_wide: bool, has_codebook: bool) -> Any:
    """Return a function that computes the parts that a thread claims, by dot products of bytes.

    `levels` is the number of bytes of a quantized element of `x`. With one level, `x` is already
    quantized to int8. With two levels, there are at most FEW_ROWS rows, and each thread quantizes
    all rows to int16 itself, which is faster than waiting for one thread to do so.
    """
    many = (4 if is_wide else 2) if levels == 2 else (6 if is_wide else 4)
    across = 2 if is_wide else 1
    most = int4_tile(many, across, levels, is_wide, has_codebook)
    two = int4_tile(2, across, levels, is_wide, has_codebook)
    one = int4_tile(1, 2 * across, levels, is_wide, has_codebook)
    size, kind = block_bytes(levels), "codebook" if has_codebook else "int4"

    @loop_named(f"share_{kind}_by_dots_{levels}_{512 if is_wide else 256}")
    def share(t: Any, address: int) -> None:
        scratch, counter = begin(t, address)
        depth, minima, codebook = t.depth, t.minima, t.codebook
        steps = depth // GROUP
        x, stride = t.x, steps * size
        if levels == 2:
            x = scratch + SCRATCH_BYTES
            for row in range(t.rows):
                quantize_groups(t.dtype, t.x, row, depth, depth, x + row * stride, 2)
        part = claim(counter, NEXT_PART)
        while part < t.num_parts:
            groups, first, rows = part_of(t, part)
            for group in groups:
                b0, b1, b2, b3 = panels(t, group)
                s0, s1, s2, s3 = (
                    scales_of(t, b0),
                    scales_of(t, b1),
                    scales_of(t, b2),
                    scales_of(t, b3),
                )
                row = 0
                while row < rows:
                    c, a, rest = scratch + 256 * row, x + (first + row) * stride, rows - row
                    given = a, stride, b0, b1, b2, b3, s0, s1, s2, s3, minima, codebook, steps
                    if rest >= many:
                        most(c, *given)
                        row += many
                    elif rest >= 2:
                        two(c, *given)
                        row += 2
                    else:
                        one(c, *given)
                        row += 1
                finish(t, scratch, group, first, rows)
            part = claim(counter, NEXT_PART)

    return share


@loop
def _share_by_unit(t: Any, address: int) -> None:
    """Compute the parts that a thread claims, with the matrix unit (Intel AMX).

    The panels are first widened to bfloat16.
    """
    scratch, counter = begin(t, address)
    w0, size, held = scratch + SCRATCH_BYTES, 2 * LANES * t.depth, -1
    w1, w2, w3 = w0 + size, w0 + 2 * size, w0 + 3 * size
    part = claim(counter, NEXT_PART)
    while part < t.num_parts:
        groups, first, rows = part_of(t, part)
        for group in groups:
            if held != group:
                b0, b1, b2, b3 = panels(t, group)
                _widen_to_pairs(t, w0, b0)
                _widen_to_pairs(t, w1, b1)
                _widen_to_pairs(t, w2, b2)
                _widen_to_pairs(t, w3, b3)
                held = group
            multiply_by_tiles(t, scratch, w0, w1, w2, w3, first, rows)
            finish(t, scratch, group, first, rows)
        part = claim(counter, NEXT_PART)
    release()


_wide = has_int8_dots()
_by_int16, _by_int8, _numbers_by_int16, _numbers_by_int8 = (
    _share_by_dots(levels, _wide, has_codebook) if has_byte_dots() else _share_by_lanes
    for has_codebook in (False, True)
    for levels in (2, 1)
)


def multiply_int4(address: int) -> None:
    """Compute `result = x @ matrix.T` for a 4-bit matrix, in float32."""
    _share_by_lanes(task_at(address, MATMUL_TASK), address)


def multiply_int4_by_int16(address: int) -> None:
    """Multiply at most FEW_ROWS rows, quantized to int16 here, with a 4-bit matrix."""
    _by_int16(task_at(address, MATMUL_TASK), address)


def multiply_int4_by_int8(address: int) -> None:
    """Multiply rows quantized to int8 with a 4-bit matrix."""
    _by_int8(task_at(address, MATMUL_TASK), address)


def multiply_codebook_by_int16(address: int) -> None:
    """Do as `multiply_int4_by_int16` for a matrix with a codebook."""
    _numbers_by_int16(task_at(address, MATMUL_TASK), address)


def multiply_codebook_by_int8(address: int) -> None:
    """Do as `multiply_int4_by_int8` for a matrix with a codebook."""
    _numbers_by_int8(task_at(address, MATMUL_TASK), address)


def multiply_int4_by_unit(address: int) -> None:
    """Multiply bfloat16 rows with a 4-bit matrix, with the matrix unit."""
    _share_by_unit(task_at(address, MATMUL_TASK), address)
