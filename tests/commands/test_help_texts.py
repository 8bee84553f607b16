"""Every argument of every command has a help text that says what it is, before its default."""

import argparse
import re
from pathlib import Path

import pytest

from gptmanager import cli


def parsers(parser, *names):
    yield " ".join(names), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from parsers(child, *names, name)


COMMANDS = dict(parsers(cli.command_parser()))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_explained(name):
    for action in COMMANDS[name]._actions:
        if not isinstance(action, argparse._SubParsersAction):
            assert action.help and action.help[0] != "(", action.option_strings or action.dest


def test_lines_of_a_help_text_fit_into_100_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for name, parser in COMMANDS.items():
        assert max(map(len, parser.format_help().splitlines())) <= 100, name


def test_the_page_lists_the_exit_statuses_of_each_command():
    page = (Path(__file__).resolve().parents[2] / "docs/troubleshooting.md").read_text("utf-8")
    _, _, table = page.partition("| command | 0 | 1 |\n| --- | --- | --- |\n")
    rows = [
        f"| `{name}` | {' | '.join(re.findall('^  [01]  (.+)$', parser.epilog, re.MULTILINE))} |"
        for name, parser in COMMANDS.items()
        if name
    ]
    assert table.partition("\n\n")[0].splitlines() == rows


def test_commands_that_share_options():
    managers = "chat run serve bench"
    expected = {
        "--json": "run models bench bench/kernels bench/e2e bench/experts replay simulate env "
        "journal",
        "--verbose": f"{managers} replay simulate",
        "--scheduler": "replay simulate",
        "--record": "run serve simulate",
        "--device": f"{managers} bench/e2e",
        "--max-batch-size": f"{managers} simulate",
        "--policy": managers,
    }
    for option, names in expected.items():
        having = {name for name, it in COMMANDS.items() if option in it._option_string_actions}
        assert having == {name.replace("/", " ") for name in names.split()}, option
