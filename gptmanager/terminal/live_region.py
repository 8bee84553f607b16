"""`LiveRegion`: the last lines of a terminal, redrawn in place; what is written goes above them.

Decides what a terminal is, and that nothing which is written can steer it. rich draws; it is
imported when there is something to draw. Knows nothing of what is drawn.
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
    """On `stream`. Where that is no terminal, nothing is drawn, and text is written as it is.

    Is a stream itself, for log handlers in any thread.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` None: one that is closed."""
        self._stream = stream or io.StringIO()
        self.can_draw = can_draw(self._stream)
        self._lock = threading.Lock()
        self._live: Live | None = None

    def write(self, text: str) -> None:
        """Whole lines, made printable."""
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
        """Columns and lines of the terminal."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return 80, 24
        return size.columns or 80, size.lines or 24  # some pseudo-terminals say 0

    def draw(self, drawing: RenderableType, above: Sequence[RenderableType] = ()) -> None:
        """In place of the last drawing. What is `above` it stays."""
        from rich.console import Group

        with _uninterrupted(), self._lock:
            live = self._live = self._live or self._begin()
            live.console.size = self.size()
            with live.console:  # one write, so that nothing flickers
                for part in above:
                    live.console.print(part)
                live.update(Group(drawing, ""), refresh=True)  # the cursor stands below

    def clear(self) -> None:
        """Nothing that was drawn stays, but what is above it."""
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
        live.console.show_cursor(True)  # a command that is killed must not leave it hidden
        return live


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: in the midst of a drawing rich would lose track of what stands there."""
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
    """Whether it is a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def console(stream: TextIO) -> Console:
    """A console that takes texts as they are: no markup, no emoji codes, no highlighting.

    Draws for a terminal, whatever `stream` is. No styles with NO_COLOR.
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
