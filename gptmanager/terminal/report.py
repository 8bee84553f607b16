"""A command's report on the standard output: for people, or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import orjson


def print_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(orjson.dumps(report).decode())
    else:
        gap = "\n" if sys.stdout.isatty() else ""  # below the live view
        print(gap + "\n".join(report_lines(report)))


def report_lines(report: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A name and a value a line, for people; what has parts of its own follows, indented."""
    for name, value in report.items():
        label = indent + name.replace("_", " ").replace("kv", "KV").removesuffix(" ms")
        if name.endswith("_ms"):
            cuts = "  ".join(f"{cut} {number:9,.2f} ms" for cut, number in value.items())
            yield f"{label:28}{cuts or 'nothing to measure'}"
        elif isinstance(value, Mapping) and any(
            isinstance(v, (list, dict)) for v in value.values()
        ):
            yield label
            yield from report_lines(value, indent + "  ")
        else:
            yield f"{label:28}{_value(name, value)}"


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
