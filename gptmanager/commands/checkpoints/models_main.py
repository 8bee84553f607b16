"""Runs `gptmanager models` with parsed arguments."""

from __future__ import annotations

import argparse

from gptmanager.environment.machine.local_models import local_models
from gptmanager.terminal.tables import print_report, table


def main(options: argparse.Namespace) -> int:
    """Print the models that this machine has, and return the exit status."""
    found = local_models()
    rows = [
        (model.name, f"{model.num_bytes / 1e6:,.1f} MB", model.origin, str(model.path))
        for model in found
    ]
    listed = [
        {
            "name": model.name,
            "origin": model.origin,
            "path": str(model.path),
            "bytes": model.num_bytes,
        }
        for model in found
    ]
    head = ("name", "size", "from", "path")
    piece = table(head, rows, left=(0, 2, 3)) if rows else "found no models on this machine"
    print_report({"models": listed}, [piece], as_json=options.json)
    return 0
