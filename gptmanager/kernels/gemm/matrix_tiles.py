"""Register tiles of matmuls with a packed matrix, for each stored dtype of the matrix.

Each element of a result is one chain of additions along the depth, so its bits do not depend on the
division into tiles. A panel of a packed matrix has sixteen interleaved rows: see `PackedMatrix`.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.gemm.small_matmul import WIDE, repeat
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
    loop_named,
    multiply_add,
    nothing,
    spread,
)
from gptmanager.kernels.simd.pairs import add_pairs, is_amd

PANELS = 4  # panels of a tile: enough sums to hide the latency of additions even with one row
# The distance in bytes at which we prefetch from a panel (further ahead than the processor's own
# prefetcher), and the cache level of the prefetch (3: L1, 2: L2). AMD's processors can have fewer
# lines in flight to L1 than to L2. On Intel's processors, L1 was faster.
AHEAD, _NEAR = (1024, 2) if is_amd() else (2048, 3)
# Rows of a tile -> the number of panels that are computed at a time, so that their sums fit into
# registers. There are 32 registers of 512 bits, or 16 of 256 bits. With 256 bits, a vector of
# sixteen floats takes two registers.
_ACROSS = dict.fromkeys((1, 2, 4, 6), PANELS) if WIDE > 1 else {1: 4, 2: 2, 4: 1, 6: 1}
_HALVES = ir.VectorType(ir.HalfType(), LANES)


class Format(NamedTuple):
    """The instructions that read and multiply a stored dtype.

    `kind` is the type of one load from a panel. `positions` is the number of positions of the depth
    in one load (for "bfloat16 pairs": the number of pairs). `widen(builder, loaded, n)` returns
    position or pair `n` of a load as a vector of factors. `left` is the type of one load from a
    row. `add(builder, left, right, total)` takes three vectors, and returns the new total.
    """

    kind: Any
    positions: int
    widen: Callable[[Any, Any, int], Any]
    left: Any = FLOAT
    add: Callable[[Any, Any, Any, Any], Any] = multiply_add

    @property
    def bytes_read(self) -> int:
        return LANES * (2 if self.kind is _HALVES else 4)


def fetch_line(builder: Any, address: Any) -> None:
    """Prefetch the cache line at `address`."""
    to_read, to_stay, data = (ir.Constant(INT, n) for n in (0, _NEAR, 1))
    kind, pointer = ir.VoidType(), builder.inttoptr(address, FLOAT.as_pointer())
    call(builder, "llvm.prefetch.p0", kind, pointer, to_read, to_stay, data)


def _of_pair(builder: Any, value: Any, position: int) -> Any:
    """Widen one of two bfloat16 positions; the even one is in the lower half of a lane."""
    if position:
        return builder.bitcast(builder.and_(value, int_lanes(0xFFFF0000)), VECTOR)
    return builder.bitcast(builder.shl(value, int_lanes(16)), VECTOR)


def _of_four(builder: Any, value: Any, position: int) -> Any:
    """Widen one of four int8 positions; the first one is in the lowest byte of a lane."""
    upper = builder.shl(value, int_lanes(24 - 8 * position)) if position < 3 else value
    return builder.sitofp(builder.ashr(upper, int_lanes(24)), VECTOR)


_FORMATS = {
    "float32": Format(VECTOR, 1, lambda builder, value, _: value),
    "bfloat16": Format(INDICES, 2, _of_pair),
    "bfloat16 pairs": Format(INDICES, 1, lambda builder, value, _: value, INT, add_pairs),
    "float16": Format(_HALVES, 1, lambda builder, value, _: builder.fpext(value, VECTOR)),
    "int8": Format(INDICES, 4, _of_four),
}


def tile(rows: int, dtype: str, across: int) -> Any:
    """Return an intrinsic that computes `rows` x 64 elements of a matmul, or adds to them.

    The sums of `across` panels are in registers at a time. The intrinsic's arguments are `(c, a,
    a_stride, b0, b1, b2, b3, steps, add)`. `c` is float32 with stride 64; `a` is float32, or
    bfloat16 for pairs, with `a_stride` in bytes; `b0` to `b3` are the addresses of four panels. A
    step reads four positions of each panel for int8, two for bfloat16 and bfloat16 pairs, and one
    for other dtypes.
    """
    own = _FORMATS[dtype]

    @intrinsic(nothing, *[long] * 8, types.boolean)
    def matmul(
        builder: Any, c: Any, a: Any, a_stride: Any, b0: Any, b1: Any, b2: Any, b3: Any,
        steps: Any, add: Any,
    ) -> None:  # fmt: skip
        lefts = [
            builder.add(a, builder.mul(a_stride, ir.Constant(LONG, row))) for row in range(rows)
        ]

        def multiply(first: int, panels: Sequence[Any]) -> None:
            def step(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                offset = builder.mul(index, ir.Constant(LONG, own.bytes_read))
                starts = [builder.add(panel, offset) for panel in panels]
                for start in starts:
                    fetch_line(builder, builder.add(start, ir.Constant(LONG, AHEAD)))
                pointers = [builder.inttoptr(start, own.kind.as_pointer()) for start in starts]
                read = [builder.load(pointer, align=1) for pointer in pointers]
                for inner in range(own.positions):
                    position = builder.add(
                        builder.mul(index, ir.Constant(LONG, own.positions)),
                        ir.Constant(LONG, inner),
                    )
                    right = [own.widen(builder, value, inner) for value in read]
                    factors = [
                        spread(builder, builder.load(at(builder, left, position, own.left)))
                        for left in lefts
                    ]
                    sums = [
                        own.add(builder, factors[n // across], right[n % across], total)
                        for n, total in enumerate(sums)
                    ]
                return sums

            targets = [
                at(builder, c, ir.Constant(LONG, LANES * (PANELS * row + first + n)), VECTOR)
                for row in range(rows)
                for n in range(across)
            ]
            zero = ir.Constant(VECTOR, None)
            initial = [builder.select(add, builder.load(t, align=4), zero) for t in targets]
            for target, value in zip(targets, repeat(builder, steps, initial, step), strict=True):
                builder.store(value, target, align=4)

        for first in range(0, PANELS, across):
            multiply(first, (b0, b1, b2, b3)[first : first + across])

    return matmul


@functools.cache
def widen_panel(dtype: str) -> Any:
    """Return an intrinsic `(target, source, positions)` that widens a panel to float32."""
    own = _FORMATS[dtype]

    @intrinsic(nothing, long, long, long)
    def widened(builder: Any, target: Any, source: Any, positions: Any) -> None:
        def step(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            start = builder.add(source, builder.mul(index, ir.Constant(LONG, own.bytes_read)))
            read = builder.load(builder.inttoptr(start, own.kind.as_pointer()), align=1)
            first = builder.mul(index, ir.Constant(LONG, own.positions * LANES))
            for n in range(own.positions):
                place = builder.add(first, ir.Constant(LONG, n * LANES))
                value = own.widen(builder, read, n)
                builder.store(value, at(builder, target, place, VECTOR), align=4)
            return []

        repeat(builder, builder.sdiv(positions, ir.Constant(LONG, own.positions)), [], step)

    return widened


@functools.cache  # one function for each name
def over_rows(dtype: str) -> Any:
    """Return a function like the result of `tile`, but for any number of rows.

    The function uses tiles of six rows, and then of four, two and one for the remaining rows.
    """
    six, four, two, one = (tile(rows, dtype, _ACROSS[rows]) for rows in (6, 4, 2, 1))
    name = dtype.replace(" ", "_")

    @loop_named(f"multiply_rows_{name}")
    def matmul(
        c: int, a: int, a_stride: int, b0: int, b1: int, b2: int, b3: int,
        steps: int, add: bool, rows: int,
    ) -> None:  # fmt: skip
        row = 0
        while row < rows:
            to, left, rest = c + 256 * row, a + row * a_stride, rows - row
            if rest >= 6:
                six(to, left, a_stride, b0, b1, b2, b3, steps, add)
                row += 6
            elif rest >= 4:
                four(to, left, a_stride, b0, b1, b2, b3, steps, add)
                row += 4
            elif rest >= 2:
                two(to, left, a_stride, b0, b1, b2, b3, steps, add)
                row += 2
            else:
                one(to, left, a_stride, b0, b1, b2, b3, steps, add)
                row += 1

    return matmul


# The matrix unit of some processors (Intel's AMX): eight registers of 16 rows of 64 bytes. A
# configuration says how many rows, and how many bytes per row, each register has.
CONFIGURATION_BYTES = 64
_BYTE = ir.IntType(8)


@functools.cache
def has_matrix_unit() -> bool:
    """Return whether this process may use AMX with bfloat16.

    Linux requires a request for permission, which is made here once for all threads.
    """
    if sys.platform != "linux" or not cpu_features().get("amx-bf16"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def unit(builder: Any, name: str, *registers: int) -> None:
    """Emit an instruction on the tile registers with these numbers."""
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *(ir.Constant(_BYTE, n) for n in registers))


def move(builder: Any, name: str, register: int, address: Any, stride: Any) -> None:
    """Emit a load ("tileloadd64") or store ("tilestored64") of rows `stride` bytes apart."""
    number, start = ir.Constant(_BYTE, register), builder.inttoptr(address, _BYTE.as_pointer())
    call(builder, f"llvm.x86.{name}", ir.VoidType(), number, start, stride)


@intrinsic(nothing, long)
def configure(builder: Any, address: Any) -> None:
    """Load the tile configuration, the 64 bytes at `address`."""
    pointer = builder.inttoptr(address, _BYTE.as_pointer())
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), pointer)


@intrinsic(nothing)
def release(builder: Any) -> None:
    """Release the tile registers, which are otherwise saved at each context switch."""
    unit(builder, "tilerelease")


def unit_tile(down: int) -> Any:
    """Return an intrinsic that computes `16 * down` x 64 elements of a bfloat16 matmul.

    `down` is 1 or 2. The intrinsic's arguments are the same as in `tile`, but `a_stride` is in
    elements, `a` is bfloat16, and a step is 32 positions. The first four registers hold sums, the
    next `down` registers hold rows of `a`, and the other registers hold parts of panels.
    """
    across = PANELS // down
    lefts, rights = range(PANELS, PANELS + down), range(PANELS + down, 8)

    @intrinsic(nothing, long, long, long, long, long, long, long, long, types.boolean)
    def matmul(
        builder: Any, c: Any, a: Any, a_stride: Any, b0: Any, b1: Any, b2: Any, b3: Any,
        steps: Any, add: Any,
    ) -> None:  # fmt: skip
        def multiply(c_start: Any, panels: Sequence[Any]) -> None:
            def step(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                column, block = (builder.mul(index, ir.Constant(LONG, n)) for n in (64, 1024))
                for left, row in zip(lefts, rows, strict=True):
                    start = builder.add(row, column)
                    move(builder, "tileloadd64", left, start, row_bytes)
                for n, panel in enumerate(panels):
                    right, start = rights[n % len(rights)], builder.add(panel, block)
                    if down == 1:  # with more rows the unit is the bottleneck
                        for offset in range(0, 1024, 64):
                            fetch_line(
                                builder, builder.add(start, ir.Constant(LONG, offset + AHEAD))
                            )
                    move(builder, "tileloadd64", right, start, line)
                    for m, left in enumerate(lefts):
                        unit(builder, "tdpbf16ps", m * across + n, left, right)
                return []

            places = [
                builder.add(c_start, ir.Constant(LONG, 4 * (16 * 64 * m + 16 * n)))
                for m in range(down)
                for n in range(across)
            ]
            with builder.if_else(add) as (more, first):
                with more:
                    for n, to in enumerate(places):
                        move(builder, "tileloadd64", n, to, c_bytes)
                with first:
                    for n in range(len(places)):
                        unit(builder, "tilezero", n)
            repeat(builder, steps, [], step)
            for n, to in enumerate(places):
                move(builder, "tilestored64", n, to, c_bytes)

        row_bytes = builder.mul(a_stride, ir.Constant(LONG, 2))
        line, c_bytes = ir.Constant(LONG, 64), ir.Constant(LONG, 256)
        sixteen = builder.mul(row_bytes, ir.Constant(LONG, 16))
        rows = [a, builder.add(a, sixteen)][:down]
        for n in range(0, PANELS, across):
            start = builder.add(c, ir.Constant(LONG, 4 * 16 * n))
            multiply(start, (b0, b1, b2, b3)[n : n + across])

    return matmul
