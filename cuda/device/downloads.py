"""`Downloads`: tensors of a device on their way to the CPU.

Nothing waits for them before they are due. Knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gptmanager.cuda.device.streams import Event, Stream

_NUM_BUFFERS = 4  # more than steps are under way
MOST_BYTES = 1 << 28  # of a tensor brought by pinned memory, which torch does not give back


class Download(NamedTuple):
    """Tensors in pinned memory, which may be read when `copied` has come."""

    tensors: tuple[Tensor | None, ...]
    copied: Event


class Downloads:
    """`num_bytes`: of what a step brings as a rule, for which memory is kept."""

    def __init__(self, stream: Stream, num_bytes: int) -> None:
        self._stream = stream
        self._buffers = [(stream.staging(num_bytes), stream.event()) for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def send(self, tensors: Sequence[Tensor | None]) -> Download:
        """Enqueue copies of the tensors, of 4 bytes an element; None stays None.

        The memory is written to again after as many calls as steps may be under way. What `bring`
        has enqueued since the last call is there with them.
        """
        memory, copied = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
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

    def bring(self, tensor: Tensor) -> Tensor:
        """The tensor in memory of its own, there with the next `send`; a huge one at once."""
        if tensor.nbytes > MOST_BYTES:
            return tensor.to("cpu", copy=True)
        return _copied(tensor, self._stream.staging(tensor.nbytes))

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory, _ in self._buffers)


def _copied(tensor: Tensor, memory: Tensor) -> Tensor:
    own = memory.view(tensor.dtype).view(tensor.shape)
    return own.copy_(tensor, non_blocking=True)
