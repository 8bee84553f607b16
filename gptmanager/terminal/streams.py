"""The standard streams of a command: closed, full, or read by nobody."""

from __future__ import annotations

import contextlib
import os
import sys

from gptmanager.terminal.printable import printable_lines


def open_closed_streams() -> None:
    """`gptmanager ... >&-` leaves Python without a stream to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def tell(text: str) -> None:
    """A line on the standard error output."""
    with contextlib.suppress(OSError):  # the exit status tells, too
        print(printable_lines(f"gptmanager: {text}"), file=sys.stderr)


def flushed(code: int) -> int:
    """`code`, or 1 where what was printed has not arrived."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):  # or Python fails once more at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                tell(f"the standard output cannot be written: {error.strerror}")
            code = code or 1
    return code
