"""`Uploads`: arrays of a step brought to the device in one copy.

Knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.device.streams import Event, Stream

Array = npt.NDArray[Any]
Upload = Callable[[Sequence[Array]], tuple[Tensor, ...]]  # the same arrays on the device
_ALIGNMENT = 16
_NUM_BUFFERS = 16  # more than copies are under way when the loop is ahead of its device by a step
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Layout:
    """Where arrays of these dtypes and shapes lie in one piece of memory."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.spans: list[tuple[int, int]] = []  # of each array: its first byte, and how many
        self._kinds = [(array.dtype, array.shape) for array in arrays]
        self.num_bytes = 0
        for array in arrays:
            start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
            self.spans.append((start, array.nbytes))
            self.num_bytes = start + array.nbytes

    def views(self, memory: Tensor) -> tuple[Tensor, ...]:
        """The arrays as tensors in `memory`, uint8 `[at least num_bytes]`."""
        return tuple(
            memory[start : start + size].view(_DTYPES[dtype]).view(shape)
            for (start, size), (dtype, shape) in zip(self.spans, self._kinds, strict=True)
        )


class Uploads:
    """Pinned memory, used in turns: a buffer is written to again when its copy has run."""

    def __init__(self, stream: Stream, num_buffers: int = _NUM_BUFFERS) -> None:
        self._stream = stream
        self._buffers = [_Buffer(stream) for _ in range(num_buffers)]
        self._turn = 0

    def upload(self, arrays: Sequence[Array]) -> tuple[Tensor, ...]:
        """The arrays on the device, in memory of their own."""
        layout = Layout(arrays)
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._stream.device)
        self.fill(memory, layout, arrays)
        return layout.views(memory)

    def fill(self, memory: Tensor, layout: Layout, arrays: Sequence[Array]) -> None:
        """Enqueue a copy of the arrays to `memory` of the device, where they lie by `layout`."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        bytes_of = buffer.reserve(layout.num_bytes)
        for (start, size), array in zip(layout.spans, arrays, strict=True):
            if size:
                piece = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                bytes_of[start : start + size] = piece
        memory[: layout.num_bytes].copy_(buffer.memory[: layout.num_bytes], non_blocking=True)
        buffer.copied.record()

    @property
    def nbytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers)


class _Buffer:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.memory = stream.staging(1 << 16)
        self.copied: Event = stream.event()

    def reserve(self, num_bytes: int) -> np.ndarray:
        """The memory as an array, at least so large, when nothing reads it any more."""
        self.copied.synchronize()
        if len(self.memory) < num_bytes:
            self.memory = self._stream.staging(2 * num_bytes)
        array: np.ndarray = self.memory.numpy()
        return array
