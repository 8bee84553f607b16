"""Where things stand in the picture of a schedule, and how close one looks.

Three ways of looking: every token as a square; a short label in every cell; bars.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gptmanager.picture.trace import Phase, Trace

MARGIN = 16
LABELS = 140  # width of the names of rows
BARS = 1000  # width of the iterations in a picture of bars
SQUARE = 20  # one token
PANEL = 58
PANEL_STEP = PANEL + 34
_MAX_CELLS = 28 * 60  # each with a mark of its own
_TALL = 720  # lanes that are taller stand below the panels, which are then seen at once


class Look(Enum):
    TOKENS = 0
    CELLS = 1
    BARS = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Pixels. All begins at `top`, many lanes below the panels.

    Column i spans `left + i * column` and one `column` more.
    """

    look: Look
    num_columns: int
    num_lanes: int
    column: float
    lane: float
    top: float
    left: float = MARGIN + LABELS

    @property
    def width(self) -> float:
        """Of all columns."""
        return self.column * self.num_columns

    @property
    def panels_first(self) -> bool:
        return self.lane * self.num_lanes > _TALL

    @property
    def lanes_top(self) -> float:
        return self.top + (3 * PANEL_STEP + 22 if self.panels_first else 0)

    @property
    def panels_top(self) -> float:
        return self.top if self.panels_first else self.top + self.lane * self.num_lanes + 30

    @property
    def axis_y(self) -> float:
        """Where the lines of the iterations end, below all."""
        if self.panels_first:
            return self.lanes_top + self.lane * self.num_lanes + 8
        return self.panels_top + 3 * PANEL_STEP - 8

    @property
    def full_width(self) -> float:
        return max(self.left + self.width + MARGIN + 8, 720)

    @property
    def full_height(self) -> float:
        return self.axis_y + 44

    def x(self, column: float) -> float:
        return self.left + column * self.column

    def lane_y(self, index: int) -> float:
        return self.lanes_top + index * self.lane


def lay_out(trace: Trace, top: float) -> Layout:
    num_columns, num_lanes = max(1, len(trace.columns)), len(trace.lanes)
    chunks = [
        span.num_tokens
        for lane in trace.lanes
        for span in lane.spans
        if span.phase is Phase.CONTEXT
    ]
    longest = max(chunks, default=1)
    if num_columns <= 8 and longest <= 8 and num_lanes <= 24:
        look, column, lane = Look.TOKENS, max(132.0, longest * SQUARE + 44.0), 32.0
    elif num_columns <= 28 and num_lanes <= _MAX_CELLS // num_columns:
        look, column, lane = Look.CELLS, min(88.0, BARS / num_columns), 22.0
    else:
        look, column = Look.BARS, BARS / num_columns
        lane = max(1.5, min(20.0, 1200 / max(1, num_lanes)))
    return Layout(look, num_columns, num_lanes, column, lane, top)


def nice_step(span: float, at_most: int) -> int:
    """1, 2 or 5 times a power of ten, so that `span` has no more than `at_most` steps."""
    least = max(1.0, span / max(1, at_most))
    power = 10 ** math.floor(math.log10(least))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least))
