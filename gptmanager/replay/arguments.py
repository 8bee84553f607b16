"""The arguments of `gptmanager replay`."""

from __future__ import annotations

from typing import Any

from gptmanager.terminal.arguments import path_argument, writable
from gptmanager.terminal.options import add_json, add_parser, add_scheduler, add_verbose

_HELP = """\
Run a recording again without its model, and compare every recorded schedule.

FILE comes from OptionalParams(recording_path=...), or is the black box that a failed manager wrote
(its log names it). The same loop, scheduler and block accounting get the recorded requests, stops
and clock readings, and the recorded tokens. The command stops at the first difference and prints
it.
"""


def add_command(commands: Any) -> None:
    """Add `replay` to the sub-parsers `commands`."""
    parser = add_parser(
        commands,
        "replay",
        "gptmanager.replay.main:main",
        help="run a recording again without its model, and compare",
        usage="gptmanager replay FILE [options]",
        description=_HELP,
        statuses=("the same throughout", "a divergence, or a full disk"),
    )
    parser.add_argument("recording", type=path_argument, metavar="FILE", help="a recording")
    text = "write a CSV file with a line for each request: its times, tokens and pauses"
    parser.add_argument("--table", type=writable, metavar="FILE", help=text)
    add_scheduler(parser, "the create_scheduler of the recorded run, if it had one")
    add_json(parser)
    add_verbose(parser, "loop")
