"""Copies between pinned memory and a device that take as long as they may.

What travels to the host is not there, and what travels from it is still read, until somebody waits
for an event that was recorded behind the copy.
"""

from __future__ import annotations

import numpy as np
import torch

_NOT_THERE_YET = 0xFB  # in each byte: no number that a step yields


class LateCopies:
    def __init__(self):
        self.count = 0  # the number of enqueued copies
        self._ended = 0
        self._ends = []
        self._pinned = {}  # by where it begins; kept, so that nothing else comes to lie there

    def pin(self, tensor):
        self._pinned[_begin(tensor)] = tensor
        return tensor

    def add(self, to, source, is_there):
        """Enqueue a copy to the device (`is_there`) or from it; False where the host's memory is
        not pinned: torch waits for such a copy.
        """
        if _begin(source if is_there else to) not in self._pinned:
            return False
        host, value = _bytes(source if is_there else to), _bytes(source).copy()
        if is_there:
            to.copy_(source)

            def end():
                same = np.array_equal(host, value)
                assert same, "pinned memory was written to before its copy had run"

        else:
            host.fill(_NOT_THERE_YET)

            def end():
                host[:] = value

        self._ends.append(end)
        self.count += 1
        return True

    def have_ended(self, count):
        return self._ended >= count

    def end(self, count=None):
        """The first `count` copies have run, or all."""
        count = self.count if count is None else count
        while self._ended < count:
            self._ended += 1
            self._ends.pop(0)()


class LateEvent:
    def __init__(self, stream):
        self._stream = stream
        self._mark = 0

    def record(self):
        self._mark = self._stream.mark()

    def synchronize(self):
        self._stream.reach(self._mark)


def _begin(tensor):
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor):
    return tensor.detach().view(-1).view(torch.uint8).numpy()
