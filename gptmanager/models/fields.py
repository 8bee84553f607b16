"""`Fields`: a `config.json`, or an object within it, read with checks.

Decides what a size, a number, a flag is; knows nothing of what a field means.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gptmanager.errors import ConfigError, quoted

MAX_SIZE = 2**31 - 1  # positions, tokens and rows are int32 in kernels


class Fields:
    """A config by our names for its fields; an error names the field as the config spells it.

    `spellings`: our name -> theirs, where they differ. A field that is absent has its default,
    one that is null has none. `label` stands before the field's name in an error.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        spellings: Mapping[str, str],
        label: str = "config.json: ",
    ) -> None:
        self._values, self._defaults, self._spellings = values, defaults, spellings
        self._label = label

    def get(self, field: str) -> Any:
        for name in (self._spellings.get(field, field), field):
            if name in self._values:
                return self._values[name]
        return self._defaults.get(field)

    def error(self, field: str, need: str) -> ConfigError:
        name = self._spellings.get(field, field)
        return ConfigError(f"{self._label}{name} = {quoted(self.get(field))}: {need}")

    def size(self, field: str, if_null: int | None = None, limit: int = MAX_SIZE) -> int:
        """A positive integer, up to `limit`."""
        value = if_null if self.get(field) is None else self.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, "a positive integer is needed")
        if value > limit:
            raise self.error(field, f"a positive integer of at most {limit} is needed")
        return value

    def count(self, field: str) -> int:
        """An integer from 0 on."""
        value = self.get(field)
        return 0 if value == 0 and type(value) is int else self.size(field)

    def number(self, field: str, if_null: float | None = None) -> float:
        """A positive, finite number."""
        value: Any = if_null if self.get(field) is None else self.get(field)
        if not is_positive(value):
            raise self.error(field, "a positive number is needed")
        return float(value)

    def flag(self, field: str, if_null: bool = False) -> bool:
        value = if_null if self.get(field) is None else self.get(field)
        if not isinstance(value, bool):
            raise self.error(field, "true or false is needed")
        return value


def is_positive(value: Any) -> bool:
    """Whether it is a positive, finite number that a float can hold."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max
