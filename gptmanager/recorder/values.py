"""Converts values of a recording to JSON and back: dataclasses, named tuples, and their fields.

The code depends on types, not on their meaning, so a new field of `Schedule` or `Row` needs no
change here. A dataclass becomes an object with its field names. A named tuple becomes a list in the
order of the fields in the recording's header. A set becomes a sorted list. A recording may be from
a stranger, so the requested type alone decides which value is created, and data of any other type
is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from reprlib import repr as _short
from typing import Any, TypeVar

import numpy as np
import orjson

from gptmanager.decoding.deferred import Deferred
from gptmanager.environment.legible_json import legible
from gptmanager.errors import RecordingError, response_text
from gptmanager.recorder.requests import (
    Allowance,
    RecordedError,
    plain_request,
    request_from_plain,
    value_from_plain,
)
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.request.input_rows import HostRows
from gptmanager.request.post_processor import RequestProcessor, read_post_processor

_T = TypeVar("_T")
_Read = Callable[[Any], Any]

_UNIONS = (typing.Union, types.UnionType)
_INT32 = np.iinfo(np.int32)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SCALARS = (type(None), bool, int, float, str)


def to_json(value: Any) -> bytes:
    """Return `value` as one line of JSON, without a line end."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, default=_plain, option=options)
    except TypeError:  # a string has a lone surrogate, which is too rare for a check in advance
        return orjson.dumps(legible(value, _plain), option=options)


def _plain(value: Any) -> Any:
    """Convert a value of a type that orjson does not know into a type that orjson knows."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Deferred):
        return value.make()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, InferenceRequest):
        return plain_request(value)
    if isinstance(value, BaseException):
        return str(value) if isinstance(value, RecordedError) else response_text(value)
    if isinstance(value, RequestProcessor):
        return {"processor": value.name, "prepares": value.prepares}
    if isinstance(value, HostRows):
        return value.digest
    if isinstance(value, np.ndarray):  # not contiguous, or of a dtype that orjson does not know
        return value.tolist()
    raise RecordingError(f"a {type(value).__name__} cannot be recorded: {value!r}")


def field_names(*classes: Any) -> dict[str, list[str]]:
    """Return the fields of all named tuples inside `classes`, at any depth, by class name."""
    found: dict[str, list[str]] = {}
    waiting = list(classes)
    seen: set[Any] = set()
    while waiting:
        hint = waiting.pop()
        if hint in seen:
            continue
        seen.add(hint)
        waiting.extend(typing.get_args(hint))
        if hasattr(hint, "_fields"):
            fields = list(hint._fields)
            if found.setdefault(hint.__name__, fields) != fields:
                raise TypeError(f"two named tuples of a recording are called {hint.__name__}")
        if hasattr(hint, "_fields") or dataclasses.is_dataclass(hint):
            waiting.extend(_hints(hint).values())
    return dict(sorted(found.items()))


class Decoder:
    """Creates values of given types from JSON values; raises RecordingError for anything else.

    `names` maps each named tuple to the fields that it had when the file was written. A field that
    is missing in the file gets its default; a field that no longer exists is dropped. `allowance`
    limits the number of values that the "fill" entries of requests expand to. `upgrades` maps a
    dataclass to a function that converts its fields from an older format.
    """

    def __init__(
        self,
        names: Mapping[str, list[str]],
        allowance: Allowance | None = None,
        upgrades: Mapping[Any, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
    ) -> None:
        self._names = names
        self._upgrades = upgrades or {}
        read_request = functools.partial(request_from_plain, allowance=allowance or Allowance())
        self._readers: dict[Any, _Read] = {**_READERS, InferenceRequest: read_request}

    def decode(self, hint: Any, data: Any) -> Any:
        """Return `data` as a value of type `hint`."""
        return self._reader(hint)(data)

    def _reader(self, hint: Any) -> _Read:
        reader = self._readers.get(hint)
        if reader is None:
            reader = self._readers[hint] = self._new_reader(hint)
        return reader

    def _new_reader(self, hint: Any) -> _Read:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Literal:
            return functools.partial(_read_literal, arguments)
        if origin in _UNIONS:
            return self._union(arguments)
        if origin is tuple and arguments[-1] is not ...:
            return self._fixed_tuple(arguments)
        if origin in (tuple, frozenset, list):
            return self._many(origin, arguments[0])
        if origin is dict:
            value = self._reader(arguments[1])
            return lambda data: {k: _at(k, value, item) for k, item in _read_dict(data).items()}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return functools.partial(_read_enum, hint)
        if hasattr(hint, "_fields"):
            return self._named_tuple(hint)
        if dataclasses.is_dataclass(hint):
            return self._dataclass(hint)
        return _refuse  # functions, paths and tensors are never in a recording

    def _union(self, arguments: tuple[Any, ...]) -> _Read:
        readers = [self._reader(kind) for kind in arguments if kind is not type(None)]

        def read(data: Any) -> Any:
            if data is None and type(None) in arguments:
                return None
            for reader in readers[:-1]:
                with suppress(RecordingError):
                    return reader(data)
            return readers[-1](data)

        return read

    def _fixed_tuple(self, arguments: tuple[Any, ...]) -> _Read:
        readers = [self._reader(kind) for kind in arguments]

        def read(data: Any) -> Any:
            if len(_read_list(data)) != len(readers):
                raise RecordingError(f"{len(data)} values, expected {len(readers)}")
            return tuple(reader(item) for reader, item in zip(readers, data, strict=True))

        return read

    def _many(self, origin: Callable[[Any], Any], kind: Any) -> _Read:
        if kind is float:
            return lambda data: origin(map(_read_log_prob, _read_list(data)))
        reader = self._reader(kind)
        columns = self._columns(kind)

        def read(data: Any) -> Any:
            if kind is int and set(map(type, _read_list(data))) <= {int}:
                return origin(data)
            if columns is not None and _fits(data, columns):
                return origin(map(kind._make, data))
            items = enumerate(_read_list(data))
            return origin([_at(number, reader, item) for number, item in items])

        return read

    def _columns(self, kind: Any) -> list[type] | None:
        """Return the field types of a named tuple if `_fits` can check them, else None.

        `_fits` needs fields of type int or bool only, and a file with exactly the same fields.
        """
        if not hasattr(kind, "_fields") or self._names.get(kind.__name__) != list(kind._fields):
            return None
        hints = list(_hints(kind).values())
        return hints if all(hint in (int, bool) for hint in hints) else None

    def _named_tuple(self, kind: Any) -> _Read:
        written = self._names.get(kind.__name__, list(kind._fields))
        hints = _hints(kind)
        readers = {name: self._reader(hint) for name, hint in hints.items()}

        def read(data: Any) -> Any:
            if len(_read_list(data)) != len(written):
                raise RecordingError(f"{len(data)} values, expected {len(written)}: {_short(data)}")
            given = dict(zip(written, data, strict=True))
            return _made(kind, readers, given)

        return read

    def _dataclass(self, kind: Any) -> _Read:
        readers = {name: self._reader(hint) for name, hint in _hints(kind).items()}
        upgrade = self._upgrades.get(kind, dict)
        return lambda data: _made(kind, readers, upgrade(_read_dict(data)))


def _made(kind: Any, readers: Mapping[str, _Read], given: Mapping[str, Any]) -> Any:
    fields = {
        name: _at(name, readers[name], value) for name, value in given.items() if name in readers
    }
    try:
        return kind(**fields)
    except TypeError as error:  # a field without a default is missing
        raise RecordingError(str(error)) from error


def _at(where: str | int, reader: _Read, data: Any) -> Any:
    """Read `data`; an error names `where`."""
    try:
        return reader(data)
    except RecordingError as error:
        raise RecordingError(f"{where}: {error}") from error.__cause__


def _fits(data: Any, columns: list[type]) -> bool:
    """Return whether `data` is a list of rows with these column types.

    The types are checked by column, which is faster than by row.
    """
    if not isinstance(data, list) or set(map(type, data)) != {list}:
        return False
    if set(map(len, data)) != {len(columns)}:
        return False
    found = zip(*data, strict=True)
    return all(
        set(map(type, column)) == {kind} for kind, column in zip(columns, found, strict=True)
    )


@functools.lru_cache(maxsize=128)
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


# Readers of single values ---------------------------------------------------------------------


def _read_exactly(kind: type[_T], data: _T) -> _T:
    if type(data) is not kind:
        raise RecordingError(f"{_short(data)} must be of type {kind.__name__}")
    return data


_read_str = functools.partial(_read_exactly, str)
_read_list: Callable[[Any], list[Any]] = functools.partial(_read_exactly, list)
_read_dict: Callable[[Any], dict[str, Any]] = functools.partial(_read_exactly, dict)


def _read_float(data: Any) -> float:
    if type(data) not in (int, float) or not math.isfinite(data):
        raise RecordingError(f"{_short(data)} must be a finite number")
    return float(data)


def _read_log_prob(data: Any) -> float:
    """Read a log probability of single precision; null means -inf, which JSON lacks."""
    value = -math.inf if data is None else _read_float(data)
    if data is not None and abs(value) > _FLOAT32_MAX:
        raise RecordingError(f"{_short(data)} must be a number in the range of float32")
    return value


def _read_scalar(data: Any) -> Any:
    if not isinstance(data, _SCALARS):
        raise RecordingError(f"{_short(data)} must be a number or a string")
    return data


def _read_literal(values: tuple[Any, ...], data: Any) -> Any:
    if type(data) is not str or data not in values:
        raise RecordingError(f"{_short(data)} must be one of {values}")
    return data


def _read_enum(kind: type[Enum], data: Any) -> Enum:
    """Read an enum by name or by number."""
    members = kind.__members__ if type(data) is str else {m.value: m for m in kind}
    if type(data) not in (str, int) or data not in members:
        raise RecordingError(f"{_short(data)} must be a {kind.__name__}")
    return members[data]


def _read_array(data: Any) -> np.ndarray:
    """Read an int32 array with one or two dimensions."""
    try:
        array = np.array(_read_list(data))
    except (ValueError, OverflowError) as error:
        raise RecordingError(f"{_short(data)} must be an array: {error}") from error
    if array.size and not (
        array.dtype.kind == "i" and _INT32.min <= array.min() <= array.max() <= _INT32.max
    ):
        raise RecordingError(f"{_short(data)} must contain only int32 numbers")
    if array.ndim > 2:
        raise RecordingError(f"an array has {array.ndim} dimensions, expected 1 or 2")
    return array.astype(np.int32)


def _refuse(data: Any) -> Any:
    raise RecordingError(f"{_short(data)}: a recording must not have a value here")


_READERS: dict[Any, _Read] = {
    Any: _read_scalar,
    np.ndarray: _read_array,
    RequestProcessor: lambda data: read_post_processor(value_from_plain(data)),
    HostRows: lambda data: HostRows(None, _read_str(data)),
    BaseException: lambda data: RecordedError(_read_str(data)),
    float: _read_float,
    **{kind: functools.partial(_read_exactly, kind) for kind in (int, bool, type(None), str)},
}
