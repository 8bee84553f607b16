"""The live view of a run: requests join, generate their texts, and leave.

A terminal shows a table with one row per running request, redrawn in place. A file or pipe gets one
line per event. The view never changes the requests.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gptmanager.terminal.printable import printable
from gptmanager.terminal.redrawn_lines import RedrawnLines

_MAX_ROWS = 16  # rows of running requests on a terminal
_MAX_BAR = 20
_GAP = "   "  # between counts
_LOG_EVERY_S = 10.0  # seconds between two logs of the counts, if nothing is redrawn
_NARROW = 60  # on a terminal with fewer columns, a row shows only its name and text
_NAME, _TOKENS, _STATE = 7, 6, 10  # widths in columns

_HEADER = [Text(name, "dim", no_wrap=True) for name in ("request", "tokens", "state", "text")]


@dataclass(slots=True)
class RunningRow:
    """One running request. Reading `text` calls `decode`, which converts new tokens to text."""

    name: str
    prompt: str
    decode: Callable[[list[int]], str]
    num_tokens: int = 0
    _text: str = ""
    _undecoded: list[int] = field(default_factory=list)

    def add(self, tokens: list[int]) -> None:
        """Add new tokens, which are decoded later."""
        self.num_tokens += len(tokens)
        self._undecoded += tokens

    @property
    def text(self) -> str:
        """The text generated so far."""
        if self._undecoded:
            self._text += self.decode(self._undecoded)
            self._undecoded = []
        return self._text


@dataclass(slots=True)
class Progress:
    """Counts of the whole run so far."""

    total: int
    started: float  # time.monotonic() at the start
    done: int = 0
    output_tokens: int = 0
    batch_size: int = 0
    kv_use: float = 0.0  # fraction of the KV cache blocks

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self.started

    @property
    def counts(self) -> list[str]:
        """The counts as short texts for a status line."""
        return [
            f"{self.done}/{self.total} requests",
            f"{self.output_tokens / max(self.seconds, 1e-9):,.0f} tokens/s",
            f"batch {self.batch_size}",
            f"KV cache {self.kv_use:.0%}",
        ]


class ProgressDisplay:
    """The live view, drawn in `region`. With `quiet`, it shows only failed requests."""

    def __init__(self, region: RedrawnLines, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._region = region
        self._ended: list[Sequence[str | Text]] = []  # rows to print above the next drawing
        self._has_header = False
        self._next_log = _LOG_EVERY_S

    # Events --------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Write a line, except with `quiet`."""
        if not self.quiet:
            self._region.write(text + "\n")

    def join(self, row: RunningRow, progress: Progress, when: float) -> None:
        """Log that a request was fetched at time `when`, in seconds of `time.monotonic()`.

        On a terminal, nothing is logged, because `draw` shows the request.
        """
        if not self._region.can_draw:
            self._log(progress, when, f"request {row.name} joins: {printable(row.prompt)}")

    def leave(
        self,
        row: RunningRow,
        why: str,
        text: str,
        progress: Progress,
        when: float,
        *,
        failed: bool = False,
    ) -> None:
        """Show that a request ended at `when`.

        On a terminal, the text of the request stays above the running rows.
        """
        if failed and self.quiet:
            self._region.write(f"request {row.name}: {printable(text)}\n")
        elif not self._region.can_draw:
            unit = "token" if row.num_tokens == 1 else "tokens"
            how = f"leaves after {row.num_tokens} {unit}, {why}:"
            self._log(progress, when, f"request {row.name} {how} {printable(text)}")
        elif not self.quiet:
            said = _said(row.prompt, ("  " if failed else "") + text)
            self._ended.append((row.name, str(row.num_tokens), why, said))

    def draw(self, rows: Sequence[RunningRow], progress: Progress) -> None:
        """Draw the running requests and the counts over the last drawing.

        If `region` cannot draw, log only the counts, every `_LOG_EVERY_S` seconds.
        """
        if self.quiet:
            return
        if not self._region.can_draw:
            if progress.seconds >= self._next_log:
                self._next_log = progress.seconds + _LOG_EVERY_S
                self._log(progress, time.monotonic(), ", ".join(progress.counts))
            return
        width, height = self._region.size()
        num_rows = max(0, min(len(rows), _MAX_ROWS, height - 4))
        room = width - (_NAME + 1 if width < _NARROW else _NAME + _TOKENS + _STATE + 3)
        running = (
            (row.name, str(row.num_tokens), "running" if row.num_tokens else "joined",
             _end(_said(row.prompt, row.text), room))
            for row in rows[:num_rows]
        )  # fmt: skip
        drawing: list[RenderableType] = [_table(running, width)]
        if num_rows < len(rows):
            drawing.append(Text(f"{'':15}and {len(rows) - num_rows} more", no_wrap=True))
        drawing.append(_status(progress, width))
        self._region.draw(Group(*drawing), above=self._above(width))

    def close(self) -> None:
        """Write the ended requests, and remove the running ones from the terminal."""
        if self._ended:
            self._region.draw("", above=self._above(self._region.size()[0]))
        self._region.clear()

    # Drawing -------------------------------------------------------------------------------

    def _log(self, progress: Progress, when: float, text: str) -> None:
        self.note(f"{when - progress.started:8.2f} s  {text}")

    def _above(self, width: int) -> list[RenderableType]:
        """Return the rows of requests that have ended since the last drawing.

        The first call adds a header.
        """
        rows, self._ended = self._ended, []
        if not self._has_header:
            self._has_header = True
            rows.insert(0, _HEADER)
        return [_table([row], width) for row in rows]


def _table(rows: Iterable[Sequence[str | Text]], width: int) -> Table:
    """Return a table of running or ended rows. A narrow terminal shows only names and texts."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", width=_NAME, no_wrap=True)
    if width >= _NARROW:
        table.add_column(justify="right", width=_TOKENS, no_wrap=True)
        table.add_column(width=_STATE, no_wrap=True)
    table.add_column(overflow="fold")
    for name, tokens, state, said in rows:
        table.add_row(*((name, tokens, state, said) if width >= _NARROW else (name, said)))
    return table


def _said(prompt: str, text: str) -> Text:
    return Text.assemble((printable(prompt), "dim"), printable(text))


def _end(text: Text, room: int) -> Text:
    """Return the end of `text` that fits into `room` columns, after an ellipsis if it is cut."""
    if cell_len(text.plain) <= room:
        return text
    first = max(0, len(text) - 2 * room)  # a letter and its combining accent share a column
    cut = bisect_left(
        range(first, len(text)), 1 - room, key=lambda index: -cell_len(text.plain[index:])
    )
    return Text("\N{HORIZONTAL ELLIPSIS}") + text[first + cut :]


def _status(progress: Progress, width: int) -> RenderableType:
    counts = progress.counts
    while len(counts) > 1 and len(_GAP.join(counts)) > width:
        counts.pop()
    text = Text(_GAP.join(counts), no_wrap=True)
    size = min(_MAX_BAR, width - len(text) - len(_GAP))
    if size < 4:
        return text
    status = Table.grid(padding=(0, len(_GAP), 0, 0))
    status.add_row(ProgressBar(max(progress.total, 1), progress.done, width=size), text)
    return status
