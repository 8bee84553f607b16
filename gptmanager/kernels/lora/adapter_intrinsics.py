"""Register tiles for low-rank adapters: `dots` computes A x, and `expanded` computes B h.

The bits of a result do not depend on how tokens and ranks are cut into tiles. `expanded` transposes
B: elements of two bytes are transposed in pairs and widened afterwards. A tile prefetches the
memory that is read next, because the processor's own prefetching ends with each row.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.gemm.small_matmul import WIDE, repeat
from gptmanager.kernels.simd.dtypes import HAS_FLOAT16, itemsize, load_at
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
from gptmanager.kernels.simd.pairs import add_pairs

ROWS, RANKS = 2 * WIDE, 4  # tokens and ranks of a tile of A x: its sums fit in registers
RANKS_OF_ONE = 4 * WIDE  # ranks of a tile of A x with one token
DEPTH = 8  # ranks of B that stay in registers, next to the sums
LINE = 64  # bytes of a cache line
NAMES = "float32", "bfloat16", *(("float16",) if HAS_FLOAT16 else ())


def _number(value: int) -> Any:
    return ir.Constant(LONG, value)


def fetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Prefetch lines of memory to the L2 cache: L1 is too small for the data that is ahead."""
    to_read, second_level, data = (ir.Constant(INT, n) for n in (0, 2, 1))
    for offset in range(0, num_bytes, LINE):
        pointer = builder.inttoptr(builder.add(address, _number(offset)), FLOAT.as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, to_read, second_level, data)


def _lanes(builder: Any, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    """Return these lanes of two vectors as one vector."""
    chosen = ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes))
    return builder.shuffle_vector(first, second, chosen)


def _sums(builder: Any, values: Sequence[Any]) -> Any:
    """Return a vector with the sum of the lanes of each vector in `values`, in their order.

    Halves of a vector are added until one lane is left.
    """
    width = LANES
    while width > 1:
        width //= 2
        low = [lane for lane in range(2 * LANES) if lane // width % 2 == 0]
        high = [lane + width for lane in low]
        pairs = zip(values[::2], values[1::2] or values, strict=True)
        values = [
            builder.fadd(_lanes(builder, *pair, low), _lanes(builder, *pair, high))
            for pair in pairs
        ]
    return values[0]


def dots(rows: int, ranks: int, dtype: str) -> Any:
    """Return an intrinsic that stores the dot products of `rows` tokens with `ranks` rows of A.

    Its arguments are `(h, stride, x, a, width, last_row, last_rank, ahead)`. The results of two
    adjacent tokens are `stride` floats apart in `h`. Tokens after `last_row` repeat token
    `last_row`, and rows of A after `last_rank` repeat row `last_rank`. The intrinsic prefetches the
    bytes from `ahead` on, as many as it reads of A. `x` is float32. `width` is the width of x and
    A, at least LANES. A dot product is the sum of sixteen partial sums along the width. With
    `dtype` "bfloat16 pairs" x is also bfloat16, `width` is at least 2 * LANES, and each step adds
    two terms to each partial sum.
    """
    kept = dtype.removesuffix(" pairs")
    by_pairs = kept != dtype
    x_kept, at_once = (kept, 2 * LANES) if by_pairs else ("float32", LANES)
    read = at_once * ranks * itemsize(kept)

    @intrinsic(nothing, long, long, long, long, long, long, long, long)
    def matmul(
        builder: Any, h: Any, stride: Any, x: Any, a: Any, width: Any, last_row: Any,
        last_rank: Any, ahead: Any,
    ) -> None:  # fmt: skip
        def add(pairs: bool, index: Any, count: Any, totals: Any) -> list[Any]:
            read_at, add_to = (_pairs_at, add_pairs) if pairs else (load_at, multiply_add)
            tokens = [read_at(builder, x_kept, left, index, count) for left in lefts]
            parts = [read_at(builder, kept, right, index, count) for right in rights]
            factors = [(x, y) for x in tokens for y in parts]
            return [
                add_to(builder, x, y, total) for (x, y), total in zip(factors, totals, strict=True)
            ]

        def step(index: Any, totals: Any) -> list[Any]:
            fetch(builder, builder.add(ahead, builder.mul(index, _number(read))), read)
            first = builder.mul(index, _number(at_once))
            return add(by_pairs, first, None, totals)

        lefts = _starts(builder, x, builder.mul(width, _number(itemsize(x_kept))), last_row, rows)
        rights = _starts(builder, a, builder.mul(width, _number(itemsize(kept))), last_rank, ranks)
        zeros = [ir.Constant(VECTOR, None)] * (rows * ranks)
        whole = builder.sdiv(width, _number(at_once))
        totals = repeat(builder, whole, zeros, step)
        end, before = builder.mul(whole, _number(at_once)), builder.block
        with builder.if_then(builder.icmp_signed("<", end, width)):
            longer = totals
            for offset in range(0, at_once, LANES):
                first = builder.add(end, _number(offset))
                longer = add(False, first, builder.sub(width, first), longer)
            after = builder.block
        ends = []
        for short, long_one in zip(totals, longer, strict=True):
            total = builder.phi(VECTOR)
            total.add_incoming(short, before)
            total.add_incoming(long_one, after)
            ends.append(total)
        sums = _sums(builder, ends)
        for row in range(rows):
            part = _lanes(builder, sums, sums, range(row * ranks, (row + 1) * ranks))
            place = builder.mul(_number(row), stride)
            builder.store(part, at(builder, h, place, part.type), align=4)

    return matmul


def _starts(builder: Any, address: Any, num_bytes: Any, last: Any, count: int) -> list[Any]:
    """Return the addresses of `count` rows of `num_bytes`. Rows after `last` repeat row `last`."""
    rows = [_number(row) for row in range(count)]
    there = [builder.select(builder.icmp_signed("<", row, last), row, last) for row in rows]
    return [builder.add(address, builder.mul(row, num_bytes)) for row in there]


def _pairs_at(builder: Any, dtype: str, address: Any, index: Any, count: Any) -> Any:
    """Load sixteen bfloat16 pairs without widening them."""
    assert dtype == "bfloat16" and count is None
    start = builder.add(address, builder.mul(index, _number(2)))
    return builder.load(builder.inttoptr(start, INDICES.as_pointer()), align=2)


def _floats(builder: Any, value: Any) -> list[Any]:
    return [builder.bitcast(value, VECTOR)]


def _of_bfloat16(builder: Any, value: Any) -> list[Any]:
    upper = builder.and_(value, ir.Constant(INDICES, [0xFFFF0000] * LANES))
    lower = builder.shl(value, ir.Constant(INDICES, [16] * LANES))
    return [builder.bitcast(lower, VECTOR), builder.bitcast(upper, VECTOR)]


_WIDEN: dict[str, Callable[[Any, Any], list[Any]]] = {"float32": _floats, "bfloat16": _of_bfloat16}


def _transposed(builder: Any, dtype: str, b: Any, rank: Any) -> list[Any]:
    """Return DEPTH vectors of float32; vector k has element k of sixteen rows of B.

    Four bytes of a row are loaded as one lane.
    """
    size = itemsize(dtype)
    units = DEPTH * size // 4  # the number of lanes that are loaded from one row
    part = ir.VectorType(INT, units)

    def load_row(row: int) -> Any:
        place = builder.mul(builder.mul(rank, _number(row)), _number(size))
        pointer = builder.inttoptr(builder.add(b, place), part.as_pointer())
        return builder.load(pointer, align=size)

    def load_lanes(first: int) -> Any:
        """Load parts of some rows as sixteen lanes.

        The rows are `units` apart, so that only exchanges at distances < `units` are left to do.
        """
        parts = [load_row(first + units * n) for n in range(LANES // units)]
        while len(parts) > 1:
            every = range(2 * parts[0].type.count)
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [_lanes(builder, *pair, every) for pair in pairs]
        return parts[0]

    values = [load_lanes(index) for index in range(units)]
    distance = units
    while distance > 1:
        distance //= 2
        # swap the off-diagonal quarters of squares with a side of 2 * distance
        low = [n if not n & distance else n + LANES - distance for n in range(LANES)]
        high = [n + distance if not n & distance else n + LANES for n in range(LANES)]
        for n in (n for n in range(units) if not n & distance):
            pair = values[n], values[n + distance]
            values[n] = _lanes(builder, *pair, low)
            values[n + distance] = _lanes(builder, *pair, high)
    return [wide for value in values for wide in _WIDEN[dtype](builder, value)]


def expanded(groups: int, dtype: str) -> Any:
    """Return an intrinsic that adds B h for DEPTH elements of h to 16 * `groups` columns of sums.

    Its arguments are `(sums, stride, b, rank, h, h_stride, rows, ahead)`. The sums and the h of
    `rows` tokens are `stride` and `h_stride` floats apart. The 16 * `groups` rows of B begin at
    `b`, `rank` elements apart. They are transposed in registers and stay there for all tokens. The
    intrinsic prefetches the bytes from `ahead` on, as many as it reads of B.
    """

    @intrinsic(nothing, long, long, long, long, long, long, long, long)
    def add(
        builder: Any, sums: Any, stride: Any, b: Any, rank: Any, h: Any, h_stride: Any, rows: Any,
        ahead: Any,
    ) -> None:  # fmt: skip
        fetch(builder, ahead, groups * LANES * DEPTH * itemsize(dtype))
        group = builder.mul(rank, _number(LANES * itemsize(dtype)))
        starts = [builder.add(b, builder.mul(group, _number(n))) for n in range(groups)]
        transposed = [_transposed(builder, dtype, start, rank) for start in starts]

        def add_to(first: Any, count: int) -> None:
            tokens = [builder.add(first, _number(row)) for row in range(count)]
            places = [
                at(builder, sums, builder.add(builder.mul(it, stride), _number(LANES * n)), VECTOR)
                for it in tokens
                for n in range(groups)
            ]
            totals = [builder.load(place, align=4) for place in places]
            for k, parts in enumerate(zip(*transposed, strict=True)):
                for row, token in enumerate(tokens):
                    place = builder.add(builder.mul(token, h_stride), _number(k))
                    factor = spread(builder, builder.load(at(builder, h, place, FLOAT)))
                    for n, part in enumerate(parts, start=row * groups):
                        totals[n] = multiply_add(builder, factor, part, totals[n])
            for place, total in zip(places, totals, strict=True):
                builder.store(total, place, align=4)

        def four(index: Any, _: Sequence[Any]) -> list[Any]:
            add_to(builder.mul(index, _number(4)), 4)
            return []

        def one(index: Any, _: Sequence[Any]) -> list[Any]:
            add_to(builder.add(whole, index), 1)
            return []

        whole = builder.and_(rows, _number(-4))
        with builder.if_then(builder.icmp_signed(">", whole, _number(0))):
            repeat(builder, builder.sdiv(whole, _number(4)), [], four)
        with builder.if_then(builder.icmp_signed(">", rows, whole)):
            repeat(builder, builder.sub(rows, whole), [], one)

    return add
