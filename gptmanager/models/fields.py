"""`Fields`: a `config.json`, or an object within it, read with checks.

This module decides what a size, a number or a flag is, and does not know what a field means.
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
    one that is null has none. An error begins with `label` and the field's name. `unread` returns
    the fields that nothing has read.
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
        self._layer_types: list[str] = []
        self._read: set[str] = set()

    def get(self, field: str) -> Any:
        names = self._spellings.get(field, field), field
        self._read.update(names)
        for name in names:
            if name in self._values:
                return self._values[name]
        return self._defaults.get(field)

    def unread(self) -> dict[str, Any]:
        """Return the fields of the config that nothing has read, and their values."""
        return {name: value for name, value in self._values.items() if name not in self._read}

    def note_read(self, *names: str) -> None:
        """Count these fields as read, under either of their names."""
        for name in names:
            self._read.update((name, self._spellings.get(name, name)))

    def has_default(self, field: str) -> bool:
        """Return whether the family has a default for the field, so that it reads it."""
        return field in self._defaults

    def is_given(self, field: str) -> bool:
        """Return whether the config has the field."""
        return field in self._values or self._spellings.get(field, field) in self._values

    @property
    def layer_types(self) -> list[str]:
        """The kind of attention of each layer, in families where layers may differ."""
        return self._layer_types

    def error(self, field: str, need: str) -> ConfigError:
        name = self._spellings.get(field, field)
        return ConfigError(f"{self._label}{name} = {quoted(self.get(field))}: {need}")

    def size(self, field: str, if_null: int | None = None, limit: int = MAX_SIZE) -> int:
        """A positive integer, up to `limit`."""
        value = if_null if self.get(field) is None else self.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, "must be a positive integer")
        if value > limit:
            raise self.error(field, f"must be a positive integer of at most {limit}")
        return value

    def count(self, field: str) -> int:
        """An integer from 0 on."""
        value = self.get(field)
        return 0 if value == 0 and type(value) is int else self.size(field)

    def number(self, field: str, if_null: float | None = None) -> float:
        """A positive, finite number."""
        value: Any = if_null if self.get(field) is None else self.get(field)
        if not is_positive(value):
            raise self.error(field, "must be a positive number")
        return float(value)

    def optional_number(self, field: str) -> float:
        """Return a positive number, 0.0 where there is none."""
        return 0.0 if self.get(field) is None else self.number(field)

    def decided(self, value: bool | str) -> bool:
        """Return `value`, or the flag of that name."""
        return self.flag(value) if isinstance(value, str) else value

    def layer_type(self, layer: int) -> str:
        """Return the kind of attention of a layer."""
        return self._layer_types[layer]

    def set_layer_types(self, types: list[str]) -> None:
        """Keep the kind of attention of each layer for the readers of families."""
        self._layer_types = types

    def flag(self, field: str, if_null: bool = False) -> bool:
        value = if_null if self.get(field) is None else self.get(field)
        if not isinstance(value, bool):
            raise self.error(field, "must be true or false")
        return value


def is_positive(value: Any) -> bool:
    """Whether it is a positive, finite number that a float can hold."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max
