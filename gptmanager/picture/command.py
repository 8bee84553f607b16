"""`gptmanager picture`: a recording as pictures, on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gptmanager.errors import ConfigError
from gptmanager.picture.chrome_trace import chrome_trace
from gptmanager.picture.drawing import draw
from gptmanager.picture.page import page
from gptmanager.picture.recorded import trace_of
from gptmanager.picture.trace import Trace
from gptmanager.recorder.recording import located, read_recording
from gptmanager.terminal.arguments import check_distinct
from gptmanager.terminal.options import add_parser
from gptmanager.terminal.printable import printable
from gptmanager.terminal.progress import ProgressBars

_HELP = """\
Draw the schedule of a recorded run.

Rows are requests, columns are iterations; below stand the batch, the tokens and the KV cache blocks
of every iteration. The HTML page needs nothing but a browser: point at anything for its numbers,
zoom with the buttons. A manager records with OptionalParams(recording_path=...).
"""

_EXAMPLES = """\
examples:
  gptmanager picture run.jsonl --output schedule.html
  gptmanager picture run.jsonl --output start.svg --iterations 0:40
  gptmanager picture run.jsonl --output schedule.html --chrome-trace trace.json

Open trace.json at https://ui.perfetto.dev or in chrome://tracing.

exit status: 0 drawn, 2 the call was wrong or a file cannot be read or written, 130 interrupted
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "picture",
        _picture,
        help="draw the schedule of a recorded run",
        usage="gptmanager picture RECORDING [options]",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("recording", type=Path, metavar="RECORDING", help="a file of JSON lines")
    add("--output", type=Path, metavar="FILE", help="schedule.html, or FILE.svg")
    add("--svg", action="store_true", help="write an SVG without a page around it (or FILE.svg)")
    add("--chrome-trace", type=Path, metavar="FILE", help="trace events as JSON")
    told = "only these, B not included (default all)"
    add("--iterations", type=_range, metavar="A:B", help=told)
    add("--running", action="store_true", help="leave out requests that only wait")
    add("--title", metavar="TEXT", help="above the picture (default: the recording's name)")


def _range(text: str) -> tuple[int, int]:
    """`100:160`"""
    first, colon, end = text.partition(":")
    if not (colon and first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of iterations like 100:160")
    return int(first), int(end)


def _picture(options: argparse.Namespace) -> int:
    if options.output is None and options.chrome_trace is None:
        raise ConfigError("nothing to do: give --output FILE or --chrome-trace FILE")
    check_distinct(
        {
            "RECORDING": options.recording,
            "--output": options.output,
            "--chrome-trace": options.chrome_trace,
        }
    )
    bars = ProgressBars(options.region)
    bars.tell("steps", 0, 3, "reading")
    recording = read_recording(options.recording)
    bars.tell("steps", 1, 3, "following")
    with located(str(options.recording)):
        trace = trace_of(recording)
    if options.iterations is not None:
        trace = trace.window(*options.iterations)
    if options.running:
        trace = trace.without_idle()
    if not trace.columns:
        raise ConfigError(f"{options.recording} has no iteration to draw")
    bars.tell("steps", 2, 3, "drawing")
    written = _write(options, trace)
    bars.close()
    for path, size in written:
        print(f"{printable(str(path))}  {size / 1024:.0f} KiB")
    return 0


def _write(options: argparse.Namespace, trace: Trace) -> list[tuple[Path, int]]:
    """The files, with their sizes in bytes."""
    contents: list[tuple[Path, bytes]] = []
    output: Path | None = options.output
    if output is not None:
        title = printable(options.title or options.recording.name)
        is_svg = options.svg or output.suffix == ".svg"
        text = draw(trace, title) if is_svg else page(trace, title)
        contents.append((output, text.encode()))
    if options.chrome_trace is not None:
        contents.append((options.chrome_trace, chrome_trace(trace)))
    for path, content in contents:
        try:
            path.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    return [(path, len(content)) for path, content in contents]
