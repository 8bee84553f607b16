"""What an iteration costs the host of a device, where the device itself costs nothing.

    python tests/benchmarks/measure_device_host_time.py [BATCH_SIZE ...]

Everything runs as on a GPU but for the kernels and the replays of recorded steps, which do nothing.
With `run_ahead` this time is hidden behind the step that runs meanwhile, while that is longer.
"""

from __future__ import annotations

import json
import statistics
import sys

from gptmanager import GptManager, InferenceRequest, KvCacheConfig, ModelType, OptionalParams
from gptmanager.assembly import assemble
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.device.streams import EmulatedStream
from gptmanager.cuda.sampling import sampling
from gptmanager.testing import RecordingCallbacks

MODEL = "examples/tiny_llama"
PROMPT, NEW_TOKENS, BLOCK = [1, 2, 3, 4] * 16, 250, 32


class FreeLauncher(EmulatorLauncher):
    """A GPU of 132 multiprocessors whose kernels take no time."""

    num_multiprocessors = 132

    def kernel(self, program, name, shared_mem=0):
        return lambda grid, block, args, shared_mem=0: None


class FreeStream(EmulatedStream):
    def __init__(self):
        super().__init__(FreeLauncher())

    def capture(self, run):
        return lambda: None, run()


def microseconds(batch_size: int) -> float:
    """The median of iterations in which all requests generate."""
    host = RecordingCallbacks(
        [InferenceRequest.from_tokens(i, PROMPT, NEW_TOKENS) for i in range(batch_size)]
    )
    tokens = batch_size * (len(PROMPT) + NEW_TOKENS + BLOCK)
    options = OptionalParams(
        KvCacheConfig(tokens, tokens_per_block=BLOCK, enable_block_reuse=False),
        device="emulator",
        max_batch_size=batch_size,
        max_num_tokens=tokens,
    )
    with GptManager(
        MODEL,
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=options,
        **host.keywords(),
    ) as manager:
        assert manager.wait_idle(300), manager.exception
    records = map(json.loads, host.statistics)
    return statistics.median(
        record["gptmanager"]["iteration_latency_us"]["total"]
        for record in records
        if record["Generation Requests"] == batch_size
    )


def main(batch_sizes: list[int]) -> None:
    assemble.EmulatedStream = FreeStream
    sampling.sample = lambda launcher, tokens, inputs, *rest, **named: (
        tokens.zero_(),
        inputs.zero_(),
    )
    for batch_size in batch_sizes:
        print(f"{batch_size:5} requests: {microseconds(batch_size):7.0f} us an iteration")


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [1, 32, 256])
