"""Positions in the picture of a schedule, and its level of detail.

The picture of a small schedule has a square for each token. The picture of a larger schedule has a
short label in each cell (one request in one iteration). The picture of a very large schedule has
bars.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gptmanager.picture.trace import Phase, Trace

# Sizes in pixels.
MARGIN = 16
LABELS = 140  # width of the row names
BARS = 1000  # width of all iterations together in a picture of bars
SQUARE = 20  # side of one token
PANEL = 58  # height of a panel
PANEL_STEP = PANEL + 34  # from the top of a panel to the top of the next panel
_MAX_CELLS = 28 * 60  # a number of cells; a picture with more cells has bars
_TALL = 720  # if all rows together are higher, the panels are above the rows, to be visible


class Look(Enum):
    """The level of detail."""

    TOKENS = 0
    CELLS = 1
    BARS = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions and sizes in pixels. The drawing begins at `top`.

    Column i begins at `left + i * column` and is `column` wide. Each row is `row` high.
    """

    look: Look
    num_columns: int
    num_rows: int
    column: float
    row: float
    top: float
    left: float = MARGIN + LABELS

    @property
    def width(self) -> float:
        """Return the width of all columns, in pixels."""
        return self.column * self.num_columns

    @property
    def panels_first(self) -> bool:
        return self.row * self.num_rows > _TALL

    @property
    def rows_top(self) -> float:
        return self.top + (3 * PANEL_STEP + 22 if self.panels_first else 0)

    @property
    def panels_top(self) -> float:
        return self.top if self.panels_first else self.top + self.row * self.num_rows + 30

    @property
    def axis_y(self) -> float:
        """Return the y coordinate where the grid lines end, below all rows and panels."""
        if self.panels_first:
            return self.rows_top + self.row * self.num_rows + 8
        return self.panels_top + 3 * PANEL_STEP - 8

    @property
    def full_width(self) -> float:
        return max(self.left + self.width + MARGIN + 8, 720)

    @property
    def full_height(self) -> float:
        return self.axis_y + 44

    def x(self, column: float) -> float:
        return self.left + column * self.column

    def row_y(self, index: int) -> float:
        return self.rows_top + index * self.row


def lay_out(trace: Trace, top: float) -> Layout:
    """Return the layout of all rows and columns of a trace. The drawing begins at `top`."""
    num_columns, num_rows = max(1, len(trace.columns)), len(trace.rows)
    chunks = [
        span.num_tokens for row in trace.rows for span in row.spans if span.phase is Phase.CONTEXT
    ]
    longest = max(chunks, default=1)
    if num_columns <= 8 and longest <= 8 and num_rows <= 24:
        look, column, row = Look.TOKENS, max(132.0, longest * SQUARE + 44.0), 32.0
    elif num_columns <= 28 and num_rows <= _MAX_CELLS // num_columns:
        look, column, row = Look.CELLS, min(88.0, BARS / num_columns), 22.0
    else:
        look, column = Look.BARS, BARS / num_columns
        row = max(1.5, min(20.0, 1200 / max(1, num_rows)))
    return Layout(look, num_columns, num_rows, column, row, top)


def nice_step(span: float, max_steps: int) -> int:
    """Return the smallest step with which `span` has at most `max_steps` steps.

    The step is 1, 2 or 5 times a power of ten, and at least 1.
    """
    least = max(1.0, span / max(1, max_steps))
    power = 10 ** math.floor(math.log10(least))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least))
