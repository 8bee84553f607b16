"""`Uploads`: copies the arrays of a step to the device in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.device.streams import Event, Stream

Array = npt.NDArray[Any]
Upload = Callable[[Sequence[Array]], tuple[Tensor, ...]]  # returns copies of arrays on the device
_ALIGNMENT = 16
_NUM_BUFFERS = 16  # exceeds the copies in flight when the host is one step ahead of the device
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Layout:
    """The byte offsets that pack arrays of the given dtypes and shapes into one tensor."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.spans: list[tuple[int, int]] = []  # first byte and size of each array
        self._kinds = [(array.dtype, array.shape) for array in arrays]
        self.num_bytes = 0
        for array in arrays:
            start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
            self.spans.append((start, array.nbytes))
            self.num_bytes = start + array.nbytes

    def views(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return a view of each array in `memory`, uint8 `[at least num_bytes]`."""
        return tuple(
            memory[start : start + size].view(_DTYPES[dtype]).view(shape)
            for (start, size), (dtype, shape) in zip(self.spans, self._kinds, strict=True)
        )


class Uploads:
    """A ring of pinned host buffers. A buffer is reused once its last copy has completed."""

    def __init__(self, stream: Stream, num_buffers: int = _NUM_BUFFERS) -> None:
        self._stream = stream
        self._buffers = [_Buffer(stream) for _ in range(num_buffers)]
        self._next = 0

    def upload(self, arrays: Sequence[Array]) -> tuple[Tensor, ...]:
        """Return copies of the arrays on the device, in new memory."""
        layout = Layout(arrays)
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._stream.device)
        self.fill(memory, layout, arrays)
        return layout.views(memory)

    def fill(self, memory: Tensor, layout: Layout, arrays: Sequence[Array]) -> None:
        """Enqueue a copy of the arrays to `memory` on the device, at the offsets of `layout`."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
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
        """Wait for the last copy from this buffer; return memory of at least `num_bytes`."""
        self.copied.synchronize()
        if len(self.memory) < num_bytes:
            self.memory = self._stream.staging(2 * num_bytes)
        array: np.ndarray = self.memory.numpy()
        return array
