"""The package as pip knows it: its name, its version, and how what is missing gets installed."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
DISTRIBUTION = "gptmanager-engine"  # "gptmanager" on the package index is another project


def install_command(extra: str) -> str:
    """A command that installs what `extra` asks for, wherever this package came from."""
    from importlib import metadata  # takes a third of the time in which `gptmanager` is imported

    try:
        needed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return f"pip install -e '{Path(__file__).resolve().parents[2]}[{extra}]'"
    names = [line.partition(";") for line in needed]
    wanted = [name.strip() for name, _, when in names if f'extra == "{extra}"' in when]
    return " ".join(["pip install", *(f"'{name}'" for name in wanted)])
