"""docs/serving.md: the options that it lists are those of `gptmanager serve`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from gptmanager import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def own_options():
    """The options of `serve` alone, as the page writes them -> default."""
    parser = cli.command_parser()
    (commands,) = (it for it in parser._actions if isinstance(it, argparse._SubParsersAction))
    groups = commands.choices["serve"]._action_groups
    actions = [it for group in groups if group.title != "manager" for it in group._group_actions]
    found = {}
    for action in actions:
        if action.dest not in ("help", "config"):
            value = "" if action.metavar is None else f" {action.metavar}"
            more = " ..." if action.nargs == "+" else ""
            for name in action.option_strings:
                found[f"{name}{value}{more}"] = action.default
    return found


def listed_options():
    """The same as the tables of the page have it, with defaults as texts."""
    rows = re.findall(r"^\| (`--.+?) \| (.+?) \| .+ \|$", PAGE, re.MULTILINE)
    found = []
    for names, default in rows:
        options = [name.strip("`") for name in names.split(", `")]
        defaults = default.split(", ") if len(options) == default.count(", ") + 1 else [default]
        found += [
            (name, defaults[-1 if len(defaults) == 1 else i]) for i, name in enumerate(options)
        ]
    return found


def test_the_page_lists_each_option_of_the_server_once():
    assert sorted(name for name, _ in listed_options()) == sorted(own_options())


def test_defaults_on_the_page_are_those_of_the_options():
    defaults, compared = own_options(), 0
    for name, listed in listed_options():
        default = defaults[name]
        if default is False:
            assert listed == "off", name
        elif isinstance(default, (int, float)):
            assert listed == f"{default:g}", name
        elif isinstance(default, str) and default:
            assert listed == default, name
        elif isinstance(default, tuple) and default:
            assert listed == " ".join(default), name
        else:
            continue
        compared += 1
    assert compared > 20
