"""Emits code that replaces 64 bytes, each from 0 to 15, by the bytes of a table."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.simd.lanes import INT, LANES, call

COUNT = 4 * LANES
_BYTE = ir.IntType(8)
BYTES = ir.VectorType(_BYTE, COUNT)
_TABLE = ir.VectorType(_BYTE, 16)


@functools.cache
def _shuffle() -> tuple[str, int]:
    """Return LLVM's name of the widest byte shuffle that the processor has, and its bytes."""
    features = cpu_features()
    if features.get("avx512bw"):
        return "llvm.x86.avx512.pshuf.b.512", 64
    if features.get("avx2"):
        return "llvm.x86.avx2.pshuf.b", 32
    return ("llvm.x86.ssse3.pshuf.b.128", 16) if features.get("ssse3") else ("", 0)


def load_table(builder: Any, address: Any) -> Any:
    """Load a table of sixteen bytes, repeated to 64."""
    table = builder.load(builder.inttoptr(address, _TABLE.as_pointer()), align=1)
    return _picked(builder, table, [place % 16 for place in range(COUNT)])


def looked_up(builder: Any, table: Any, places: Any) -> Any:
    """Return the bytes of a `load_table` at 64 places, in vectors of any type of 64 bytes."""
    kind, places = places.type, builder.bitcast(places, BYTES)
    name, size = _shuffle()
    if not name:
        return builder.bitcast(_selected(builder, table, places), kind)
    parts = []
    for first in range(0, COUNT, size):
        own = [_picked(builder, it, range(first, first + size)) for it in (table, places)]
        parts.append(call(builder, name, ir.VectorType(_BYTE, size), *own))
    while len(parts) > 1:
        parts = [_joined(builder, *parts[n : n + 2]) for n in range(0, len(parts), 2)]
    return builder.bitcast(parts[0], kind)


def _picked(builder: Any, vector: Any, order: Any) -> Any:
    places = list(order)
    mask = ir.Constant(ir.VectorType(INT, len(places)), places)
    return builder.shuffle_vector(vector, vector, mask)


def _joined(builder: Any, first: Any, second: Any) -> Any:
    count = 2 * first.type.count
    mask = ir.Constant(ir.VectorType(INT, count), list(range(count)))
    return builder.shuffle_vector(first, second, mask)


def _selected(builder: Any, table: Any, places: Any) -> Any:
    """Do as `looked_up` without a byte shuffle: each bit of a place halves the candidates."""
    found = [_picked(builder, table, [number] * COUNT) for number in range(16)]
    none = ir.Constant(BYTES, None)
    for bit in range(4):
        mask = ir.Constant(BYTES, [1 << bit] * COUNT)
        is_set = builder.icmp_unsigned("!=", builder.and_(places, mask), none)
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [builder.select(is_set, second, first) for first, second in pairs]
    return found[0]
