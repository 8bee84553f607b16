"""`RedrawnLines`: the last lines of a terminal, redrawn in place, below the written text.

This module decides which streams are terminals, and removes control characters from written text.
It draws with rich, which is imported at the first drawing.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from gptmanager.terminal.printable import printable_lines

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live


class RedrawnLines:
    """A region of `stream` to draw in; also a text stream, for log handlers in any thread.

    If `stream` is not a terminal, text is written to it, but callers draw nothing. If it is None,
    nothing is written or drawn.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or io.StringIO()
        self.can_draw = can_draw(self._stream)
        self._lock = threading.Lock()
        self._live: Live | None = None

    def write(self, text: str) -> None:
        """Write whole lines above the drawing, without control characters."""
        text = printable_lines(text)
        with _uninterrupted(), self._lock:
            if self._live is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                self._live.console.print(text, end="", soft_wrap=True)

    def flush(self) -> None:
        self._stream.flush()

    def size(self) -> tuple[int, int]:
        """Return the columns and lines of the terminal, or 80 and 24 if they are unknown."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return 80, 24
        return size.columns or 80, size.lines or 24  # some pseudo-terminals report 0

    def draw(self, drawing: RenderableType, above: Sequence[RenderableType] = ()) -> None:
        """Replace the drawing. The drawings `above` are printed above it, and stay."""
        from rich.console import Group

        with _uninterrupted(), self._lock:
            live = self._live = self._live or self._begin()
            live.console.size = self.size()
            with live.console:  # one write avoids flicker
                for part in above:
                    live.console.print(part)
                live.update(Group(drawing, ""), refresh=True)  # "" keeps the cursor below

    def clear(self) -> None:
        """Remove the drawing; the text above it stays."""
        with _uninterrupted(), self._lock:
            live, self._live = self._live, None
            if live is not None:
                live.stop()

    def _begin(self) -> Live:
        from rich.live import Live

        live = Live(
            console=console(self._stream),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        live.start()
        live.console.show_cursor(True)  # or a killed command leaves it hidden
        return live


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block ends; if interrupted, rich loses track of its drawn lines."""
    caught: list[Any] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *given: caught.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught and callable(before):
        before(*caught[0])


def can_draw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with a movable cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def console(stream: TextIO) -> Console:
    """Return a console that prints text unchanged: no markup, no emoji codes, no highlighting.

    The console treats any `stream` as a terminal. If NO_COLOR is set, it uses no colors.
    """
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=True,
        force_interactive=True,
        force_jupyter=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        emoji=False,
        highlight=False,
    )
