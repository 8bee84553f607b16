"""`Downloads`: asynchronous copies of tensors from the device to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gptmanager.cuda.device.streams import Event, Stream

_NUM_BUFFERS = 4  # more than the steps in flight
MOST_BYTES = 1 << 28  # the most bytes that `fetch` copies to pinned memory, which torch never frees


class Download(NamedTuple):
    """Tensors in pinned memory, which may be read after the event `copied`."""

    tensors: tuple[Tensor | None, ...]
    copied: Event


class Downloads:
    """A ring of pinned buffers that tensors are copied to.

    Each buffer has `num_bytes` bytes, which should be enough for most steps. A call of `send` with
    more bytes allocates a new buffer.
    """

    def __init__(self, stream: Stream, num_bytes: int) -> None:
        self._stream = stream
        self._buffers = [(stream.staging(num_bytes), stream.event()) for _ in range(_NUM_BUFFERS)]
        self._next = 0

    def send(self, tensors: Sequence[Tensor | None]) -> Download:
        """Enqueue copies of `tensors`, which must have 4 bytes per element; None stays None.

        The memory of the copies is reused after `_NUM_BUFFERS` calls. The copies that `fetch` has
        enqueued before this call are also complete after the event `copied`.
        """
        memory, copied = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        if num_bytes > len(memory):
            memory = self._stream.staging(num_bytes)
        copies: list[Tensor | None] = []
        start = 0
        for tensor in tensors:
            copies.append(None)
            if tensor is not None:
                copies[-1] = _copied(tensor, memory[start : start + tensor.nbytes])
                start += tensor.nbytes
        copied.record()
        return Download(tuple(copies), copied)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy in new pinned memory, complete after the event `copied` of the next `send`.

        A tensor of more than `MOST_BYTES` is copied to pageable memory before this method returns.
        """
        if tensor.nbytes > MOST_BYTES:
            return tensor.to("cpu", copy=True)
        return _copied(tensor, self._stream.staging(tensor.nbytes))

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory, _ in self._buffers)


def _copied(tensor: Tensor, memory: Tensor) -> Tensor:
    own = memory.view(tensor.dtype).view(tensor.shape)
    return own.copy_(tensor, non_blocking=True)
