"""The standard streams of a command, which may be closed, full, or a broken pipe."""

from __future__ import annotations

import contextlib
import os
import sys

from gptmanager.terminal.printable import printable_lines


def open_closed_streams() -> None:
    """Open the null device for closed streams: after `gptmanager ... >&-` sys.stdout is None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def print_message(text: str) -> None:
    """Print a message of the command on the standard error output."""
    with contextlib.suppress(OSError):  # the exit status reports an error too
        print(printable_lines(f"gptmanager: {text}"), file=sys.stderr)


def report_unwritable_output(error: OSError) -> None:
    """Print why the standard output cannot be written, unless its reader has closed the pipe."""
    if not isinstance(error, BrokenPipeError):
        print_message(f"the standard output cannot be written: {error.strerror}")


def flush_streams(code: int) -> int:
    """Flush the streams. Return `code`, or 1 if it is 0 and printed text could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):  # or the flush at exit fails again
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout:
                report_unwritable_output(error)
            code = code or 1
    return code
