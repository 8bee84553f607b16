"""Register tiles of int16 matmuls: a few rows times a packed int8 matrix.

The rows are int16, from `quantized_activations`. Sums over up to `MAX_POSITIONS` positions are
exact. An element of the result does not depend on the number of rows.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.gemm.matrix_tiles import AHEAD, PANELS, fetch_line
from gptmanager.kernels.gemm.quantized_activations import MAX_POSITIONS
from gptmanager.kernels.gemm.small_matmul import repeat
from gptmanager.kernels.simd.lanes import (
    FLOAT,
    INDICES,
    INT,
    LANES,
    LONG,
    VECTOR,
    at,
    call,
    intrinsic,
    long,
    multiply_add,
    nothing,
    spread,
)

FEW_ROWS = 4  # up to this number of rows, memory bandwidth limits an int8 matmul
INT16_DEPTH = 4  # positions in a step
_TWO_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


@functools.cache  # LLVM needs 0.1 ms to answer, and each plan of a matmul asks
def has_int16_dots() -> bool:
    """Return whether the processor has 512-bit dot products of int16 pairs."""
    return bool(cpu_features().get("avx512bw"))


def _rows(builder: Any, start: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(stride, ir.Constant(LONG, row))) for row in range(count)]


def _add_dots(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Return `total` plus, per lane, the dot product of the int16 pairs in `left` and `right`."""
    pairs = (builder.bitcast(it, _TWO_SHORTS) for it in (left, right))
    return builder.add(call(builder, "llvm.x86.avx512.pmaddw.d.512", INDICES, *pairs), total)


def int16_tile(rows: int) -> Any:
    """Return an intrinsic that computes `rows` x 64 elements of a matmul, or adds to them.

    Its arguments are `(c, a, a_stride, factors, factors_stride, b0, b1, b2, b3, steps, add)`. `c`
    is float32 with a stride of 64 elements; `a` is int16 and `factors` float32, both with strides
    in bytes; `b0` to `b3` are the addresses of four int8 panels. `steps` is the number of positions
    divided by 4.
    Sums are int32, exact for up to `MAX_POSITIONS` positions, and are multiplied by the row's
    factor. Of each four positions, the even ones are multiplied as a pair, then the odd ones.
    """

    @intrinsic(nothing, *[long] * 10, types.boolean)
    def matmul(
        builder: Any, c: Any, a: Any, a_stride: Any, factors: Any, factors_stride: Any,
        b0: Any, b1: Any, b2: Any, b3: Any, steps: Any, add: Any,
    ) -> None:  # fmt: skip
        def step(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            offset = builder.mul(index, ir.Constant(LONG, INT16_DEPTH * LANES))
            starts = [builder.add(panel, offset) for panel in (b0, b1, b2, b3)]
            for start in starts:
                fetch_line(builder, builder.add(start, ir.Constant(LONG, AHEAD)))
            pointers = [builder.inttoptr(start, _TWO_SHORTS.as_pointer()) for start in starts]
            values = [builder.load(it, align=1) for it in pointers]
            for pair in range(INT16_DEPTH // 2):
                place = builder.add(
                    builder.mul(index, ir.Constant(LONG, INT16_DEPTH // 2)),
                    ir.Constant(LONG, pair),
                )
                upper = values if pair else [builder.shl(it, eight) for it in values]
                read = [builder.ashr(it, eight) for it in upper]
                both = [spread(builder, builder.load(at(builder, it, place, INT))) for it in lefts]
                sums = [
                    _add_dots(builder, both[n // PANELS], read[n % PANELS], total)
                    for n, total in enumerate(sums)
                ]
            return sums

        lefts = _rows(builder, a, a_stride, rows)
        eight = ir.Constant(_TWO_SHORTS, [8] * 2 * LANES)
        zero, none = ir.Constant(INDICES, None), ir.Constant(VECTOR, None)
        places = _rows(builder, factors, factors_stride, rows)
        sums = repeat(builder, steps, [zero] * (rows * PANELS), step)
        for n, total in enumerate(sums):
            start = builder.inttoptr(places[n // PANELS], FLOAT.as_pointer())
            target = at(builder, c, ir.Constant(LONG, LANES * n), VECTOR)
            before = builder.select(add, builder.load(target, align=4), none)
            factor = spread(builder, builder.load(start))
            value = multiply_add(builder, factor, builder.sitofp(total, VECTOR), before)
            builder.store(value, target, align=4)

    return matmul


def int16_scratch_bytes(depth: int) -> int:
    """Return the size in bytes of FEW_ROWS int16 rows and their factors, in scratch."""
    return FEW_ROWS * (2 * depth + 4 * -(-depth // MAX_POSITIONS))
