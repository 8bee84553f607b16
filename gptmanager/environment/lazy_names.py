"""Names and modules of a package that are imported on first use.

A command's `--help` needs neither torch nor Numba, but eager re-exports would import both.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `package`.

    `homes`: module -> the names it defines. `modules`: submodules that become attributes without an
    explicit import.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name in modules:  # the import also sets the attribute of the package
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        # stored, so that `__getattr__` runs once per name
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *home_of, *modules})


def named(name: str) -> Any:
    """Import and return the object `name`, given as "MODULE:NAME"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
