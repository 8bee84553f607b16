"""The arguments of `gptmanager env`."""

from __future__ import annotations

from typing import Any

from gptmanager.terminal.options import add_json, add_parser

_HELP = """\
Print what a bug report needs: versions, the CPU's features and the kernels that use them, cores
and quota, caches, extras, GPU. Nothing private is printed: no keys, no values of the server's
variables, no host name.
"""
_EXAMPLES = """\
examples:
  gptmanager env
  gptmanager env --json
"""


def add_command(commands: Any) -> None:
    """Add `env` to the sub-parsers `commands`."""
    parser = add_parser(
        commands,
        "env",
        "gptmanager.bench.environment_main:main",
        help="print what a bug report needs",
        usage="gptmanager env [--json]",
        description=_HELP,
        statuses=("printed", "the report could not be printed"),
        epilog=_EXAMPLES,
    )
    add_json(parser)
