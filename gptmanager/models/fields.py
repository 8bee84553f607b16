"""`Fields`: a `config.json`, or an object within it, with checked reads.

This module checks sizes, numbers and flags. It does not know what a field means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, cast

from gptmanager.errors import ConfigError, quoted

MAX_SIZE = 2**31 - 1  # positions, tokens and rows are int32 in kernels
LEAST_NUMBER, MAX_NUMBER = 1.2e-38, 3.4e38  # the range of normal float32 numbers
_LONG_NAME = 100
# These names are not read in a family that has another name, because transformers ignores them.
OURS_ALONE = frozenset({"norm_eps", "hidden_act"})
RANGE = f"from {LEAST_NUMBER} to {MAX_NUMBER}"

T = TypeVar("T")
Spellings = Mapping[str, Union[str, tuple[str, ...]]]
Decision = Union[bool, str, Callable[["Fields"], bool]]


def names_of(spellings: Spellings, field: str) -> tuple[str, ...]:
    """Return the names of a field, by our name, in a config; the first is the usual one."""
    theirs = spellings.get(field, field)
    names = (theirs,) if isinstance(theirs, str) else theirs
    return names if field in OURS_ALONE else tuple(dict.fromkeys((*names, field)))


class Fields:
    """A config, read by our names of the fields. Errors use the config's own names.

    `spellings`: our name -> the config's name, or names, for the fields where the names differ. A
    config may have most fields by our name instead. `defaults`: our name -> the value if the field
    is absent; a null field is None in spite of a default. Error texts begin with `label` and the
    field's name. Methods that check a value raise ConfigError.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        spellings: Spellings,
        label: str = "config.json: ",
    ) -> None:
        self._values, self._defaults, self._spellings = values, defaults, spellings
        self._label = label
        self._layer_types: list[str] = []
        self._read: set[str] = set()
        self._results: dict[str, Any] = {}

    def get(self, field: str) -> Any:
        """Mark the field as read; return its value, or the default if the field is absent."""
        names = names_of(self._spellings, field)
        self._read.update(names)
        for name in names:
            if name in self._values:
                return self._values[name]
        return self._defaults.get(field)

    def unread(self) -> dict[str, Any]:
        """Return the fields of the config that no code has read, with their values."""
        return {name: value for name, value in self._values.items() if name not in self._read}

    def note_read(self, *names: str) -> None:
        """Mark these fields as read, under our names and under the config's names."""
        for name in names:
            self._read.update((name, *names_of(self._spellings, name)))

    def has_default(self, field: str) -> bool:
        """Return whether the model family has a default for the field.

        A family has defaults only for fields that the family reads.
        """
        return field in self._defaults

    def is_given(self, field: str) -> bool:
        """Return whether the config has the field."""
        return any(name in self._values for name in names_of(self._spellings, field))

    @property
    def layer_types(self) -> list[str]:
        """The kind of attention of each layer, for families with several kinds; otherwise empty."""
        return self._layer_types

    def error(self, field: str, need: str) -> ConfigError:
        """Return an error that names the field and its value. `need`: what the value must be."""
        return ConfigError(f"{self._label}{self.as_given(field)}: {need}")

    def as_given(self, field: str) -> str:
        """Return "name = value" with the name that the config has for the field, for errors."""
        names = names_of(self._spellings, field)
        name = next((it for it in names if it in self._values), names[0])
        name = name if len(name) < _LONG_NAME and name.isprintable() else quoted(name)
        return f"{name} = {quoted(self.get(field))}"

    def size(self, field: str, if_null: int | None = None, limit: int = MAX_SIZE) -> int:
        """Return a positive integer up to `limit`; `if_null` if the field is absent or null."""
        value = if_null if self.get(field) is None else self.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, "must be a positive integer")
        if value > limit:
            raise self.error(field, f"must be a positive integer of at most {limit}")
        return value

    def count(self, field: str) -> int:
        """Return an integer from 0 to `MAX_SIZE`."""
        value = self.get(field)
        return 0 if value == 0 and type(value) is int else self.size(field)

    def number(self, field: str, if_null: float | None = None, limit: float = MAX_NUMBER) -> float:
        """Return a positive number up to `limit`; `if_null` if the field is absent or null."""
        value: Any = if_null if self.get(field) is None else self.get(field)
        if not is_positive(value) or value > limit:
            raise self.error(field, f"must be a positive number from {LEAST_NUMBER} to {limit}")
        return float(value)

    def optional_number(self, field: str) -> float:
        """Return a positive number, or 0.0 if the field is absent or null."""
        return 0.0 if self.get(field) is None else self.number(field)

    def number_or_zero(self, field: str) -> float:
        """Return a positive number, or 0.0 if the field is absent, null or 0."""
        value = self.get(field)
        is_zero = value is None or type(value) in (int, float) and value == 0
        return 0.0 if is_zero else self.number(field)

    def decided(self, value: Decision) -> bool:
        """Return a boolean `value`, the flag of the field `value`, or the result of `value`."""
        if callable(value):
            return value(self)
        return self.flag(value) if isinstance(value, str) else value

    def layer_type(self, layer: int) -> str:
        """Return the kind of attention of a layer."""
        return self._layer_types[layer]

    def set_layer_types(self, types: list[str]) -> None:
        """Store the kind of attention of each layer, for `layer_types` and `layer_type`."""
        self._layer_types = types

    def flag(self, field: str, if_null: bool = False) -> bool:
        """Return a boolean; `if_null` if the field is absent or null."""
        value = if_null if self.get(field) is None else self.get(field)
        if not isinstance(value, bool):
            raise self.error(field, "must be true or false")
        return value

    def layers(self, field: str) -> frozenset[int]:
        """Return the layer numbers that the field lists; empty if the field is absent or null."""

        def read() -> frozenset[int]:
            given = [] if self.get(field) is None else self.get(field)
            if not isinstance(given, list) or not all(type(it) is int for it in given):
                raise self.error(field, "must be a list of layers")
            return frozenset(given)

        return self.once(field, read)

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return the result of `compute`. A later call with the same `name` returns it again."""
        if name not in self._results:
            self._results[name] = compute()
        return cast(T, self._results[name])


def is_positive(value: Any) -> bool:
    """Return whether a value is a positive number in the range of normal float32 numbers."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and LEAST_NUMBER <= value <= MAX_NUMBER
