"""Register tiles of matmuls with 8-bit and 4-bit matrices, by a matrix unit (Intel AMX).

The unit multiplies bytes. Results have the same bits as those of `int16_tiles` (for 8-bit
matrices) and `int4_tiles` (for 4-bit matrices): sums over a stretch or a group are exact, and are
added in the same order.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.gemm.int4_groups import GROUP, MIDDLE
from gptmanager.kernels.gemm.int4_tiles import GROUP_BYTES, SCALE_BYTES
from gptmanager.kernels.gemm.matrix_tiles import PANELS, fetch_line, has_matrix_unit, move, unit
from gptmanager.kernels.gemm.small_matmul import repeat
from gptmanager.kernels.simd.byte_tables import BYTES, load_table, looked_up
from gptmanager.kernels.simd.lanes import (
    FLOAT,
    INDICES,
    LANES,
    LONG,
    VECTOR,
    intrinsic,
    long,
    multiply_add,
    nothing,
    plus,
    spread,
    times,
)

UNIT_ROWS = 16  # rows of a register
STEP = 64  # int8 positions that the unit reads at a time
SPAN_GROUPS = 16  # groups of a panel that are unpacked together, to stay in the L1 cache
TILE_BYTES = 4 * UNIT_ROWS * LANES  # size of a register's int32 sums
STRETCH_BYTES = 4 * TILE_BYTES  # size of the sums of upper and of lower bytes, for two panels
UNPACKED_BYTES = GROUP * LANES  # size of an unpacked group of a panel
# A span is memory for unpacked groups, then their scales and their minima as float32, then the
# sums of two groups. These are the offsets in bytes:
_SCALES = SPAN_GROUPS * UNPACKED_BYTES
_MINIMA = _SCALES + SPAN_GROUPS * 4 * LANES
_SUMS = _MINIMA + SPAN_GROUPS * 4 * LANES
SPAN_BYTES = _SUMS + 2 * TILE_BYTES
_LINE = ir.Constant(LONG, 64)


def has_int8_unit() -> bool:
    """Return whether the matrix unit multiplies bytes, and this process may use it."""
    return has_matrix_unit() and bool(cpu_features().get("amx-int8"))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _fetch(builder: Any, address: Any, num_bytes: int) -> None:
    for line in range(0, num_bytes, 64):
        fetch_line(builder, plus(builder, address, line))


def stretch_tile(fetches: bool) -> Any:
    """Return an intrinsic that computes 16 x 32 elements of a matmul over one stretch.

    With `add`, the intrinsic adds to `c` instead of overwriting it.

    Its arguments are `(c, a, a_stride, low, factors, b0, b1, next0, next1, steps, rows, sums,
    add)`. `c` is float32 with stride 64. `a` is the address of the upper bytes of up to sixteen
    rows; the lower bytes begin at `a + low`. `factors` is the address of the rows' factors.
    `a_stride` is the distance in bytes from a row to the next, and from a row's factor to the next.
    `b0` and `b1` are the addresses of two int8 panels. `next0` and `next1` are the addresses of the
    next two panels, which are prefetched if `fetches`. `steps` counts steps of 64 positions. `sums`
    is memory of `STRETCH_BYTES`.
    """

    @intrinsic(nothing, *[long] * 12, types.boolean)
    def matmul(
        builder: Any, c: Any, a: Any, a_stride: Any, low: Any, factors: Any, b0: Any, b1: Any,
        next0: Any, next1: Any, steps: Any, rows: Any, sums: Any, add: Any,
    ) -> None:  # fmt: skip
        lower, panels, following = builder.add(a, low), (b0, b1), (next0, next1)

        def step(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            """Add one step to the sums.

            Registers 0 to 3 have the sums, 4 and 5 the upper and lower bytes of `a`, and 6 and 7
            the two panels.
            """
            column, block = (times(builder, index, STEP * n) for n in (1, LANES))
            for n, left in enumerate((a, lower)):
                move(builder, "tileloadd64", 4 + n, builder.add(left, column), a_stride)
            for n in range(2):
                if fetches:
                    _fetch(builder, builder.add(following[n], block), STEP * LANES)
                move(builder, "tileloadd64", 6 + n, builder.add(panels[n], block), _LINE)
                for level in range(2):
                    unit(builder, "tdpbssd", 2 * n + level, 4 + level, 6 + n)
            return []

        def finish(row: Any, _: Sequence[Any]) -> Sequence[Any]:
            own = builder.add(sums, times(builder, row, 4 * LANES))
            by = _load(builder, builder.add(factors, builder.mul(row, a_stride)), FLOAT)
            factor, to = spread(builder, by), builder.add(c, times(builder, row, 256))
            for n in range(2):
                upper = _load(builder, plus(builder, own, TILE_BYTES * 2 * n), INDICES)
                rest = _load(builder, plus(builder, own, TILE_BYTES * (2 * n + 1)), INDICES)
                whole = builder.add(builder.shl(upper, ir.Constant(INDICES, [8] * LANES)), rest)
                place, none = plus(builder, to, 4 * LANES * n), ir.Constant(VECTOR, None)
                before = builder.select(add, _load(builder, place, VECTOR), none)
                value = multiply_add(builder, factor, builder.sitofp(whole, VECTOR), before)
                _store(builder, value, place)
            return []

        for n in range(4):
            unit(builder, "tilezero", n)
        repeat(builder, steps, [], step)
        for n in range(4):
            move(builder, "tilestored64", n, plus(builder, sums, TILE_BYTES * n), _LINE)
        repeat(builder, rows, [], finish)

    return matmul


@intrinsic(nothing, *[long] * 5)
def unpack_groups(
    builder: Any, span: Any, values: Any, scales: Any, minima: Any, count: Any
) -> None:
    """Unpack `count` groups of a panel to `span`, and prefetch the next scales.

    Values are written as int8, and scales and minima as float32. `minima` is the distance in bytes
    from scales to minima. If the groups have no minima, `minima` is 0, and 8 is subtracted from
    each value.
    """
    has_minima = builder.icmp_signed("!=", minima, ir.Constant(LONG, 0))
    less = builder.select(has_minima, ir.Constant(BYTES, None), _all(MIDDLE))
    _unpack(builder, span, values, scales, minima, count, lambda own: builder.sub(own, less))


@intrinsic(nothing, *[long] * 5)
def unpack_numbers(
    builder: Any, span: Any, values: Any, scales: Any, codebook: Any, count: Any
) -> None:
    """Do as `unpack_groups` for a matrix with a codebook, at the address `codebook`."""
    table, none = load_table(builder, codebook), ir.Constant(LONG, 0)
    found = functools.partial(looked_up, builder, table)
    _unpack(builder, span, values, scales, none, count, found)


def _unpack(
    builder: Any, span: Any, values: Any, scales: Any, minima: Any, count: Any,
    converted: Callable[[Any], Any],
) -> None:  # fmt: skip
    """Do as `unpack_groups`; `converted(values)` returns the int8 numbers of 64 values."""
    halves = ir.VectorType(ir.HalfType(), LANES)

    def step(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        source = builder.add(values, times(builder, index, GROUP_BYTES))
        scale = builder.add(scales, times(builder, index, SCALE_BYTES))
        fetch_line(builder, plus(builder, scale, SPAN_GROUPS * SCALE_BYTES))
        to = builder.add(span, times(builder, index, UNPACKED_BYTES))
        for n in range(0, GROUP_BYTES, 64):
            both = _load(builder, plus(builder, source, n), BYTES)
            lower, upper = builder.and_(both, _all(15)), builder.lshr(both, _all(4))
            _store(builder, converted(lower), plus(builder, to, n))
            _store(builder, converted(upper), plus(builder, to, GROUP_BYTES + n))
        floats = builder.add(span, times(builder, index, 4 * LANES))
        for start, at in ((scale, _SCALES), (builder.add(scale, minima), _MINIMA)):
            wide = builder.fpext(_load(builder, start, halves), VECTOR)
            _store(builder, wide, plus(builder, floats, at))
        return []

    repeat(builder, count, [], step)


def _all(byte: int) -> Any:
    return ir.Constant(BYTES, [byte] * BYTES.count)


def _sum_group(builder: Any, a: Any, a_stride: Any, span: Any, index: Any) -> Any:
    """Store the int32 sums of one group for all rows, and return their address.

    Register 0 has the sums, register 4 the bytes of `a`, and register 5 the panel.
    """
    move(builder, "tileloadd64", 4, builder.add(a, times(builder, index, GROUP)), a_stride)
    right = builder.add(span, times(builder, index, UNPACKED_BYTES))
    move(builder, "tileloadd64", 5, right, _LINE)
    unit(builder, "tilezero", 0)
    unit(builder, "tdpbssd", 0, 4, 5)
    # two places, used alternately, because the sums of the previous group are still being read
    slot = builder.and_(index, ir.Constant(LONG, 1))
    sums = plus(builder, builder.add(span, times(builder, slot, TILE_BYTES)), _SUMS)
    move(builder, "tilestored64", 0, sums, _LINE)
    return sums


def groups_tile(rows: int) -> Any:
    """Return an intrinsic that computes `rows` x 16 elements of a matmul over some groups.

    With `add`, the intrinsic adds to `c` instead of overwriting it.

    Its arguments are `(c, a, factors, apart, a_stride, span, count, given, minima, following,
    add)`. `c` is float32 with stride 64. `a` is the address of `given` rows of int8, `a_stride`
    bytes apart, and `factors` the address of their groups' factors. A group's factor times the
    sum of its elements is stored `apart` bytes after the factor. `span` has `count`
    unpacked groups of a panel, and `following` is the address of the next groups, which are
    prefetched. `minima` is 0 if the groups have no minima. Rows of `c` from `given` on become
    undefined.
    """

    @intrinsic(nothing, *[long] * 10, types.boolean)
    def matmul(
        builder: Any, c: Any, a: Any, factors: Any, apart: Any, a_stride: Any, span: Any,
        count: Any, given: Any, minima: Any, following: Any, add: Any,
    ) -> None:  # fmt: skip
        last = builder.sub(given, ir.Constant(LONG, 1))
        lefts = []
        for row in (ir.Constant(LONG, n) for n in range(rows)):
            own = builder.select(builder.icmp_signed("<", row, last), row, last)
            lefts.append(builder.add(factors, builder.mul(own, a_stride)))

        def multiply(has_minima: bool) -> None:
            def group(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
                ahead = builder.add(following, times(builder, index, GROUP_BYTES))
                _fetch(builder, ahead, GROUP_BYTES)
                sums = _sum_group(builder, a, a_stride, span, index)
                floats = builder.add(span, times(builder, index, 4 * LANES))
                scale = _load(builder, plus(builder, floats, _SCALES), VECTOR)
                least = _load(builder, plus(builder, floats, _MINIMA), VECTOR)
                found = []
                for row, total in enumerate(totals):
                    at = builder.add(lefts[row], times(builder, index, 4))
                    factor = spread(builder, _load(builder, at, FLOAT))
                    exact = _load(builder, plus(builder, sums, 4 * LANES * row), INDICES)
                    value = builder.fmul(builder.sitofp(exact, VECTOR), factor)
                    total = multiply_add(builder, value, scale, total)
                    if has_minima:
                        whole = spread(builder, _load(builder, builder.add(at, apart), FLOAT))
                        total = multiply_add(builder, whole, least, total)
                    found.append(total)
                return found

            places = [plus(builder, c, 4 * LANES * PANELS * n) for n in range(rows)]
            none = ir.Constant(VECTOR, None)
            initial = [builder.select(add, _load(builder, it, VECTOR), none) for it in places]
            for place, total in zip(places, repeat(builder, count, initial, group), strict=True):
                _store(builder, total, place)

        some_minima = builder.icmp_signed("!=", minima, ir.Constant(LONG, 0))
        with builder.if_else(some_minima) as (some, none):
            for branch, has_minima in ((some, True), (none, False)):
                with branch:
                    multiply(has_minima)

    return matmul
