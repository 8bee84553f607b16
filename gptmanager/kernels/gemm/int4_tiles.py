"""Register tiles of matmuls with a 4-bit matrix, and functions that widen its panels.

The rows of activations consist of blocks that `int4_activations` writes. The dot product
instruction multiplies unsigned bytes, here the stored values of the matrix, or the numbers of its
codebook plus 128, with signed bytes, here the activations. The int32 sums of a group are exact. An
element of the result does not depend on the number of rows.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.gemm.int4_activations import BEGIN, BLOCK_HEAD, FACTOR, SUM, block_bytes
from gptmanager.kernels.gemm.int4_groups import GROUP, MIDDLE
from gptmanager.kernels.gemm.int8_tiles import add_dots, has_int8_dots
from gptmanager.kernels.gemm.matrix_tiles import AHEAD, PANELS, fetch_line
from gptmanager.kernels.gemm.small_matmul import repeat
from gptmanager.kernels.simd.byte_tables import BYTES, load_table, looked_up
from gptmanager.kernels.simd.lanes import (
    FLOAT,
    INDICES,
    INT,
    LANES,
    LONG,
    VECTOR,
    at,
    call,
    int_lanes,
    intrinsic,
    long,
    multiply_add,
    nothing,
    plus,
    spread,
    times,
)

GROUP_BYTES = GROUP * LANES // 2  # bytes of a group's values in a panel
SCALE_BYTES = 2 * LANES  # bytes of a group's scales, or of its minima, in a panel
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_EIGHT = ir.VectorType(INT, LANES // 2)
_STEPS = GROUP // 8  # loads per group
_MADE_UNSIGNED = 128  # is added to the numbers of a codebook
_SHIFTED = 0x43000000  # bits of the float 128; the float 128 + n has n in bits 16 to 19


@functools.cache  # LLVM needs 0.1 ms to answer, and each plan of a matmul asks
def has_byte_dots() -> bool:
    """Return whether the processor has dot products of four bytes, with 512 or 256 bits (VNNI)."""
    return has_int8_dots() or bool(cpu_features().get("avxvnni"))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _widened(builder: Any, address: Any) -> Any:
    """Load sixteen float16 as float32."""
    return builder.fpext(_load(builder, address, _HALVES), VECTOR)


def _add_narrow_dots(builder: Any, unsigned: Any, signed: Any, total: Any) -> Any:
    """Add the dot products with two instructions of 256 bits."""
    parts = []
    for first in (0, LANES // 2):
        mask = ir.Constant(_EIGHT, list(range(first, first + LANES // 2)))
        own = [builder.shuffle_vector(it, it, mask) for it in (total, unsigned, signed)]
        parts.append(call(builder, "llvm.x86.avx512.vpdpbusd.256", _EIGHT, *own))
    return builder.shuffle_vector(*parts, ir.Constant(INDICES, list(range(LANES))))


class _Tile:
    """Emits the code of a tile of `rows` rows and `across` panels; see `int4_tile`.

    `table`: the unsigned numbers of the codebook, or None.
    """

    def __init__(
        self, builder: Any, rows: int, across: int, levels: int, is_wide: bool, table: Any
    ) -> None:
        self.builder, self.rows, self.across, self.levels = builder, rows, across, levels
        self.add_dots = add_dots if is_wide else _add_narrow_dots
        self.table = table

    def begins(self, blocks: Sequence[Any], has_minima: Any) -> list[Any]:
        """Return the initial int32 sums of the rows."""
        builder = self.builder
        found = [_load(builder, plus(builder, it, BEGIN), INT) for it in blocks]
        if self.table is not None:
            by = ir.Constant(INT, _MADE_UNSIGNED // MIDDLE)
            return [spread(builder, builder.mul(it, by)) for it in found]
        keep = builder.select(has_minima, ir.Constant(INT, 0), ir.Constant(INT, -1))
        return [spread(builder, builder.and_(it, keep)) for it in found]

    def group(
        self, blocks: Sequence[Any], values: Sequence[Any], begins: Sequence[Any]
    ) -> list[Any]:
        """Return the int32 sums of a group, for each row and each panel."""
        builder, low = self.builder, int_lanes(0x0F0F0F0F)
        none = ir.Constant(INDICES, None)
        sums = [
            [begins[row] if level == self.levels - 1 else none for level in range(self.levels)]
            for row in range(self.rows)
            for _ in range(self.across)
        ]
        for step in range(_STEPS):
            both = [_load(builder, plus(builder, it, 64 * step), INDICES) for it in values]
            lower = [builder.and_(it, low) for it in both]
            upper = [builder.and_(builder.lshr(it, int_lanes(4)), low) for it in both]
            if self.table is not None:
                lower = [looked_up(builder, self.table, it) for it in lower]
                upper = [looked_up(builder, self.table, it) for it in upper]
            for right, place in ((lower, 4 * step), (upper, 4 * (step + _STEPS))):
                for row, block in enumerate(blocks):
                    for level in range(self.levels):
                        start = plus(builder, block, BLOCK_HEAD + GROUP * level + place)
                        left = spread(builder, _load(builder, start, INT))
                        for n in range(self.across):
                            own = sums[row * self.across + n]
                            own[level] = self.add_dots(builder, right[n], left, own[level])
        if self.levels == 1:
            return [own for (own,) in sums]
        return [builder.add(builder.shl(high, int_lanes(8)), rest) for high, rest in sums]

    def scaled(
        self, blocks: Sequence[Any], scales: Sequence[Any], sums: Sequence[Any],
        totals: Sequence[Any],
    ) -> list[Any]:  # fmt: skip
        """Return `totals + sums * factors * scales` for a group, with the factors of the rows."""
        builder = self.builder
        right = [_widened(builder, it) for it in scales]
        factors = [
            spread(builder, _load(builder, plus(builder, it, FACTOR), FLOAT)) for it in blocks
        ]
        found = []
        for n, (own, total) in enumerate(zip(sums, totals, strict=True)):
            value = builder.fmul(builder.sitofp(own, VECTOR), factors[n // self.across])
            found.append(multiply_add(builder, value, right[n % self.across], total))
        return found

    def with_minima(
        self, blocks: Sequence[Any], minima: Sequence[Any], has_minima: Any, totals: Sequence[Any]
    ) -> list[Any]:
        """Return the totals plus, if the matrix has minima, the minima times the rows' sums."""
        builder = self.builder
        before = builder.block
        with builder.if_then(has_minima, likely=False):
            right = [_widened(builder, it) for it in minima]
            sums = [spread(builder, _load(builder, plus(builder, it, SUM), FLOAT)) for it in blocks]
            more = [
                multiply_add(builder, sums[n // self.across], right[n % self.across], total)
                for n, total in enumerate(totals)
            ]
            inside = builder.block
        results = [builder.phi(VECTOR) for _ in totals]
        for result, one, other in zip(results, totals, more, strict=True):
            result.add_incoming(one, before)
            result.add_incoming(other, inside)
        return results


def int4_tile(
    rows: int, across: int, levels: int, is_wide: bool, has_codebook: bool = False
) -> Any:
    """Return an intrinsic that computes `rows` x 64 elements of a matmul.

    Its arguments are
    `(c, a, a_stride, b0, b1, b2, b3, s0, s1, s2, s3, minima, codebook, groups)`. `c` is
    float32 with stride 64. `a` is the first block of a quantized row, with `levels` bytes per
    position; the next row begins `a_stride` bytes later. `b0` to `b3` are the addresses of four
    panels, `s0` to `s3` those of their scales. `minima` is the number of bytes from a scale to its
    minimum, or 0 without minima, as with a codebook. `codebook` is the address of its int8 numbers;
    it is read only if `has_codebook`. A row has `groups` groups; `across` panels are computed at
    once.
    """

    @intrinsic(nothing, *[long] * 14)
    def matmul(
        builder: Any, c: Any, a: Any, a_stride: Any, b0: Any, b1: Any, b2: Any, b3: Any,
        s0: Any, s1: Any, s2: Any, s3: Any, minima: Any, codebook: Any, groups: Any,
    ) -> None:  # fmt: skip
        table = _unsigned_table(builder, codebook) if has_codebook else None
        own = _Tile(builder, rows, across, levels, is_wide, table)
        starts = [builder.add(a, times(builder, a_stride, row)) for row in range(rows)]
        has_minima = builder.icmp_signed("!=", minima, ir.Constant(LONG, 0))

        def multiply(first: int) -> None:
            panels = (b0, b1, b2, b3)[first : first + across]
            scales = (s0, s1, s2, s3)[first : first + across]

            def step(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
                blocks = [
                    builder.add(it, times(builder, index, block_bytes(levels))) for it in starts
                ]
                values = [builder.add(it, times(builder, index, GROUP_BYTES)) for it in panels]
                right = [builder.add(it, times(builder, index, SCALE_BYTES)) for it in scales]
                for it in values:
                    for line in range(0, GROUP_BYTES, 64):
                        fetch_line(builder, plus(builder, it, AHEAD + line))
                for it in right:
                    fetch_line(builder, plus(builder, it, AHEAD // 4))
                sums = own.group(blocks, values, own.begins(blocks, has_minima))
                scaled = own.scaled(blocks, right, sums, totals)
                if has_codebook:
                    return scaled
                behind = [builder.add(it, minima) for it in right]
                return own.with_minima(blocks, behind, has_minima, scaled)

            targets = [
                at(builder, c, ir.Constant(LONG, LANES * (PANELS * row + first + n)), VECTOR)
                for row in range(rows)
                for n in range(across)
            ]
            initial = [ir.Constant(VECTOR, None)] * len(targets)
            for target, value in zip(targets, repeat(builder, groups, initial, step), strict=True):
                builder.store(value, target, align=4)

        for first in range(0, PANELS, across):
            multiply(first)

    return matmul


def _unsigned_table(builder: Any, codebook: Any) -> Any:
    """Load the numbers of a codebook, and add 128, so that they are unsigned."""
    added = ir.Constant(BYTES, [_MADE_UNSIGNED] * BYTES.count)
    return builder.add(load_table(builder, codebook), added)


def _numbers_of(builder: Any, source: Any, codebook: Any) -> list[Any]:
    """Return a group's numbers of a codebook, one float32 vector per position."""
    table, low = load_table(builder, codebook), int_lanes(0x0F0F0F0F)
    both = [_load(builder, plus(builder, source, 64 * step), INDICES) for step in range(_STEPS)]
    found = []
    for right in (0, 4):
        for value in both:
            places = builder.and_(builder.lshr(value, int_lanes(right)), low)
            numbers = looked_up(builder, table, places)
            for byte in range(4):
                moved = builder.shl(numbers, int_lanes(24 - 8 * byte))
                found.append(builder.sitofp(builder.ashr(moved, int_lanes(24)), VECTOR))
    return found


def _values_of(builder: Any, source: Any) -> list[Any]:
    """Return a group's values, one vector per position, in bits 16 to 19 of int32 lanes."""
    both = [_load(builder, plus(builder, source, 64 * step), INDICES) for step in range(_STEPS)]
    found, mask = [], int_lanes(0x000F0000)
    for half in (0, 4):
        for value in both:
            for byte in range(4):
                by = 16 - half - 8 * byte
                moved = (
                    builder.shl(value, int_lanes(by))
                    if by > 0
                    else builder.lshr(value, int_lanes(-by))
                )
                found.append(builder.and_(moved, mask))
    return found


def _scale_and_offset(builder: Any, scales: Any, minima: Any, middle: int) -> tuple[Any, Any]:
    """Return a group's scales and offsets.

    The dequantized value is `scale * shifted + offset`, with `shifted = value + middle - MIDDLE`.
    """
    scale = _widened(builder, scales)
    has_minima = builder.icmp_signed("!=", minima, ir.Constant(LONG, 0))
    behind = builder.select(has_minima, builder.add(scales, minima), scales)
    minimum = _widened(builder, behind)
    zero = builder.fmul(scale, ir.Constant(VECTOR, [float(-middle)] * LANES))
    above = builder.fmul(scale, ir.Constant(VECTOR, [float(MIDDLE - middle)] * LANES))
    return scale, builder.select(has_minima, builder.fadd(minimum, above), zero)


@intrinsic(nothing, *[long] * 4)
def widen_group(builder: Any, target: Any, values: Any, scales: Any, minima: Any) -> None:
    """Widen a group of a panel to float32 `[32, 16]`; `minima` as in `int4_tile`."""
    scale, offset = _scale_and_offset(builder, scales, minima, MIDDLE)
    for n, moved in enumerate(_values_of(builder, values)):
        value = builder.sitofp(builder.lshr(moved, int_lanes(16)), VECTOR)
        result = multiply_add(builder, value, scale, offset)
        builder.store(result, at(builder, target, ir.Constant(LONG, LANES * n), VECTOR), align=4)


@intrinsic(nothing, *[long] * 4)
def widen_group_to_pairs(builder: Any, target: Any, values: Any, scales: Any, minima: Any) -> None:
    """Widen a group of a panel to bfloat16 `[16, 16, 2]`, rounded to the nearest.

    A value n becomes the float 128 + n by setting the bits of `_SHIFTED`, without a conversion.
    """
    scale, offset = _scale_and_offset(builder, scales, minima, 128 + MIDDLE)
    elements = []
    for moved in _values_of(builder, values):
        value = builder.bitcast(builder.or_(moved, int_lanes(_SHIFTED)), VECTOR)
        elements.append(multiply_add(builder, value, scale, offset))
    _store_pairs(builder, target, elements)


@intrinsic(nothing, *[long] * 4)
def widen_numbers(builder: Any, target: Any, values: Any, scales: Any, codebook: Any) -> None:
    """Do as `widen_group` with a codebook."""
    scale = _widened(builder, scales)
    for n, number in enumerate(_numbers_of(builder, values, codebook)):
        place = at(builder, target, ir.Constant(LONG, LANES * n), VECTOR)
        builder.store(builder.fmul(number, scale), place, align=4)


@intrinsic(nothing, *[long] * 4)
def widen_numbers_to_pairs(
    builder: Any, target: Any, values: Any, scales: Any, codebook: Any
) -> None:
    """Do as `widen_group_to_pairs` with a codebook."""
    scale, numbers = _widened(builder, scales), _numbers_of(builder, values, codebook)
    _store_pairs(builder, target, [builder.fmul(it, scale) for it in numbers])


def _store_pairs(builder: Any, target: Any, elements: Sequence[Any]) -> None:
    """Round the elements of a group, one vector per position, to bfloat16."""
    upper = int_lanes(0xFFFF0000)
    rounded = [builder.add(builder.bitcast(it, INDICES), int_lanes(0x8000)) for it in elements]
    for n in range(0, len(rounded), 2):
        even = builder.lshr(rounded[n], int_lanes(16))
        both = builder.or_(even, builder.and_(rounded[n + 1], upper))
        place = at(builder, target, ir.Constant(LONG, LANES * n // 2), INDICES)
        builder.store(both, place, align=4)
