"""Small matmuls for compiled code: register tiles, and a loop over them.

The bits of a result's element do not depend on how the result is divided into tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.simd.dtypes import (
    BFLOAT16,
    FLOAT32,
    HAS_FLOAT16,
    itemsize,
    load_at,
    load_pairs,
)
from gptmanager.kernels.simd.lanes import (
    FLOAT,
    INDICES,
    LANES,
    LONG,
    VECTOR,
    at,
    compact,
    intrinsic,
    long,
    loop,
    loop_named,
    multiply_add,
    nothing,
    spread,
)

Step = Callable[[Any, Sequence[Any]], Sequence[Any]]


def repeat(builder: Any, count: Any, initial: Sequence[Any], step: Step) -> Sequence[Any]:
    """Emit a loop of `count` >= 1 steps `values = step(index, values)`. Return the last values.

    The values start as `initial`, and stay in registers.
    """
    before, body = builder.block, builder.append_basic_block("step")
    builder.branch(body)
    builder.position_at_end(body)
    index, values = builder.phi(LONG), [builder.phi(value.type) for value in initial]
    results = step(index, values)
    following, last = builder.add(index, ir.Constant(LONG, 1)), builder.block
    after = builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    starts, ends = [ir.Constant(LONG, 0), *initial], [following, *results]
    for phi, start, end in zip([index, *values], starts, ends, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(end, last)
    builder.position_at_end(after)
    return results


_ALL = range(2 * LANES)
_EVEN_AND_ODD = [*_ALL[::2]], [*_ALL[1::2]]
_LOW_AND_HIGH = [n // 2 + n % 2 * LANES for n in _ALL]
_INTERLEAVED = _LOW_AND_HIGH[:LANES], _LOW_AND_HIGH[LANES:]


def _shuffled(
    builder: Any, vectors: Sequence[Any], orders: tuple[list[int], list[int]]
) -> list[Any]:
    """Shuffle each pair of vectors into two. `orders` has the source lanes of each new vector."""
    masks = [ir.Constant(INDICES, order) for order in orders]
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [builder.shuffle_vector(*pair, mask) for pair in pairs for mask in masks]


def tile(rows: int, vectors: int, dtype: str, *, partial: bool = False) -> Any:
    """Return an intrinsic that computes `rows` x (16 * `vectors`) elements of a matmul.

    The arguments of the intrinsic are `(c, c_stride, a, a_stride, b, b_stride, depth, add,
    columns)`, as in `multiply`. For any shape of tile, each element is one chain of fused
    multiply-adds along `depth`. `dtype` is the dtype of b. With `partial`, only the first
    `columns` columns of b are read; otherwise `columns` is not used.
    """
    # Widening 32 elements of bfloat16 to two vectors of 16 in order takes four instructions.
    # Widening them to a vector of the even elements and a vector of the odd elements takes two.
    # The sums are put in order once, at the end.
    paired = dtype == "bfloat16" and vectors % 2 == 0 and not partial

    @intrinsic(nothing, long, long, long, long, long, long, long, types.boolean, long)
    def matmul(
        builder: Any, c: Any, c_stride: Any, a: Any, a_stride: Any, b: Any, b_stride: Any,
        depth: Any, add: Any, columns: Any,
    ) -> None:  # fmt: skip
        def element(start: Any, row: Any, stride: Any, column: Any, kind: Any) -> Any:
            return at(builder, start, builder.add(builder.mul(row, stride), column), kind)

        def right(index: Any) -> list[Any]:
            starts = [builder.add(builder.mul(index, b_stride), n) for n in across]
            if paired:
                pairs = [load_pairs(builder, b, start) for start in starts[::2]]
                return [vector for pair in pairs for vector in pair]
            count = columns if partial else None
            return [load_at(builder, dtype, b, start, count) for start in starts]

        def left(row: Any, index: Any) -> Any:
            return spread(builder, builder.load(element(a, row, a_stride, index, FLOAT)))

        def step(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            on_top, at_left = right(index), [left(n, index) for n in down]
            factors = [(x, y) for x in at_left for y in on_top]
            return [
                multiply_add(builder, x, y, total)
                for (x, y), total in zip(factors, sums, strict=True)
            ]

        down = [ir.Constant(LONG, row) for row in range(rows)]
        across = [ir.Constant(LONG, v * LANES) for v in range(vectors)]
        targets = [element(c, row, c_stride, n, VECTOR) for row in down for n in across]
        zero = ir.Constant(VECTOR, None)
        initial = [builder.select(add, builder.load(t, align=4), zero) for t in targets]
        if paired:
            initial = _shuffled(builder, initial, _EVEN_AND_ODD)
        sums = repeat(builder, depth, initial, step)
        if paired:
            sums = _shuffled(builder, sums, _INTERLEAVED)
        for target, value in zip(targets, sums, strict=True):
            builder.store(value, target, align=4)

    return matmul


# The sums of a tile fill eight registers: enough to hide the latency of an addition, and few enough
# for a CPU that has only sixteen. A vector takes one register of 512 bits, or two of 256.
WIDE = 2 if cpu_features().get("avx512f") else 1


def _multiply_by(dtype: str) -> Any:
    four_by_wide, four_by_one = tile(4, WIDE, dtype), tile(4, 1, dtype)
    two_by_wide, two_by_one = tile(2, 2 * WIDE, dtype), tile(2, 1, dtype)
    four_by_part, two_by_part = tile(4, 1, dtype, partial=True), tile(2, 1, dtype, partial=True)
    size = itemsize(dtype)

    @loop_named(f"multiply_by_{dtype}")
    def multiply(
        c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int,
        rows: int, columns: int, depth: int, add: bool,
    ) -> None:  # fmt: skip
        compact()
        row = 0
        while row < rows:
            four = rows - row > 2
            column, wide = 0, WIDE * LANES if four else 2 * WIDE * LANES
            while column < columns:
                to, left = c + 4 * (row * c_stride + column), a + 4 * row * a_stride
                right, rest = b + size * column, columns - column
                if rest >= wide:
                    column += wide
                    if four:
                        four_by_wide(
                            to, c_stride, left, a_stride, right, b_stride, depth, add, rest
                        )
                    else:
                        two_by_wide(to, c_stride, left, a_stride, right, b_stride, depth, add, rest)
                elif rest >= LANES:
                    column += LANES
                    if four:
                        four_by_one(to, c_stride, left, a_stride, right, b_stride, depth, add, rest)
                    else:
                        two_by_one(to, c_stride, left, a_stride, right, b_stride, depth, add, rest)
                else:
                    column += LANES
                    if four:
                        four_by_part(
                            to, c_stride, left, a_stride, right, b_stride, depth, add, rest
                        )
                    else:
                        two_by_part(to, c_stride, left, a_stride, right, b_stride, depth, add, rest)
            row += 4 if four else 2

    return multiply


_by_float32, _by_bfloat16 = _multiply_by("float32"), _multiply_by("bfloat16")
_by_float16 = _multiply_by("float16") if HAS_FLOAT16 else _by_bfloat16  # never called with float16


@loop
def multiply(
    dtype: int, c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int,
    rows: int, columns: int, depth: int, add: bool,
) -> None:  # fmt: skip
    """Compute `c = a @ b`, or `c += a @ b` if `add`. `depth` must be at least 1.

    All matrices are row-major, with strides in elements. `dtype` is the dtype of b; a and c are
    float32. The memory of a and c must extend to an even number of rows, and the memory of c also
    to a multiple of 16 columns.
    """
    if dtype == FLOAT32:
        _by_float32(c, c_stride, a, a_stride, b, b_stride, rows, columns, depth, add)
    elif dtype == BFLOAT16:
        _by_bfloat16(c, c_stride, a, a_stride, b, b_stride, rows, columns, depth, add)
    else:
        _by_float16(c, c_stride, a, a_stride, b, b_stride, rows, columns, depth, add)


@intrinsic(nothing, long, long, long, long)
def transpose(
    builder: Any, target: Any, target_stride: Any, source: Any, source_stride: Any
) -> None:
    """Transpose 16 x 16 elements of float32. The strides are in elements."""

    def row(start: Any, index: int, stride: Any) -> Any:
        return at(builder, start, builder.mul(ir.Constant(LONG, index), stride), VECTOR)

    rows = [builder.load(row(source, n, source_stride), align=4) for n in range(LANES)]
    distance = LANES
    while distance > 1:  # swap two quarters of each square of 16, then 8, 4 and 2 rows
        distance //= 2
        low = [n if not n & distance else n + LANES - distance for n in range(LANES)]
        high = [n + distance if not n & distance else n + LANES for n in range(LANES)]
        for n in (n for n in range(LANES) if not n & distance):
            pair = rows[n], rows[n + distance]
            rows[n] = builder.shuffle_vector(*pair, ir.Constant(INDICES, low))
            rows[n + distance] = builder.shuffle_vector(*pair, ir.Constant(INDICES, high))
    for n, value in enumerate(rows):
        builder.store(value, row(target, n, target_stride), align=4)
