"""The arguments of `gptmanager journal`."""

from __future__ import annotations

from typing import Any

from gptmanager.terminal.arguments import path_argument
from gptmanager.terminal.options import add_json, add_parser

_HELP = """\
Show the unfinished requests of a journal, and check all its records.

FOLDER is the folder that was passed to OptionalParams(journal_path=...) or `serve --journal`. The
command changes nothing. A manager that starts on the folder resumes these requests.
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "journal",
        "gptmanager.journal.main:main",
        help="show and check the journal of a manager",
        usage="gptmanager journal FOLDER [--json]",
        description=_HELP,
        statuses=("whole, or torn at the end", "damaged"),
    )
    parser.add_argument(
        "folder", type=path_argument, metavar="FOLDER", help="the folder of a journal"
    )
    add_json(parser, "print the requests as JSON")
