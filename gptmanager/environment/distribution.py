"""The package as pip knows it: its name and version, and the command to install optional parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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


class UnmetRequirement(NamedTuple):
    """A package that is not installed (`installed` is None), or older than the `lowest` version."""

    name: str
    lowest: str
    installed: str | None

    def __str__(self) -> str:
        if self.installed is None:
            return self.name
        return f"{self.name}>={self.lowest} ({self.installed} is installed)"


def unmet_requirements() -> dict[str, list[UnmetRequirement]]:
    """Return the unmet requirements of each extra; the extra "" is the library itself.

    Requirements of some versions of Python only are left out. The result is empty if the package
    runs from a checkout that is not installed.
    """
    from importlib import metadata

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, dict[str, UnmetRequirement]] = {}  # by name, as one may be required twice
    for extra, name, lowest in _parsed(lines):
        unmet = found.setdefault(extra, {})
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            unmet[name] = UnmetRequirement(name, lowest, None)
        else:
            # a folder that an uninstallation left has no version
            if _numbers(version or lowest) < _numbers(lowest):
                unmet[name] = UnmetRequirement(name, lowest, version)
    return {extra: [*unmet.values()] for extra, unmet in found.items()}


def too_old(extra: str) -> str | None:
    """Return which packages of `extra` are installed and too old, and the command that upgrades.

    Return None if there are none. A package may be missing: its import tells.
    """
    unmet = unmet_requirements().get(extra, [])
    old = ", ".join(str(it) for it in unmet if it.installed is not None)
    return f"{old}: {install_command(extra)}" if old else None


def _parsed(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (extra, name, lowest version or "") for the lines of the package's metadata."""
    for line in lines:
        needed, _, when = line.partition(";")
        if "python_version" in when:
            continue
        extra = when.split("extra ==")[1].strip(" \"'") if "extra ==" in when else ""
        lowest = re.search(r">=\s*([\d.]+)", needed)
        yield extra, re.split(r"[\s<>=!~\[]", needed.strip())[0], lowest[1] if lowest else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
