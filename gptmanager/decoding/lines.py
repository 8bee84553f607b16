"""`Lines`: maps a slot and a beam to a row (a "line") of an executor's tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", int, Ints)


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of tables with space for `max_beam_width` beams in each of `num_slots` slots.

    A line is one row of a table. It holds the tokens, blocks or parameters of one beam. A table has
    `count` lines. A sequence without beams uses the line of beam 0.
    """

    num_slots: int
    max_beam_width: int = 1

    @property
    def count(self) -> int:
        return self.num_slots * self.max_beam_width

    def of(self, slot: Numbers, beam: Numbers | int = 0) -> Numbers:
        """Return the line of `beam` in `slot`. The arguments are ints or int64 arrays."""
        return slot * self.max_beam_width + beam

    def slot_of(self, line: Numbers) -> Numbers:
        """Return the slot of a line, which is an int or an int64 array."""
        return line // self.max_beam_width
