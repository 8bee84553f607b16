"""The standard streams of a command, which may be closed, full, or a broken pipe."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TextIO

from gptmanager.errors import GptManagerError
from gptmanager.terminal.printable import printable_lines


def prepare_streams() -> None:
    """Let the standard output accept any text, and open the null device for closed streams.

    After `gptmanager ... >&-`, sys.stdout is None, and the next opened file would be the standard
    output of this process's children. The null device is opened for reading only, so that text for
    a closed output is an error. sys.stdin stays None: a closed input is an error of its own.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # not always UTF-8; sys.stderr has this already
        sys.stdout.reconfigure(errors="backslashreplace")
    access = {"stdin": os.O_RDONLY, "stdout": os.O_RDONLY, "stderr": os.O_WRONLY}
    for name in [name for name in access if getattr(sys, name) is None]:
        descriptor = os.open(os.devnull, access[name])
        if name != "stdin":
            setattr(sys, name, open(descriptor, "w", errors="backslashreplace"))


def print_output(text: str = "", end: str = "\n") -> None:
    """Print a text of the command on the standard output. Raise GptManagerError if it is lost."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:  # the reader has what it wanted
        raise
    except OSError as error:
        _drop_text(sys.stdout)
        raise GptManagerError(_unwritable(error)) from error


def print_message(text: str) -> None:
    """Print a message of the command on the standard error output."""
    with contextlib.suppress(OSError):  # the exit status reports an error too
        print(printable_lines(f"gptmanager: {text}"), file=sys.stderr)


def flush_streams(code: int) -> int:
    """Flush the streams. Return `code`, or 1 if it is 0 and printed text could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            _drop_text(stream)
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                print_message(_unwritable(error))
            code = code or 1
    return code


def _drop_text(stream: TextIO) -> None:
    """Let a stream's text go to the null device, or each later flush fails again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _unwritable(error: OSError) -> str:
    if error.errno == errno.EBADF:
        why = "it is closed; redirect it to a file, or to /dev/null"
    else:
        why = f"{error.strerror}"
    return f"what the command prints cannot be written to the standard output: {why}"
