"""`HostRows`: rows of numbers that a request brought for the executor: embeddings, draft logits.

They travel from admission to the executor in plain sight of schedules and recordings, which know
them by their digest only. Decides when two are the same; knows nothing of what they mean.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


class HostRows:
    """`numbers` float32 `[n, width]`; None: read from a recording.

    Equal to one that holds the same.
    """

    __slots__ = ("digest", "numbers")

    def __init__(self, numbers: npt.NDArray[np.float32] | None, digest: str = "") -> None:
        self.numbers = numbers
        if numbers is not None:
            shape = str(numbers.shape).encode()
            digest = hashlib.sha256(shape + numbers.tobytes()).hexdigest()
        self.digest = digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostRows) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"HostRows({self.digest[:12]})"
