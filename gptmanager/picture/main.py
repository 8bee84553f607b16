"""Runs `gptmanager picture`: draws a recording."""

from __future__ import annotations

import argparse
from pathlib import Path

from gptmanager.errors import ConfigError, write_error
from gptmanager.picture.drawing import draw
from gptmanager.picture.perfetto import chrome_trace
from gptmanager.picture.recorded import trace_of
from gptmanager.picture.trace import Trace
from gptmanager.picture.zoom_page import page
from gptmanager.recorder.recording_file import located, read_recording
from gptmanager.terminal.arguments import check_distinct
from gptmanager.terminal.printable import printable
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.streams import print_output


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.output is None and options.chrome_trace is None:
        raise ConfigError("nothing to write: pass --output FILE or --chrome-trace FILE")
    check_distinct(
        {
            "RECORDING": options.recording,
            "--output": options.output,
            "--chrome-trace": options.chrome_trace,
        }
    )
    bars = ProgressBars(options.region)
    bars.update("steps", 0, 3, "reading")
    recording = read_recording(options.recording)
    bars.update("steps", 1, 3, "tracing")
    with located(str(options.recording)):
        trace = trace_of(recording)
    if options.iterations is not None:
        trace = trace.window(*options.iterations)
    if options.running:
        trace = trace.without_idle()
    if not trace.columns:
        raise ConfigError(f"{options.recording} has no iteration to draw")
    bars.update("steps", 2, 3, "drawing")
    written = _write(options, trace)
    bars.close()
    for path, size in written:
        print_output(f"{printable(str(path))}  {size / 1024:.0f} KiB")
    return 0


def _write(options: argparse.Namespace, trace: Trace) -> list[tuple[Path, int]]:
    """Write the files; return their paths and sizes in bytes."""
    contents: list[tuple[Path, bytes]] = []
    output: Path | None = options.output
    if output is not None:
        title = printable(options.title or options.recording.name)
        is_svg = options.svg or output.suffix.lower() == ".svg"
        text = draw(trace, title) if is_svg else page(trace, title)
        contents.append((output, text.encode()))
    if options.chrome_trace is not None:
        contents.append((options.chrome_trace, chrome_trace(trace)))
    for path, content in contents:
        try:
            path.write_bytes(content)
        except OSError as error:
            raise write_error(repr(str(path)), error) from error
    return [(path, len(content)) for path, content in contents]
