"""`Groups`: rows of a 4-bit matrix, in groups of 32 columns, each group with its own scale.

An element is `scale * (value - 8)`, or `scale * value + minimum` if groups have minima, or
`scale * codebook[value]`. Scales and minima are float16, so that `Groups` can hold the Q4_0, Q4_1
and IQ4_NL blocks of GGUF exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # columns that share a scale
MIDDLE, MOST = 8, 15  # the value of a zero if groups have no minima; the largest value
Codebook = Literal["e2m1", "iq4"]
# What each value stands for: a 4-bit float (E2M1) times two, or a number of llama.cpp's IQ4_NL.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
CODEBOOKS: Mapping[Codebook, Tensor] = {
    "e2m1": torch.tensor(_E2M1, dtype=torch.int8),
    "iq4": torch.tensor(_IQ4, dtype=torch.int8),
}


def codebook_of(kind: str | None) -> Codebook | None:
    """Return the codebook of a kind of 4-bit groups; None for "int4" or another kind."""
    return next((it for it in CODEBOOKS if it == kind), None)


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of 4-bit values with a scale for each group of 32 columns.

    `values` is uint8 `[n, columns]`, each from 0 to 15. `scales` and `minima` are float16
    `[n, groups]`; `minima` may be None, and are None with a `codebook`. The last group of a row may
    have fewer than 32 columns.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None
    codebook: Codebook | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def offsets(self) -> Tensor:
        """The numbers that are added to `scale * value`, float32 `[n, groups]`."""
        return self.scales.float() * -MIDDLE if self.minima is None else self.minima.float()

    def rows(self, rows: slice) -> Groups:
        minima = None if self.minima is None else self.minima[rows]
        return Groups(self.values[rows], self.scales[rows], minima, self.codebook)

    def columns(self, columns: slice) -> Groups | None:
        """Return these columns of each row, or None if the first one does not begin a group."""
        start, stop, _ = columns.indices(self.values.shape[1])
        if start % GROUP:
            return None
        own = slice(start // GROUP, -(-stop // GROUP))
        minima = None if self.minima is None else self.minima[:, own]
        return Groups(self.values[:, start:stop], self.scales[:, own], minima, self.codebook)

    def joined(self, count: int, order: Tensor | None = None) -> Groups:
        """Join adjacent rows, so that `count` longer rows remain; each row has whole groups.

        `order`, int64 `[groups]`, has the index of each group of a longer row.
        """

        def join(given: Tensor, size: int) -> Tensor:
            wide = given.reshape(count, -1, size)
            return (wide if order is None else wide[:, order]).flatten(1)

        minima = None if self.minima is None else join(self.minima, 1)
        return Groups(join(self.values, GROUP), join(self.scales, 1), minima, self.codebook)

    def floats(self) -> Tensor:
        """Return the elements in float32: exact without minima, rounded once with minima."""
        count, scales = self.values.shape[1], self.scales.float().unsqueeze(-1)
        if self.codebook is not None:
            numbers = CODEBOOKS[self.codebook].float()[self.values.int()]
            wide = whole_groups(numbers) * scales
        else:
            wide = whole_groups(self.values.float()) * scales + self.offsets.unsqueeze(-1)
        return wide.flatten(1)[:, :count]


def whole_groups(rows: Tensor) -> Tensor:
    """Return `[n, columns]` as `[n, groups, 32]`, padded with zeros."""
    count = -(-rows.shape[1] // GROUP)
    return F.pad(rows, (0, count * GROUP - rows.shape[1])).view(len(rows), count, GROUP)
