"""`Groups`: rows of a 4-bit matrix, in groups of 32 columns, each group with its own scale.

An element is `scale * (value - 8)`, or `scale * value + minimum` if groups have minima. Scales and
minima are float16, so that `Groups` can hold the Q4_0 and Q4_1 blocks of GGUF exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # columns that share a scale
MIDDLE, MOST = 8, 15  # the value of a zero if groups have no minima; the largest value


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of 4-bit values with a scale for each group of 32 columns.

    `values` is uint8 `[n, columns]`, each from 0 to 15. `scales` and `minima` are float16
    `[n, groups]`; `minima` may be None. The last group of a row may have fewer than 32 columns.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def offsets(self) -> Tensor:
        """The numbers that are added to `scale * value`, float32 `[n, groups]`."""
        return self.scales.float() * -MIDDLE if self.minima is None else self.minima.float()

    def rows(self, rows: slice) -> Groups:
        minima = None if self.minima is None else self.minima[rows]
        return Groups(self.values[rows], self.scales[rows], minima)

    def columns(self, columns: slice) -> Groups | None:
        """Return these columns of each row, or None if the first one does not begin a group."""
        start, stop, _ = columns.indices(self.values.shape[1])
        if start % GROUP:
            return None
        own = slice(start // GROUP, -(-stop // GROUP))
        minima = None if self.minima is None else self.minima[:, own]
        return Groups(self.values[:, start:stop], self.scales[:, own], minima)

    def joined(self, count: int, order: Tensor | None = None) -> Groups:
        """Join adjacent rows, so that `count` longer rows remain; each row has whole groups.

        `order`, int64 `[groups]`, has the index of each group of a longer row.
        """

        def join(given: Tensor, size: int) -> Tensor:
            wide = given.reshape(count, -1, size)
            return (wide if order is None else wide[:, order]).flatten(1)

        minima = None if self.minima is None else join(self.minima, 1)
        return Groups(join(self.values, GROUP), join(self.scales, 1), minima)

    def floats(self) -> Tensor:
        """Return the elements in float32: exact without minima, rounded once with minima."""
        count = self.values.shape[1]
        wide = whole_groups(self.values.float())
        wide = wide * self.scales.float().unsqueeze(-1) + self.offsets.unsqueeze(-1)
        return wide.flatten(1)[:, :count]


def whole_groups(rows: Tensor) -> Tensor:
    """Return `[n, columns]` as `[n, groups, 32]`, padded with zeros."""
    count = -(-rows.shape[1] // GROUP)
    return F.pad(rows, (0, count * GROUP - rows.shape[1])).view(len(rows), count, GROUP)
