"""What a person sees while requests run: who joins, what they say, who leaves, how fast it goes.

On a terminal the running requests are redrawn in place; in a file or a pipe joins and leaves are
lines. Decides nothing about requests.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from typing import TextIO

_MAX_ROWS = 12  # of running requests on a terminal
_BAR_WIDTH = 24


@dataclass(slots=True)
class RunningRow:
    """One running request: what it was asked and what it has said so far."""

    request_id: int
    prompt: str
    text: str = ""
    num_tokens: int = 0


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
    def tokens_per_second(self) -> float:
        return self.output_tokens / max(time.monotonic() - self.started, 1e-9)


class LiveView:
    """Draws on `stream`; `quiet` draws nothing."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._redraws = stream.isatty()
        self._num_drawn = 0  # lines that the next redraw replaces

    def join(self, row: RunningRow, progress: Progress) -> None:
        if not self._redraws:
            self._line(f"  + request {row.request_id} joins: {_shorten(row.prompt, 60, tail=True)}")

    def leave(self, row: RunningRow, why: str, progress: Progress) -> None:
        """A request has ended; on a terminal its whole text stays above the running ones."""
        self._erase()
        self._line(f"  - request {row.request_id} leaves ({why}, {row.num_tokens} tokens):")
        self._line(
            f"      {_one_line(row.prompt)}\x1b[1m{_one_line(row.text)}\x1b[0m"
            if self._redraws
            else f"      {_one_line(row.prompt)}|{_one_line(row.text)}"
        )

    def draw(self, rows: list[RunningRow], progress: Progress) -> None:
        """The running requests and the counts, in place of the last drawing."""
        if self._quiet or not self._redraws:
            return
        width = shutil.get_terminal_size().columns
        filled = int(_BAR_WIDTH * progress.done / max(progress.total, 1))
        status = (
            f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {progress.done}/{progress.total} "
            f"requests  {progress.tokens_per_second:.0f} tokens/s  batch {progress.batch_size}  "
            f"KV cache {progress.kv_use:.0%}"
        )
        lines = [
            _shorten(
                f"{row.request_id:>5} {_one_line(row.prompt + row.text)}", width - 1, tail=True
            )
            for row in rows[:_MAX_ROWS]
        ]
        self._erase()
        for line in [*lines, _shorten(status, width - 1)]:
            self._stream.write(line + "\n")
        self._stream.flush()
        self._num_drawn = len(lines) + 1

    def close(self) -> None:
        self._erase()
        self._stream.flush()

    def _erase(self) -> None:
        if self._num_drawn and not self._quiet:
            self._stream.write(f"\x1b[{self._num_drawn}A\x1b[J")
            self._num_drawn = 0

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._stream.write(text + "\n")


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


def _shorten(text: str, width: int, *, tail: bool = False) -> str:
    text = _one_line(text)
    if len(text) <= width:
        return text
    return "..." + text[len(text) - width + 3 :] if tail else text[: width - 3] + "..."
