"""`Watermark`: marks sampled text, and detects the mark.

On a GPU, a CUDA kernel marks the text. On the CPU, the NumPy function `_mark` does the same.

After each token, a keyed hash selects the green part of the vocabulary. Green tokens become
slightly more likely. With the key, they can be counted. The method is from Kirchenbauer et al.,
"A Watermark for Large Language Models" (2023), with a hash of the last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gptmanager import RawKernelLogitsPostProcessor
from gptmanager.arguments import at_least, number
from gptmanager.decoding.processors.raw_kernel import BoundKernel
from gptmanager.errors import ConfigError

Words = npt.NDArray[np.uint32]

_SOURCE = """
struct Params { unsigned key, threshold; float delta; };
static_assert(sizeof(Params) == PARAMS_SIZE, "sizeof(Params) differs from the dtype's item size");

__device__ unsigned mixed(unsigned x) {
    x ^= x >> 16; x *= 0x7feb352du;
    x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

extern "C" __global__ void watermark(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    float* row = logits + (long long)rows[blockIdx.x] * vocab_size;
    const Params& mine = params[slots[blockIdx.x]];
    const int* history = tokens + (long long)slots[blockIdx.x] * max_seq_len;
    unsigned seed = mixed(mine.key ^ mixed((unsigned)history[lengths[blockIdx.x] - 1]));
    for (int token = threadIdx.x; token < vocab_size; token += blockDim.x)
        if (mixed(seed ^ (unsigned)token) < mine.threshold) row[token] += mine.delta;
}
"""


_MAX_DELTA = float(np.finfo(np.float32).max)


class Watermark(RawKernelLogitsPostProcessor):
    """Adds `delta` to the logits of the green tokens, a fraction `gamma` of the vocabulary.

    `key` is a secret of 32 bits. The mark is weaker in greedy text than in sampled text: `delta`
    rarely changes which token is the likeliest.
    """

    def __init__(self, key: int, gamma: float = 0.25, delta: float = 2.0) -> None:
        at_least(0, "key", key, 2**32 - 1)
        if not 0 < number(0, "gamma", gamma, 1) < 1:
            raise ConfigError(f"gamma = {gamma} must be between 0 and 1")
        number(-_MAX_DELTA, "delta", delta, _MAX_DELTA)
        fields = [("key", np.uint32), ("threshold", np.uint32), ("delta", np.float32)]
        super().__init__(_SOURCE, "watermark", fields, twin=_mark)
        self.key, self.gamma, self.delta = key, gamma, delta
        self._threshold = int(gamma * 2**32)

    def bind(self) -> BoundKernel:  # type: ignore[override]
        return super().bind(key=self.key, threshold=self._threshold, delta=self.delta)

    def z_score(self, tokens: Sequence[int]) -> float:
        """Return how many standard deviations the number of green tokens is above its mean.

        The mean and the deviation are those of text without the watermark. A score above 4 is very
        unlikely for such text. The first token is not counted, because it is only the seed for the
        second. The score is 0 for fewer than two tokens.
        """
        ids = np.asarray(tokens, dtype=np.uint32)
        hashes = _mixed(_seeds(np.uint32(self.key), ids[:-1]) ^ ids[1:])
        count = len(hashes)
        if not count:
            return 0.0
        excess = int((hashes < self._threshold).sum()) - self.gamma * count
        return excess / math.sqrt(count * self.gamma * (1 - self.gamma))


def _mixed(x: Words) -> Words:
    """Hash 32-bit words by a function from Wellons, "Prospecting for Hash Functions" (2018)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _seeds(key: np.uint32 | Words, last: Words) -> Words:
    return _mixed(key ^ _mixed(last))


def _mark(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    params: npt.NDArray[np.void],
    lengths: npt.NDArray[np.int32],
    prompt_lengths: npt.NDArray[np.int32],
    tokens: npt.NDArray[np.int32],
    *sizes: Any,
) -> None:
    mine = params[slots]
    seeds = _seeds(mine["key"], tokens[slots, lengths - 1].astype(np.uint32))
    vocabulary = np.arange(logits.shape[1], dtype=np.uint32)
    for row, seed, one in zip(rows, seeds, mine, strict=True):
        logits[row, _mixed(seed ^ vocabulary) < one["threshold"]] += one["delta"]
