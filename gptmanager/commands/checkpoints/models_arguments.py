"""The arguments of `gptmanager models`."""

from __future__ import annotations

from typing import Any

from gptmanager.terminal.options import add_json, add_parser

_HELP = """\
List the models on this machine that `--model NAME` finds: in a checkout, in installed packages, and
in the hub's cache (HF_HUB_CACHE, HF_HOME). Nothing is downloaded.
"""
_EXAMPLES = """\
examples:
  gptmanager models
  gptmanager run --model smollm2 --prompt "The capital of France is"
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "models",
        "gptmanager.commands.checkpoints.models_main:main",
        help="list the models on this machine",
        usage="gptmanager models [--json]",
        description=_HELP,
        statuses=("listed", "the list could not be printed"),
        epilog=_EXAMPLES,
    )
    add_json(parser, "print the list as JSON")
