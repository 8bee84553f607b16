"""Dot products of bfloat16 pairs: an instruction of some processors, and on which it is fast.

It adds both products of a pair to the sum of its lane, and takes what is below 2^-126 for zero.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]

from gptmanager.kernels.simd.lanes import LANES, VECTOR, call


class _BFloat(ir.Type):  # type: ignore[misc]
    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def add_pairs(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """`total` and both products of each lane; `left` and `right` of any type of 64 bytes."""
    pairs = (builder.bitcast(value, _PAIRS) for value in (left, right))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, total, *pairs)


def has_pairs() -> bool:
    """Whether this processor has the instruction."""
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def is_amd() -> bool:
    """Whether the processor is one of AMD's, from Zen on."""
    return bool(binding.get_host_cpu_name().startswith("znver"))


@functools.cache
def has_fast_pairs() -> bool:
    """Whether dot products of bfloat16 pairs are twice as fast as multiply-adds of what is widened:
    on AMD's processors. On Intel's, which have a matrix unit, they are slower.
    """
    return has_pairs() and is_amd()
