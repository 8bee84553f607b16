"""`CapturedSteps`: the CUDA graphs of one kind of step, with and without adapters.

`step_shapes` returns the shapes for which steps with contexts are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.cuda.device.graphs import Arrays, StepGraphs, Tensors
from gptmanager.cuda.device.streams import Stream
from gptmanager.cuda.device.uploads import Array, Uploads
from gptmanager.executor.packed_rows import StepShape

Step = Callable[[Tensors, Tensor | None], Tensor]  # called with the inputs and the adapter slots
# Maximum number of rows with more than one token in a captured step. Each of these rows, even if it
# has no tokens, adds a thread block of context attention per KV head.
_LONG_ROWS = 16


def step_shapes(sizes: Sequence[int], max_rows: int) -> tuple[StepShape, ...]:
    """Return a shape per size in tokens, with up to `max_rows` long and `max_rows` single rows."""
    long_rows = min(max_rows, _LONG_ROWS)
    return tuple(StepShape(it, long_rows, *[min(max_rows, it)] * 2) for it in sizes)


class CapturedSteps:
    """Two captured steps for each of `sizes` (in tokens): one without and one with adapters."""

    def __init__(self, stream: Stream, uploads: Uploads, sizes: Sequence[int]) -> None:
        self._plain, self._adapted = (StepGraphs(stream, uploads, sizes) for _ in range(2))

    def record(
        self,
        arrays: Callable[[int], Arrays],
        step: Step,
        has_adapters: bool,
        on_progress: ProgressCallback | None,
        what: str,
    ) -> None:
        """Capture `step` for each size; see `StepGraphs.record`, also for `what`."""
        self._plain.record(arrays, lambda tensors: step(tensors, None), on_progress, what)
        if has_adapters:
            self._adapted.record(
                lambda size: (np.full(size, -1, dtype=np.int32), *arrays(size)),
                lambda tensors: step(tensors[1:], tensors[0]),
                on_progress,
                f"{what} with adapters",
            )

    def size_for(self, num_tokens: int) -> int | None:
        """Return the smallest captured size of at least `num_tokens`, or None if there is none."""
        return self._plain.size_for(num_tokens)

    def run(self, size: int, arrays: Arrays, slots: Array | None) -> tuple[Tensor, Tensors]:
        """Replay a step. Return its result and its arrays on the device, valid until the next run.

        `slots` is int32, the adapter slot of each token, or None if no token has an adapter.
        """
        if slots is None:
            return self._plain.run(size, arrays)
        result, tensors = self._adapted.run(size, (slots, *arrays))
        return result, tensors[1:]
