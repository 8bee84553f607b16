"""`TemperatureSchedule`: changes the temperature during a request.

A CUDA kernel does this on a GPU, and a NumPy function, its twin, on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gptmanager import RawKernelLogitsPostProcessor
from gptmanager.decoding.processors.raw_kernel import BoundKernel

_SOURCE = """
struct Params { float start, end; int steps; };
static_assert(sizeof(Params) == PARAMS_SIZE, "sizeof(Params) differs from the dtype's item size");

extern "C" __global__ void temperature_schedule(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    float* row = logits + (long long)rows[blockIdx.x] * vocab_size;
    const Params& mine = params[slots[blockIdx.x]];
    int generated = lengths[blockIdx.x] - prompt_lengths[blockIdx.x];
    float done = generated < mine.steps ? (float)generated / mine.steps : 1.0f;
    float temperature = mine.start + (mine.end - mine.start) * done;
    for (int token = threadIdx.x; token < vocab_size; token += blockDim.x)
        row[token] /= temperature;
}
"""


class TemperatureSchedule(RawKernelLogitsPostProcessor):
    """Changes the temperature linearly over the first tokens, and then keeps it constant.

    A request without sampling parameters is greedy, so dividing its logits changes nothing. Set
    `temperature=1.0` on the request, so that it samples.
    """

    def __init__(self) -> None:
        fields = [("start", np.float32), ("end", np.float32), ("steps", np.int32)]
        super().__init__(_SOURCE, "temperature_schedule", fields, twin=_divide)

    def bind(  # type: ignore[override]
        self, start: float, end: float, steps: int
    ) -> BoundKernel:
        """Return the processor of a request.

        The temperature is `start` for the first token, and `end` after `steps` tokens. Raise
        ValueError for a temperature outside 1e-30 to 1e30, and for less than one step.
        """
        for name, value in (("start", start), ("end", end)):
            if not 1e-30 <= value <= 1e30:  # logits must stay finite
                raise ValueError(f"{name} = {value} must be from 1e-30 to 1e30")
        if not steps > 0:
            raise ValueError(f"steps = {steps} must be above 0")
        return super().bind(start=start, end=end, steps=steps)


def _divide(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    params: npt.NDArray[np.void],
    lengths: npt.NDArray[np.int32],
    prompt_lengths: npt.NDArray[np.int32],
    *_: Any,
) -> None:
    mine = params[slots]
    generated = (lengths - prompt_lengths).astype(np.float32)
    done = np.minimum(generated / mine["steps"].astype(np.float32), np.float32(1))
    logits[rows] /= (mine["start"] + (mine["end"] - mine["start"]) * done)[:, None]
