"""A command's report on the standard output: for people, or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from rich.table import Table

from gptmanager.terminal.tables import show, table

_NAMES = 26  # columns, so that short reports look like long ones


def print_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(orjson.dumps(report).decode())
        return
    if sys.stdout.isatty():  # below the live view
        print()
    show([report_table(report)])


def report_table(report: Mapping[str, Any]) -> Table:
    """A name and a value a line; what has parts of its own follows, indented."""
    return table(("", ""), _rows(report), widths=(_NAMES,))


def _rows(report: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    for name, value in report.items():
        label = indent + name.replace("_", " ").replace("kv", "KV").removesuffix(" ms")
        if name.endswith("_ms"):
            cuts = "  ".join(f"{cut} {number:9,.2f} ms" for cut, number in value.items())
            yield label, cuts or "nothing to measure"
        elif isinstance(value, Mapping) and any(
            isinstance(inner, (list, dict)) for inner in value.values()
        ):
            yield label, ""
            yield from _rows(value, indent + "  ")
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
