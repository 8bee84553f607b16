"""`read_message`: reads a message from the lines that a person types, or that a pipe contains."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

_QUOTES = '"""'


class Entry(NamedTuple):
    """A message, or a command with its argument. The text of a command begins with a slash."""

    text: str
    is_command: bool = False


def read_message(read_line: Callable[[bool], str]) -> Entry:
    """Read lines until a message is complete.

    `read_line` returns the next line; its argument is whether this line continues a message. At the
    end of the input `read_line` raises EOFError. If a message has begun, the end of the input
    completes the message; otherwise `read_message` raises EOFError.

    A backslash at the end of a line continues the message on the next line. Three quotation marks
    begin and end a message of any lines. A message in quotation marks is never a command.
    """
    line = read_line(False)
    if line.lstrip().startswith(_QUOTES):
        return Entry(_quoted(line.lstrip().removeprefix(_QUOTES), read_line))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(True))
        except EOFError:
            break
    text = "\n".join(lines)
    return Entry(text, line.startswith("/"))


def _quoted(line: str, read_line: Callable[[bool], str]) -> str:
    """Read a message up to the closing quotation marks. `line` follows the opening ones."""
    lines = []
    while not line.rstrip().endswith(_QUOTES):
        lines.append(line)
        try:
            line = read_line(True)
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines.append(line.rstrip().removesuffix(_QUOTES))
    return "\n".join(lines).strip("\n")
