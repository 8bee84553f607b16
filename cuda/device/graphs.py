"""`StepGraphs`: steps captured as CUDA graphs for several sizes.

A step is any function of tensors. The tensors of a graph keep their addresses. `ladder` and
`token_ladder` return the sizes to capture.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.cuda.device.streams import Stream
from gptmanager.cuda.device.uploads import Array, Layout, Uploads

Arrays = Sequence[Array]
Tensors = tuple[Tensor, ...]

# The CPU launches a step of some 300 kernels in about 3 ms. In this time a fast GPU reads this many
# bytes, or computes this many 16-bit operations.
_READ, _COMPUTED = 10e9, 1.2e12


@dataclass(frozen=True, eq=False)
class _Graph:
    memory: Tensor  # the bytes of all inputs
    layout: Layout
    inputs: Tensors  # views of `memory`
    replay: Callable[[], None]
    result: Tensor


class StepGraphs:
    """A CUDA graph for each of `sizes`, the numbers of tokens for which steps are captured."""

    def __init__(self, stream: Stream, uploads: Uploads, sizes: Sequence[int]) -> None:
        self._stream = stream
        self._uploads = uploads
        self._sizes = sorted(sizes)
        self._graphs: dict[int, _Graph] = {}

    def record(
        self,
        inputs: Callable[[int], Arrays],
        step: Callable[[Tensors], Tensor],
        on_progress: ProgressCallback | None = None,
        what: str = "CUDA graphs",
    ) -> None:
        """Capture `step` for each size.

        Capturing also runs the step. So with the arrays that `inputs(size)` returns, the step must
        have no lasting effect. After each graph, `on_progress` is called with `what`, the number of
        graphs captured so far, and the number of all graphs.
        """
        sizes = self._sizes[::-1]  # the largest first: the other graphs reuse the same memory
        for number, size in enumerate(sizes, start=1):
            arrays = inputs(size)
            layout = Layout(arrays)
            memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._stream.device)
            self._uploads.fill(memory, layout, arrays)
            views = layout.views(memory)
            replay, result = self._stream.capture(functools.partial(step, views))
            self._graphs[size] = _Graph(memory, layout, views, replay, result)
            if on_progress is not None:
                on_progress(what, number, len(sizes))

    def size_for(self, num_tokens: int) -> int | None:
        """Return the smallest of `sizes` that is at least `num_tokens`.

        The result is None if all sizes are smaller, or if nothing is captured.
        """
        index = bisect_left(self._sizes, num_tokens)
        size = self._sizes[index] if index < len(self._sizes) else None
        return size if size in self._graphs else None

    def run(self, size: int, arrays: Arrays) -> tuple[Tensor, Tensors]:
        """Replay the graph of `size` with `arrays`; return the result and the arrays on the device.

        The result and the arrays on the device are valid until the next run.
        """
        graph = self._graphs[size]
        self._uploads.fill(graph.memory, graph.layout, arrays)
        graph.replay()
        return graph.result, graph.inputs


def ladder(most: int) -> tuple[int, ...]:
    """Return the sizes 1, 2, 4, 8, 16, 24, ... up to the first that is at least `most`."""
    sizes = (1, 2, 4, *range(8, most + 8, 8))
    return tuple(size for below, size in zip((0, *sizes), sizes, strict=False) if below < most)


def token_ladder(sizes: Sequence[int], most: int, model_bytes: int) -> tuple[int, ...]:
    """Return the sizes, among `sizes`, for which to capture steps that process contexts.

    `sizes` are numbers of tokens, in ascending order. Sizes after the first that is at least `most`
    are left out. Sizes for which the GPU would need longer for a step than the CPU needs to launch
    it are also left out, because a graph would not make these steps faster. The estimate for the
    GPU: it reads the model's bytes once, and computes one operation for each byte and token.
    """
    needed = (size for below, size in zip((0, *sizes), sizes, strict=False) if below < most)
    if model_bytes > _READ:
        return ()
    return tuple(size for size in needed if size * model_bytes <= _COMPUTED)
