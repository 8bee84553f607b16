"""docs/porting.md: its tables and the errors agree on options of vLLM and llama.cpp."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gptmanager import cli
from gptmanager.terminal.option_sources import suggestion

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "porting.md").read_text(encoding="utf-8")
(SERVE,) = (it for it in cli.command_parser()._commands if it.prog.endswith(" serve"))
OURS = {name[2:] for action in SERVE.actions for name in action.option_strings}


def rows(server):
    """Each option in the table of `server`, without dashes -> the one that replaces it, or ""."""
    table = PAGE[PAGE.index(f"| {server}'s flag | here |") :].partition("\n\n")[0]
    found = {}
    for row in table.splitlines()[2:]:
        theirs, ours = row.strip("| ").split(" | ", 1)
        options = re.findall(r"`--?([a-z][a-z-]*)", theirs)
        names = re.findall(r"`(--[a-z-]+)", re.match(r"(`--[^`]+`(, )?)*", ours)[0])
        if len(names) != len(options):
            names = names[:1] * len(options) or [""] * len(options)
        found |= zip(options, names, strict=True)
    return found


@pytest.mark.parametrize("server", ["vLLM", "llama.cpp"])
def test_an_error_says_what_the_page_says_about_an_option(server):
    compared = 0
    for option, ours in rows(server).items():
        if option in OURS:
            continue
        (said,) = suggestion(option, OURS, "--") or [""]
        if ours:
            assert said == f"did you mean {ours}?", option
        else:
            assert said and "did you mean" not in said, option
        compared += 1
    assert compared > 20
