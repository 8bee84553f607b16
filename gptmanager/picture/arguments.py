"""The arguments of `gptmanager picture`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gptmanager.terminal.arguments import path_argument
from gptmanager.terminal.options import add_parser

_HELP = """\
Draw the schedule of a recorded run.

Rows are requests, columns are iterations. Panels show the batch, the tokens and the KV cache blocks
of every iteration. The HTML page opens in any browser: hover for numbers; a long run has buttons to
zoom. A manager records with OptionalParams(recording_path=...).
"""

_EXAMPLES = """\
examples:
  gptmanager picture run.jsonl --output schedule.html
  gptmanager picture run.jsonl --output start.svg --iterations 0:40
  gptmanager picture run.jsonl --output schedule.html --chrome-trace trace.json

Open trace.json at https://ui.perfetto.dev or in chrome://tracing.
"""


def add_command(commands: Any) -> None:
    """Add `picture` to the sub-parsers `commands`."""
    parser = add_parser(
        commands,
        "picture",
        "gptmanager.picture.main:main",
        help="draw the schedule of a recorded run",
        usage="gptmanager picture RECORDING [options]",
        description=_HELP,
        statuses=("drawn", "a file could not be written"),
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("recording", type=path_argument, metavar="RECORDING", help="a recording, as JSON lines")
    text = "the picture to write, FILE.html or FILE.svg"
    add("--output", type=_picture, metavar="FILE", help=text)
    text = "write an SVG instead of an HTML page (default for FILE.svg)"
    add("--svg", action="store_true", help=text)
    add("--chrome-trace", type=path_argument, metavar="FILE", help="write trace events as JSON")
    text = "only iterations A to B - 1 (default all)"
    add("--iterations", type=_range, metavar="A:B", help=text)
    add("--running", action="store_true", help="leave out requests that only wait")
    add("--title", metavar="TEXT", help="the title of the picture (default: the recording's name)")


def _picture(text: str) -> Path:
    """Read the path of a picture. A name without a suffix, such as /dev/stdout, is one, too."""
    if text == "-" or Path(text).suffix.lower() not in ("", ".html", ".htm", ".svg"):
        raise argparse.ArgumentTypeError(f"must end in .html or .svg, got {text!r}")
    return Path(text)


def _range(text: str) -> tuple[int, int]:
    """Return the first iteration and the end of a range such as "100:160"."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(
            f"must be a range of iterations like 100:160, got {text!r}"
        )
    return int(first), int(end)
