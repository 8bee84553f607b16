"""Register tiles of matmuls of many rows with a packed int8 matrix, in int8 arithmetic.

The rows are int8, from `quantized_activations`, in stretches of `STRETCH` positions. Sums over a
stretch are exact. The dot product instruction needs unsigned bytes on one side. So 128 is added to
each element of the matrix, and each sum begins with a value that compensates for the 128. An
element of the result does not depend on the number of rows.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.gemm.matrix_tiles import PANELS, fetch_line
from gptmanager.kernels.gemm.quantized_activations import MARK_BYTES, STRETCH
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

SPAN = 256  # positions of four panels that stay in the L1 cache for all rows
SPAN_BYTES = PANELS * LANES * SPAN
FOUR = 4  # positions in a step: a lane has four int8


@functools.cache  # LLVM needs 0.1 ms to answer, and each plan of a matmul asks
def has_int8_dots() -> bool:
    """Return whether the processor has 512-bit dot products of four int8 (VNNI)."""
    return bool(cpu_features().get("avx512vnni"))


def add_dots(builder: Any, unsigned: Any, signed: Any, total: Any) -> Any:
    """Add the dot product of four uint8 and four int8 in each lane to the total of the lane."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", INDICES, total, unsigned, signed)


class _Stretch(NamedTuple):
    """A stretch of a tile's rows: `count` steps of four positions, from step `first` on."""

    marks: Sequence[Any]  # addresses of the rows' marks, see `MARK_BYTES`
    panels: Sequence[Any]  # addresses of the matrix's panels
    first: Any
    count: Any

    def mark(self, builder: Any, field: int, kind: Any) -> list[Any]:
        return [builder.load(at(builder, it, ir.Constant(LONG, field), kind)) for it in self.marks]

    def added(
        self, builder: Any, rows: Sequence[Any], field: int, totals: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the totals plus dot products with `rows`.

        In the marks of a row, the factor of the row is at index `field`, and the value with which
        the sums of the row begin is at the next index.
        """

        def step(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            place = builder.add(self.first, index)
            offset = builder.mul(place, ir.Constant(LONG, LANES))
            right = [builder.load(at(builder, it, offset, INDICES), align=4) for it in self.panels]
            four = [spread(builder, builder.load(at(builder, it, place, INT))) for it in rows]
            return [
                add_dots(builder, right[n % PANELS], four[n // PANELS], total)
                for n, total in enumerate(sums)
            ]

        begin = [spread(builder, it) for it in self.mark(builder, field + 1, INT)]
        sums = repeat(builder, self.count, [begin[n // PANELS] for n in range(len(totals))], step)
        factors = [spread(builder, it) for it in self.mark(builder, field, FLOAT)]
        return [
            multiply_add(builder, factors[n // PANELS], builder.sitofp(it, VECTOR), total)
            for n, (it, total) in enumerate(zip(sums, totals, strict=True))
        ]

    def with_left(self, builder: Any, left: Sequence[Any], totals: Sequence[Any]) -> Sequence[Any]:
        """Return the totals, plus dot products with the remainders if any row has remainders."""
        some = functools.reduce(builder.or_, self.mark(builder, 2, INT))
        before = builder.block
        with builder.if_then(builder.icmp_signed("!=", some, ir.Constant(INT, 0)), likely=False):
            more, inside = self.added(builder, left, 2, totals), builder.block
        results = [builder.phi(VECTOR) for _ in totals]
        for result, one, other in zip(results, totals, more, strict=True):
            result.add_incoming(one, before)
            result.add_incoming(other, inside)
        return results


def int8_tile(rows: int) -> Any:
    """Return an intrinsic that computes `rows` x 64 elements of a matmul.

    Its arguments are `(c, a, left, marks, a_stride, b, fours, add)`. `c` is the address of the
    result, float32 with stride 64. If `add`, the result is added to `c`. `a`, `left` and `marks`
    are the addresses of the values, remainders and marks of the first row, from the beginning of a
    stretch. The rows of each are `a_stride` bytes apart. `b` has four panels as `lay_out` writes
    them, `SPAN` positions apart. `fours` is the number of positions divided by 4.
    """
    per_stretch = ir.Constant(LONG, STRETCH // FOUR)

    @intrinsic(nothing, *[long] * 7, types.boolean)
    def matmul(
        builder: Any, c: Any, a: Any, left: Any, marks: Any, a_stride: Any, b: Any, fours: Any,
        add: Any,
    ) -> None:  # fmt: skip
        def of_rows(first: Any) -> list[Any]:
            strides = (builder.mul(a_stride, ir.Constant(LONG, row)) for row in range(rows))
            return [builder.add(first, stride) for stride in strides]

        whole, rest = of_rows(a), of_rows(left)
        panels = [builder.add(b, ir.Constant(LONG, LANES * SPAN * n)) for n in range(PANELS)]

        def stretch(number: Any, totals: Sequence[Any]) -> Sequence[Any]:
            first = builder.mul(number, per_stretch)
            behind = builder.sub(fours, first)
            is_whole = builder.icmp_signed(">=", behind, per_stretch)
            count = builder.select(is_whole, per_stretch, behind)
            marked = builder.add(marks, builder.mul(number, ir.Constant(LONG, MARK_BYTES)))
            own = _Stretch(of_rows(marked), panels, first, count)
            return own.with_left(builder, rest, own.added(builder, whole, 0, totals))

        places = [ir.Constant(LONG, LANES * n) for n in range(rows * PANELS)]
        targets, none = [at(builder, c, n, VECTOR) for n in places], ir.Constant(VECTOR, None)
        initial = [builder.select(add, builder.load(it, align=4), none) for it in targets]
        up = builder.add(fours, ir.Constant(LONG, STRETCH // FOUR - 1))
        totals = repeat(builder, builder.sdiv(up, per_stretch), initial, stretch)
        for target, total in zip(targets, totals, strict=True):
            builder.store(total, target, align=4)

    return matmul


@intrinsic(nothing, long, long, long)
def lay_out(builder: Any, target: Any, source: Any, fours: Any) -> None:
    """Write a panel's elements plus 128 as uint8, and prefetch elements `SPAN` positions ahead.

    `fours` is the number of positions divided by 4.
    """
    signs = ir.Constant(INDICES, [-0x7F7F7F80] * LANES)  # 0x80808080, as a signed number

    def step(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        offset = builder.mul(index, ir.Constant(LONG, FOUR * LANES))
        start = builder.add(source, offset)
        fetch_line(builder, builder.add(start, ir.Constant(LONG, LANES * SPAN)))
        read = builder.load(builder.inttoptr(start, INDICES.as_pointer()), align=1)
        to = builder.inttoptr(builder.add(target, offset), INDICES.as_pointer())
        builder.store(builder.xor(read, signs), to, align=1)
        return []

    repeat(builder, fours, [], step)
