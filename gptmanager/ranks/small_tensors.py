"""`SmallTensors`: an all-gather of tensors of at most 64 KiB, over direct connections.

In a step of few tokens, latency dominates the time of an all-reduce. Here the computing thread
itself sends and receives. Gloo hands the data to its own threads, and takes five times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed
from torch import Tensor

from gptmanager.errors import RankError
from gptmanager.ranks.frames import Frames
from gptmanager.ranks.links import Links
from gptmanager.ranks.meeting import Channel, call, meet

dist: Any = torch.distributed  # its type stubs are incomplete

MOST_BYTES = 1 << 16  # fits into the buffers of a connection, so that no rank waits to send
_KIND = 0


class SmallTensors:
    """The connections of part `part` of a stage to the other parts, the keys of `others`."""

    def __init__(self, part: int, others: Mapping[int, Frames], links: Links) -> None:
        self._part, self._others, self._links = part, others, links

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all parts, ordered by part. Raise RankError if a rank has failed.

        The tensors of all parts must be on the CPU, have at most MOST_BYTES, and be equal in shape
        and dtype.
        """
        own = tensor.contiguous()
        data = own.view(-1).view(torch.uint8).numpy().data
        parts: dict[int, Tensor] = {self._part: own}
        with self._links.waiting("a sum"):
            for frames in self._others.values():
                frames.send(_KIND, data)
            for part, frames in self._others.items():
                frame = frames.receive()
                assert frame is not None
                values = torch.frombuffer(bytearray(frame.payload), dtype=own.dtype)
                parts[part] = values.view(own.shape)
        return [parts[part] for part in sorted(parts)]


def connect_parts(
    store: Any, part: int, size: int, links: Links, boot_s: float, *, prefix: str
) -> SmallTensors:
    """Connect this part of a stage with each other part; of two parts, the lower one listens.

    All `size` parts of the stage call this at the same time. Their keys in `store` begin with
    `prefix`.
    Raise RankError if a part does not connect within `boot_s` seconds.
    """
    others: dict[int, Frames] = {}
    for first in range(size - 1):
        own = dist.PrefixStore(f"{prefix}/part-{first}", store)
        if part == first:
            own.set("address", links.address)
            found, blame = meet(own, links.address, size - first, boot_s)
        elif part > first:
            found, blame = call(own, own.get("address").decode(), part - first, boot_s), None
        else:
            continue
        for (number, channel), connection in found.items():
            if channel is Channel.WATCH:
                connection.close()
            else:
                others[first + number] = links.frames(connection)
        links.check()
        if blame is not None:
            raise RankError(f"part {first + blame[0]} of a stage {blame[1]}")
    return SmallTensors(part, others, links)
