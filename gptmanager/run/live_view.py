"""What a person sees of a run: who joins, what they say, who leaves, and what it came to.

On a terminal a table whose running rows are redrawn in place; in a file or a pipe a line for each
event. Decides nothing about requests.
"""

from __future__ import annotations

import os
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from gptmanager.terminal.printable import printable

_MAX_ROWS = 16  # of running requests on a terminal
_MAX_BAR = 20
_LOG_EVERY_S = 10.0  # counts, where nothing is redrawn
_NARROW = 60  # columns below which a running row shows only its id and its text
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


@dataclass(slots=True)
class RunningRow:
    """One running request. `decode` is called on the reader's thread, when `text` is looked at."""

    name: str
    prompt: str
    decode: Callable[[list[int]], str]
    num_tokens: int = 0
    _text: str = ""
    _undecoded: list[int] = field(default_factory=list)

    def add(self, tokens: list[int]) -> None:
        self.num_tokens += len(tokens)
        self._undecoded += tokens

    @property
    def text(self) -> str:
        """What it has said so far."""
        if self._undecoded:
            self._text += self.decode(self._undecoded)
            self._undecoded = []
        return self._text


@dataclass(slots=True)
class Progress:
    """Counts of the whole run so far."""

    total: int
    done: int = 0
    output_tokens: int = 0
    batch_size: int = 0
    kv_use: float = 0.0  # fraction of the KV cache blocks
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def counts(self) -> list[str]:
        return [
            f"{self.done}/{self.total} requests",
            f"{self.output_tokens / max(self.seconds, 1e-9):,.0f} tokens/s",
            f"batch {self.batch_size}",
            f"KV cache {self.kv_use:.0%}",
        ]


class LiveView:
    """Draws on `stream`; `quiet` leaves nothing of it but what failed.

    Is a stream itself, for log handlers: what any thread writes on it goes above the running rows.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._stream = stream
        self._redraws = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_style = self._redraws and not os.environ.get("NO_COLOR")
        self._lock = threading.Lock()
        self._above = ""  # goes out with the next drawing
        self._lines: list[str] = []  # what the next drawing replaces
        self._has_header = False
        self._next_log = _LOG_EVERY_S

    # Events --------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        with self._lock:
            self._above += text
            self._show(self._lines)

    def flush(self) -> None:
        self._stream.flush()

    def note(self, text: str) -> None:
        if not self.quiet:
            self.write(text + "\n")

    def join(self, row: RunningRow, progress: Progress) -> None:
        if not self._redraws:
            self.note(_stamp(progress, f"request {row.name} joins: {printable(row.prompt)}"))

    def leave(
        self, row: RunningRow, why: str, text: str, progress: Progress, *, failed: bool = False
    ) -> None:
        """A request has ended; on a terminal its whole text stays above the running ones."""
        if failed and self.quiet:
            self.write(f"request {row.name}: {printable(text)}\n")
        elif not self._redraws:
            unit = "token" if row.num_tokens == 1 else "tokens"
            how = f"leaves after {row.num_tokens} {unit}, {why}:"
            self.note(_stamp(progress, f"request {row.name} {how} {printable(text)}"))
        elif not self.quiet:
            start = self._header() + f"{row.name:>7} {row.num_tokens:>6} {why:<10} "
            gap = "  " if failed else ""
            line = start + self._dimmed(printable(row.prompt), gap + printable(text)) + "\n"
            with self._lock:
                self._above += line

    def draw(self, rows: Sequence[RunningRow], progress: Progress) -> None:
        """The running requests and the counts, in place of the last drawing."""
        if self.quiet:
            return
        if not self._redraws:
            if progress.seconds >= self._next_log:
                self._next_log = progress.seconds + _LOG_EVERY_S
                self.note(_stamp(progress, ", ".join(progress.counts)))
            return
        width, height = self._size()
        num_rows = max(0, min(len(rows), _MAX_ROWS, height - 4))
        header = self._header()
        lines = [self._running(row, width) for row in rows[:num_rows]]
        if num_rows < len(rows):
            lines.append(f"{'':15}and {len(rows) - num_rows} more"[: width - 1])
        lines.append(_status(progress, width - 1))
        with self._lock:
            self._above += header
            self._show(lines)

    def close(self) -> None:
        """Nothing of what runs stays behind."""
        with self._lock:
            self._show([])

    # Drawing -------------------------------------------------------------------------------

    def _show(self, lines: list[str]) -> None:
        """One write, so that nothing flickers and nothing tears. Caller holds the lock."""
        up = f"\x1b[{len(self._lines)}A\r\x1b[J" if self._lines else ""
        drawing = "".join(line + "\n" for line in lines)
        # should a terminal count columns otherwise, it cuts a line off instead of wrapping it
        drawing = f"{_NO_WRAP}{drawing}{_WRAP}" if drawing else ""
        if up or drawing or self._above:
            self._stream.write(up + self._above + drawing)
            self._stream.flush()
        self._above = ""
        self._lines = lines

    def _header(self) -> str:
        """The table's header, the first time that something stands below it."""
        if self._has_header:
            return ""
        self._has_header = True
        return self._dimmed(f"{'request':>7} {'tokens':>6} {'state':<10} text", "\n")

    def _running(self, row: RunningRow, width: int) -> str:
        start = f"{row.name:>7} "
        if width >= _NARROW:
            start += f"{row.num_tokens:>6} {'running' if row.num_tokens else 'joined':<10} "
        prompt, text = printable(row.prompt), printable(row.text)
        room = width - 1 - columns(start)
        cut = _fitting(prompt + text, room)
        if cut:
            cut = _fitting(prompt + text, room - 1)
            start += "\N{HORIZONTAL ELLIPSIS}"
        return start + self._dimmed(prompt[cut:], text[max(0, cut - len(prompt)) :])

    def _dimmed(self, dim: str, plain: str) -> str:
        return f"{_DIM}{dim}{_PLAIN}{plain}" if self._has_style and dim else dim + plain

    def _size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return 80, 24
        return size.columns or 80, size.lines or 24  # some pseudo-terminals say 0


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _fitting(text: str, room: int) -> int:
    """From which index on the rest of `text` takes at most `room` columns."""
    used = 0
    for index in range(len(text) - 1, -1, -1):
        used += _width(text[index])
        if used > room:
            return index + 1
    return 0


def _status(progress: Progress, room: int) -> str:
    text = "   ".join(progress.counts)
    size = min(_MAX_BAR, room - len(text) - 5)
    if size < 4:
        return text[:room]
    filled = size * progress.done // max(progress.total, 1)
    return f"[{'#' * filled}{'.' * (size - filled)}]   {text}"


def _stamp(progress: Progress, text: str) -> str:
    return f"{progress.seconds:8.2f} s  {text}"
