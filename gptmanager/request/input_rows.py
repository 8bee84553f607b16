"""`HostRows`: embeddings, draft logits or biases that a request passes to the executor.

Schedules and recordings contain `HostRows`, but treat them as opaque values with a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TOKEN_BIAS = np.dtype([("token", np.int32), ("bias", np.float32)])


class HostRows:
    """The n rows of the array `numbers`: float32 `[n, width]`, TOKEN_BIAS or `drawn_draft` `[n]`.

    If the rows were read from a recording, `numbers` is None. `count` is n, or 0 if n is unknown.
    Two `HostRows` are equal if their digests are equal.
    """

    __slots__ = ("count", "digest", "numbers")

    def __init__(self, numbers: npt.NDArray[Any] | None, digest: str = "", count: int = 0) -> None:
        self.numbers = numbers
        if numbers is not None:
            count = len(numbers)
            shape = str(numbers.shape).encode()
            digest = hashlib.sha256(shape + numbers.tobytes()).hexdigest()
        self.digest = digest
        self.count = count

    def first(self, count: int) -> HostRows:
        """Return the first `count` rows. Rows without `numbers` are returned as they are."""
        if self.numbers is None or count == self.count:
            return self
        return HostRows(self.numbers[:count])

    def without_numbers(self) -> HostRows:
        """Return a copy that has only the digest and the count, as in a recording."""
        return HostRows(None, self.digest, self.count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostRows) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"HostRows({self.digest[:12]})"


def drawn_draft(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of a draft token with the logits from which it was sampled."""
    return np.dtype([("token", np.int32), ("logits", np.float32, (vocab_size,))])


def token_bias(tokens: Sequence[int] | Array, values: Sequence[float] | Array) -> HostRows | None:
    """Return the rows that add `values` to the logits of `tokens`; None for no tokens."""
    if not len(tokens):
        return None
    numbers = np.empty(len(tokens), dtype=TOKEN_BIAS)
    numbers["token"], numbers["bias"] = tokens, values
    return HostRows(numbers)


def split_bias(bias: HostRows | None) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the tokens, int32 `[n]`, and the values to add to their logits, float32 `[n]`."""
    numbers = np.empty(0, dtype=TOKEN_BIAS)
    if bias is not None and bias.numbers is not None:
        numbers = bias.numbers
    return np.ascontiguousarray(numbers["token"]), np.ascontiguousarray(numbers["bias"])
