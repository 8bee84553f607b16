"""`ForcedPrefix`: makes an output begin with given tokens.

On a GPU, a CUDA kernel changes the logits. On the CPU, a NumPy function, the kernel's twin, changes
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gptmanager import RawKernelLogitsPostProcessor
from gptmanager.arguments import as_token, at_least
from gptmanager.decoding.processors.raw_kernel import BoundKernel

_SOURCE = """
struct Params { int count; int ids[MAX_TOKENS]; };
static_assert(sizeof(Params) == PARAMS_SIZE, "sizeof(Params) differs from the dtype's item size");

extern "C" __global__ void forced_prefix(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    float* row = logits + (long long)rows[blockIdx.x] * vocab_size;
    const Params& mine = params[slots[blockIdx.x]];
    int generated = lengths[blockIdx.x] - prompt_lengths[blockIdx.x];
    if (generated >= mine.count) return;
    for (int token = threadIdx.x; token < vocab_size; token += blockDim.x)
        row[token] = token == mine.ids[generated] ? 0.0f : __uint_as_float(0xff800000u);
}
"""


class ForcedPrefix(RawKernelLogitsPostProcessor):
    """Makes the output of a request begin with the given tokens."""

    def __init__(self, max_tokens: int = 64) -> None:
        at_least(1, "max_tokens", max_tokens)
        fields = [("count", np.int32), ("ids", np.int32, (max_tokens,))]
        options = (f"-DMAX_TOKENS={max_tokens}",)
        super().__init__(_SOURCE, "forced_prefix", fields, options=options, twin=_force)
        self.max_tokens = max_tokens

    def bind(self, token_ids: Sequence[int]) -> BoundKernel:  # type: ignore[override]
        """Return the processor of a request.

        Raise ValueError for more than `max_tokens` ids or an id outside 0..2**31-1, and TypeError
        for an id that is not an integer.
        """
        if len(token_ids) > self.max_tokens:
            raise ValueError(
                f"token_ids has {len(token_ids)} tokens, more than max_tokens = {self.max_tokens}"
            )
        ids = np.zeros(self.max_tokens, dtype=np.int32)
        ids[: len(token_ids)] = [as_token(token) for token in token_ids]
        return super().bind(count=len(token_ids), ids=ids)


def _force(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    params: npt.NDArray[np.void],
    lengths: npt.NDArray[np.int32],
    prompt_lengths: npt.NDArray[np.int32],
    *_: Any,
) -> None:
    mine, generated = params[slots], lengths - prompt_lengths
    for row, one, index in zip(rows, mine, generated, strict=True):
        if index < one["count"]:
            logits[row] = -np.inf
            if one["ids"][index] < logits.shape[1]:
                logits[row, one["ids"][index]] = 0.0
