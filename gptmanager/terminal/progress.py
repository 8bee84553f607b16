"""`ProgressBars`: shows the progress of slow work on terminals."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from gptmanager.terminal.printable import printable
from gptmanager.terminal.redrawn_lines import RedrawnLines, console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 1.0  # seconds; work that takes longer gets a bar
# kind of work that is slow only on the first start -> line to print when it begins
NOTES = {"kernels": "compiling kernels for this processor; they are not on disk yet"}
_REFRESH_S = 0.1


class ProgressBars:
    """Draws a bar in `region` for each kind of work that lasts at least `patience_s` seconds.

    It draws only in `update` and `close`, on the caller's thread, so that measurements are not
    disturbed. By default, bars are drawn on terminals, and other streams get nothing. If `wanted`
    is True, other streams get a line when slow work is done. If `wanted` is False, neither bars nor
    these lines are written. `notes` has a line for some kinds of work, which is written to any
    stream when the work begins.
    """

    def __init__(
        self,
        region: RedrawnLines,
        patience_s: float = PATIENCE_S,
        *,
        wanted: bool | None = None,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._region = region
        self._patience_s = patience_s
        self._wanted = wanted
        self._notes = notes
        self._started: dict[str, float] = {}  # kind of work -> time of its first update
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        self._drawn_at = 0.0

    def update(self, what: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` units of the work `what` are done; remove its bar at the end.

        `note` is shown next to the bar.
        """
        if what in self._notes and done == 0 < total:
            self._region.write(self._notes[what] + "\n")
        if self._wanted is False or not (self._region.can_draw or self._wanted):
            return
        now = time.monotonic()
        shows_at = self._started.setdefault(what, now) + self._patience_s
        if done >= total:
            del self._started[what]
            self._end(what)
            if now >= shows_at and not self._region.can_draw:
                end = f", {note}" if note else ""
                self._region.write(f"{what}: {done} of {total}{end}\n")
        elif self._region.can_draw and now >= max(shows_at, self._drawn_at + _REFRESH_S):
            self._drawn_at = now
            self._draw(what, done, total, note)

    def close(self) -> None:
        """Remove all bars."""
        for what in list(self._bars):
            self._end(what)

    def _draw(self, what: str, done: int, total: int, note: str) -> None:
        progress = self._progress = self._progress or _make_progress()
        if what not in self._bars:
            self._bars[what] = progress.add_task(printable(what), total=total, note="")
        progress.update(self._bars[what], completed=done, note=printable(note))
        self._region.draw(progress)

    def _end(self, what: str) -> None:
        bar = self._bars.pop(what, None)
        if bar is not None and self._progress is not None:
            self._progress.remove_task(bar)
            if self._bars:
                self._region.draw(self._progress)
            else:
                self._region.clear()


def _make_progress() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%", markup=False),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console(io.StringIO()),  # the region draws
        auto_refresh=False,
    )
