"""`Metadata`: the keys and values of a GGUF file, with checks of their types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gptmanager.errors import ConfigError, quoted, quoted_path


class Metadata:
    """The values of a GGUF file, by key.

    Methods that check a type raise a ConfigError that names the key and what its value must be.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Any:
        return iter(self._values)

    def get(self, key: str) -> Any:
        """Return the value without checks; None if the key is absent."""
        return self._values.get(key)

    def plain(self, key: str) -> Any:
        """Return the value, or None if the key is absent. An array of numbers becomes a list."""
        value = self.get(key)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def error(self, key: str, need: str) -> ConfigError:
        """Return an error with the key and its value. `need` says what the value must be."""
        value = self._values.get(key)
        shown = "is missing" if value is None else f"= {quoted(value)}"
        return ConfigError(f"{quoted_path(self.path)}: {key} {shown}: {need}")

    def text(self, key: str) -> str | None:
        """Return a string, or None if the key is absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def flag(self, key: str, if_absent: bool) -> bool:
        """Return a boolean, or `if_absent` if the key is absent."""
        value = self.get(key)
        if value is None:
            return if_absent
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def integer(self, key: str) -> int | None:
        """Return an integer, or None if the key is absent."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.error(key, "must be an integer")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings. The key must be present."""
        value = self.get(key)
        if not isinstance(value, list):
            raise self.error(key, "must be an array of strings")
        return value

    def numbers(self, key: str, count: int) -> list[Any]:
        """Return a list of `count` numbers. The key must be present."""
        value = self.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(key, f"must be an array of {count} numbers")
        found: list[Any] = value.tolist()
        return found
