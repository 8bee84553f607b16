"""Random numbers that depend on (seed, position, draw), never on slot, batch or time.

The generator is Philox4x32-10 (Salmon et al. 2011) with key = seed, counter = (position, draw, 0).
Its 32-bit words are converted to numbers in [0, 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

LOW_32 = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
_FACTOR_0, _FACTOR_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP_0, _STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_DROPPED = np.uint64(11)  # bits dropped from 64, because a float64 holds 53


@register_jitable
def rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Return Philox4x32-10 of the counter (c0, ..., c3) and the key (k0, k1).

    Each word is a 32-bit value in a uint64: a NumPy array or, in compiled code, a scalar.
    """
    for _ in range(10):
        first, second = c0 * _FACTOR_0, c2 * _FACTOR_1
        c0, c1 = (second >> HALF) ^ c1 ^ k0, second & LOW_32
        c2, c3 = (first >> HALF) ^ c3 ^ k1, first & LOW_32
        k0, k1 = (k0 + _STEP_0) & LOW_32, (k1 + _STEP_1) & LOW_32
    return c0, c1, c2, c3


@register_jitable
def uniform(seed: Any, position: Any, draw: int = 0) -> Any:
    """Return a number in [0, 1) of 53 random bits, which depends on (seed, position, draw) only.

    `seed` is uint64, `position` is not negative; both may be arrays. `draw` (0, 1, ...)
    selects one of the random numbers for a position. The 53 bits are the upper bits of the
    generator's first two words.
    """
    counter, zero = np.uint64(position), np.uint64(0)
    words = rounds(
        counter & LOW_32, counter >> HALF, np.uint64(draw), zero, seed & LOW_32, seed >> HALF
    )
    return ((words[0] << HALF | words[1]) >> _DROPPED) * 2.0**-53


def derive_seed(seed: int, number: int) -> int:
    """Return the `number`-th seed derived from `seed`: SplitMix64 (Steele, Lea, Flood 2014)."""
    mask = 2**64 - 1
    x = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
