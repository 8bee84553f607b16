"""Run `gptmanager chat`: draw "loading MODEL" at once, and only then import the slow modules."""

from __future__ import annotations

import argparse
from typing import Any

from gptmanager.environment.lazy_names import named
from gptmanager.terminal.printable import printable


def main(options: argparse.Namespace) -> int:
    """Return the exit status."""
    if options.region.can_draw:  # importing torch takes a second
        options.region.draw(printable(f"loading {options.model.name}"))
    converse: Any = named("gptmanager.run.chat.session:converse")
    code: int = converse(options)
    return code
