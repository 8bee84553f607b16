"""The bfloat16 pair instruction (AVX512_BF16) of some processors, and where it is fast.

In each lane, the instruction adds the dot product of two pairs to a float32 sum. Subnormals
(magnitude below 2^-126) count as zero.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]

from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.simd.lanes import LANES, VECTOR, call


class _BFloat(ir.Type):  # type: ignore[misc]
    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def add_pairs(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Add the dot product of the pairs in each lane to `total`, and return the sum.

    `left` and `right` may have any vector type of 64 bytes.
    """
    pairs = (builder.bitcast(value, _PAIRS) for value in (left, right))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, total, *pairs)


def has_pairs() -> bool:
    """Return whether this processor has the instruction."""
    return bool(cpu_features().get("avx512bf16"))


def is_amd() -> bool:
    """Return whether the processor is one of AMD's, from Zen on."""
    return bool(binding.get_host_cpu_name().startswith("znver"))


@functools.cache
def has_fast_pairs() -> bool:
    """Return whether the pair instruction is faster than multiply-adds of widened values.

    In matmuls of 16 and more rows, the instruction took half the time on an AMD EPYC (Zen 4). On
    Intel Xeons, where one instruction takes two cycles, it was not faster.
    """
    return has_pairs() and is_amd()
