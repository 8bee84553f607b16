"""Print reports that consist of text lines and tables.

Reports are laid out with rich, but text that looks like rich's markup is printed unchanged. A table
is as wide as its cells need. If the terminal is narrower, the terminal wraps the table's lines.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gptmanager.environment.legible_json import legible
from gptmanager.terminal.printable import printable, printable_lines
from gptmanager.terminal.redrawn_lines import can_draw
from gptmanager.terminal.streams import print_output

Piece = str | Table
_HIGHLIGHTED = ("WRONG", "FAILED", "MISSED")
_UNLIMITED = 1 << 20  # characters per line
_NAMES = 26  # minimum width of the column of names, to align the values of all reports


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    left: Collection[int] = (0, -1),
    widths: Sequence[int] = (),
) -> Table:
    """Return a table. Columns are right-aligned, except the columns with an index in `left`.

    Index -1 is the last column. `widths`: minimum widths of the columns, to align several tables.
    """
    drawn = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(head), header_style=""
    )
    for index, name in enumerate(head):
        drawn.add_column(
            Text.assemble((printable(name), "bold")),
            justify="left" if index in left or index - len(head) in left else "right",
            min_width=widths[index] if index < len(widths) else None,
            no_wrap=True,
        )
    for row in rows:
        drawn.add_row(*(_text(printable(cell)) for cell in row))
    return drawn


def lines(pieces: Iterable[Piece], *, styled: bool = False) -> list[str]:
    """Return the lines of a report as plain text, or with a terminal's styles if `styled`."""
    written = io.StringIO()
    console = Console(file=written, width=_UNLIMITED, color_system="standard" if styled else None)
    for piece in pieces:
        drawing = _text(printable_lines(piece)) if isinstance(piece, str) else piece
        console.print(drawing, soft_wrap=isinstance(piece, str))
    return [line.rstrip() for line in written.getvalue().split("\n")[:-1]]


def show(pieces: Iterable[Piece]) -> None:
    """Print a report on the standard output."""
    styled = can_draw(sys.stdout) and not os.environ.get("NO_COLOR")
    print_output("\n".join(lines(pieces, styled=styled)))


def print_report(
    report: Mapping[str, Any], pieces: Iterable[Piece] | None = None, *, as_json: bool
) -> None:
    """Print a report: as JSON with `as_json`, otherwise as `pieces`.

    If `pieces` is None, a table of the report's names and values is printed.
    """
    if as_json:
        print_output(report_json(report).decode())
        return
    if pieces is None and sys.stdout.isatty():  # separates the report from the live view
        print_output()
    show([report_table(report)] if pieces is None else pieces)


def report_json(report: Mapping[str, Any], option: int = 0) -> bytes:
    """Return a report as JSON. `option`: options of orjson."""
    try:
        return orjson.dumps(report, option=option)
    except TypeError:  # a path on Linux may have any bytes
        return orjson.dumps(legible(report), option=option)


def report_table(report: Mapping[str, Any]) -> Table:
    """Return a table with one name and its value per line.

    An object is shown in one line, or in indented lines if it has objects or lists as values.
    """
    return table(("", ""), _rows(report), widths=(_NAMES,))


def _rows(report: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    for name, value in report.items():
        label = indent + name.replace("_", " ").replace("kv", "KV").removesuffix(" ms")
        if name.endswith("_ms"):
            cuts = "  ".join(f"{cut} {number:9,.2f} ms" for cut, number in value.items())
            yield label, cuts or "not measured"
        elif isinstance(value, Mapping) and any(
            isinstance(inner, (list, dict)) for inner in value.values()
        ):
            yield label, ""
            yield from _rows(value, indent + "  ")
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            yield from zip_longest([label], value, fillvalue="")  # a line for each text
        else:
            yield label, _value(name, value)


def _value(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}".replace("_", " ") for key, inner in value.items())
    if isinstance(value, list):
        return "  ".join(f"{item:,}" for item in value)
    if name == "seconds":
        return f"{value:13,.3f} s"
    if name.endswith("_use"):
        return f"{100 * value:13.1f} %"
    return f"{value:13,}" if isinstance(value, (int, float)) else str(value)


def _text(text: str) -> Text:
    drawn = Text(text)
    drawn.highlight_words(_HIGHLIGHTED, "bold red")
    return drawn
