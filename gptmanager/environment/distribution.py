"""The package as pip knows it: its name and version, and the command to install optional parts."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
DISTRIBUTION = "gptmanager-engine"  # on PyPI, "gptmanager" is another project


def install_command(extra: str) -> str:
    """Return the pip command that installs the dependencies of the optional part `extra`.

    If the package runs from a checkout that is not installed, the command installs the checkout.
    """
    from importlib import (
        metadata,  # imported late: it takes a third of the import time of `gptmanager`
    )

    try:
        needed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return f"pip install -e '{Path(__file__).resolve().parents[2]}[{extra}]'"
    is_for = f'extra == "{extra}"'
    wanted = [line for line in needed if is_for in line]
    names = [line.replace(f"; {is_for}", "").replace(f" and {is_for}", "") for line in wanted]
    return " ".join(["pip install", *(f"'{name}'" for name in names)])
