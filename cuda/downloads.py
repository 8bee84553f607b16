"""`Arrivals`: tensors of a device on their way to the host.

Nothing waits for them before they are due. Knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gptmanager.cuda.streams import Event, Stream

_NUM_BUFFERS = 4  # more than steps are under way
MOST_BYTES = 1 << 28  # of a tensor brought by pinned memory, which torch does not give back


class Arrival(NamedTuple):
    """Tensors on the host that are to be read once `copied` has come."""

    tensors: tuple[Tensor | None, ...]
    copied: Event


class Arrivals:
    """`num_bytes`: of what a step brings as a rule, for which memory is kept."""

    def __init__(self, stream: Stream, num_bytes: int) -> None:
        self._stream = stream
        self._buffers = [(stream.staging(num_bytes), stream.event()) for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def send(self, tensors: Sequence[Tensor | None]) -> Arrival:
        """Enqueue the ways of the tensors, of 4 bytes an element; None stays None.

        They lie there until so many more have been sent as steps may be under way, and are
        overwritten then. What was brought since the last call arrives with them.
        """
        memory, copied = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        if num_bytes > len(memory):
            memory = self._stream.staging(num_bytes)
        arriving: list[Tensor | None] = []
        start = 0
        for tensor in tensors:
            arriving.append(None)
            if tensor is not None:
                arriving[-1] = _copied(tensor, memory[start : start + tensor.nbytes])
                start += tensor.nbytes
        copied.record()
        return Arrival(tuple(arriving), copied)

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
