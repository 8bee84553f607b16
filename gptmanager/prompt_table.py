"""`PromptTable`: a request's own embeddings, for the token ids behind the vocabulary (p-tuning).

It travels from admission to the executor in plain sight of schedules and recordings, which know it
by its digest only. Decides when two are the same; knows nothing of models.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float32]


class PromptTable:
    """Row i of `embeddings` float32 `[n, hidden]` stands for token id vocab_size + i.

    Equal to one that holds the same. `embeddings` None: read from a recording.
    """

    __slots__ = ("digest", "embeddings")

    def __init__(self, embeddings: Table | None, digest: str = "") -> None:
        self.embeddings = embeddings
        if embeddings is not None:
            shape = str(embeddings.shape).encode()
            digest = hashlib.sha256(shape + embeddings.tobytes()).hexdigest()
        self.digest = digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptTable) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"PromptTable({self.digest[:12]})"
