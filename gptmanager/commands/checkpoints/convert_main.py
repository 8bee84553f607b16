"""`gptmanager convert`, after its arguments are parsed."""

from __future__ import annotations

import argparse

from gptmanager.models.conversion import convert_checkpoint
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.streams import print_message


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    bars = ProgressBars(options.region)
    try:
        convert_checkpoint(
            options.source,
            options.target,
            dtype=options.dtype,
            weights_dtype=options.weights_dtype,
            head_dtype=options.head_dtype,
            on_progress=bars.update,
        )
    finally:
        bars.close()
    print_message(f"{options.target} is complete")
    return 0
