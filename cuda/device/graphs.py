"""`GenerationGraphs`: generation steps recorded for a ladder of batch sizes, and run again.

Decides which recording serves how many rows. Knows nothing of what a step does: it is a function of
tensors, and the tensors of a recording stay where they are.
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


@dataclass(frozen=True, eq=False)
class _Graph:
    memory: Tensor  # the inputs
    layout: Layout
    inputs: Tensors  # in that memory
    replay: Callable[[], None]
    result: Tensor


class GenerationGraphs:
    """`sizes`: numbers of rows, for which the arrays of a step are always equally large."""

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
        """Record `step` for each size, of which `inputs` gives arrays that touch nothing.

        `on_progress`: is told `what`, how many are recorded, and how many will be.
        """
        sizes = self._sizes[::-1]  # the largest first: the others find its memory
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

    def size_for(self, num_rows: int) -> int | None:
        """The smallest recorded size of at least so many rows."""
        index = bisect_left(self._sizes, num_rows)
        size = self._sizes[index] if index < len(self._sizes) else None
        return size if size in self._graphs else None

    def run(self, size: int, arrays: Arrays) -> tuple[Tensor, Tensors]:
        """The result for arrays of that size, and these on the device; both until the next run."""
        graph = self._graphs[size]
        self._uploads.fill(graph.memory, graph.layout, arrays)
        graph.replay()
        return graph.result, graph.inputs


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8 and every eighth from there: so few rows are padding."""
    return (1, 2, 4, *range(8, most + 8, 8))
