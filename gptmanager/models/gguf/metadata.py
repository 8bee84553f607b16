"""`Metadata`: the keys and values of a GGUF file, with checks of the types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gptmanager.errors import ConfigError, quoted, quoted_path


class Metadata:
    """The values of a file by key. Errors name the key and say what its value must be."""

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
        """Return the value with an array of numbers as a list, so that it can be compared."""
        value = self.get(key)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def error(self, key: str, need: str) -> ConfigError:
        value = self._values.get(key)
        shown = "not there" if value is None else f"= {quoted(value)}"
        text = f"{quoted_path(self.path)}: {key} {shown}: {need}"
        return ConfigError(text.replace(" not there:", " is not there:"))

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def flag(self, key: str, if_absent: bool) -> bool:
        value = self.get(key)
        if value is None:
            return if_absent
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def integer(self, key: str) -> int | None:
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.error(key, "must be an integer")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.error(key, "must be an array of strings")
        return value

    def numbers(self, key: str, count: int) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(key, f"must be an array of {count} numbers")
        found: list[Any] = value.tolist()
        return found
