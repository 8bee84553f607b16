"""Every argument of every command has a help text that says what it is, before its default."""

import argparse

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
