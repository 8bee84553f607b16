"""Wheels of packages that a machine without a network lacks, unpacked where Python finds them.

It needs nothing but Python: a wheel is a zip archive of what belongs beside the other packages.
"""

from __future__ import annotations

import platform
import re
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def unpack(wheels: Iterable[Path], site: Path) -> list[str]:
    """Unpack those whose package is not installed; return a line for each wheel of no use."""
    notes = []
    site.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(wheels):
        name, *_ = wheel.stem.split("-")
        if _is_installed(name) or any(site.glob(f"{name}-*.dist-info")):
            continue
        if not fits(wheel.stem):
            notes.append(f"{wheel.name} is for another Python or another machine")
            continue
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        except (OSError, zipfile.BadZipFile) as error:
            notes.append(f"{wheel.name}: {error}")
    return notes


def fits(stem: str, version: tuple[int, int] = sys.version_info[:2], machine: str = "") -> bool:
    """Whether a wheel of this name is for this Python and this machine, by its tags."""
    _, _, pythons, abi, platforms = stem.rsplit("-", 4)[-5:] if stem.count("-") >= 4 else [""] * 5
    machine = machine or _machine()
    if platforms != "any" and machine not in platforms:
        return False
    for python in pythons.split("."):
        found = re.fullmatch(r"(py|cp)(\d)(\d*)", python)
        if found is None:
            continue
        wanted = (int(found[2]), int(found[3] or 0))
        if found[1] == "py" or abi == "abi3":
            if wanted[0] == version[0] and wanted <= version:
                return True
        elif wanted == version and abi in (f"cp{version[0]}{version[1]}", "none"):
            return True
    return False


def _machine() -> str:
    return platform.machine()


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
