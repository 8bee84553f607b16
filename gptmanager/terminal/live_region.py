"""`LiveRegion`: the last lines of a terminal, redrawn in place, below the written text.

Decides which streams are terminals, and removes control characters from written text. rich draws;
it is imported with the first drawing.
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


class LiveRegion:
    """A region of `stream` to draw in, and a stream itself, for log handlers in any thread.

    On other streams than terminals it draws nothing and writes text unchanged. `stream` None: it
    neither draws nor writes.
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
        """Return the columns and lines of the terminal."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return 80, 24
        return size.columns or 80, size.lines or 24  # some pseudo-terminals report 0

    def draw(self, drawing: RenderableType, above: Sequence[RenderableType] = ()) -> None:
        """Replace the last drawing. `above`: drawings to print above it, which stay."""
        from rich.console import Group

        with _uninterrupted(), self._lock:
            live = self._live = self._live or self._begin()
            live.console.size = self.size()
            with live.console:  # one write avoids flicker
                for part in above:
                    live.console.print(part)
                live.update(Group(drawing, ""), refresh=True)  # the cursor is below

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
        live.console.show_cursor(True)  # a killed command would leave it hidden
        return live


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C: interrupted in a drawing, rich would lose track of the lines it has drawn."""
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

    It draws as for a terminal on any `stream`, without styles if NO_COLOR is set.
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
