"""Files of a checkpoint, which somebody else wrote: what they are is asked before they are read.

Decides how large and how deep such a file may be; knows nothing of what it says.
"""

from __future__ import annotations

import itertools
import json
import os
import reprlib
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptmanager.errors import ConfigError

_MAX_JSON_BYTES = 64 << 20
_MAX_DEPTH = 64
_TOO_DEEP = f"its values are nested deeper than {_MAX_DEPTH} levels"
_MAX_SHOWN, _MAX_TOLD = 200, 500  # characters of a value in an error, of another error
_MAX_WRITTEN = 100_000  # characters of a value that is written out before it is cut


class _Short(reprlib.Repr):
    """Write out the first items of what is long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3

    def repr_dict(self, given: dict[Any, Any], level: int) -> str:
        """Show a dict like the base class, which would sort all keys first."""
        some = dict(itertools.islice(given.items(), self.maxdict + 1))
        return super().repr_dict(some, level)


_SHORT = _Short()


def shown(value: Any) -> str:
    """Return a value as an error shows it. One that is long is cut before it is written out: what
    an error costs must not grow with what somebody has sent.
    """
    if isinstance(value, str) and len(value) > _MAX_WRITTEN:
        start = _written(value[:_MAX_SHOWN])[:_MAX_SHOWN]
        return f"{start}... ({len(value) + 2} characters)"
    if _size(value, _MAX_WRITTEN) > _MAX_WRITTEN:
        return f"{_SHORT.repr(value)[:_MAX_SHOWN]} (more than {_MAX_WRITTEN} characters)"
    return _cut(_written(value), _MAX_SHOWN)


def _written(value: Any) -> str:
    try:
        return ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except Exception:  # nested too deep, an integer of too many digits, or an object of a host
        return f"a {type(value).__name__} that cannot be shown"


def _size(value: Any, limit: int) -> int:
    """Return how many letters and items a value has, counted until they are more than `limit`."""
    size, left = 0, [value]
    while left and size <= limit:
        one = left.pop()
        if isinstance(one, (str, bytes)):
            size += len(one)
        elif isinstance(one, (dict, list, tuple)):
            size += 1 + len(one)
            if size <= limit:
                left.extend(one)
                left.extend(one.values() if isinstance(one, dict) else ())
    return size


def told(error: BaseException) -> str:
    """Return another library's error text on one line, shortened: it may quote a whole file."""
    return _cut(" ".join(str(error).split()), _MAX_TOLD)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def check_file(path: Path, max_bytes: int | None = None) -> int:
    """Its size in bytes. ConfigError unless it is a file that ends.

    A FIFO would be waited for without an end, as would some files of /proc, which say that they are
    empty.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ConfigError(f"{shown_path(path)} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: no name that a file can have
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown_path(path)} cannot be read: {why}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a FIFO, a socket or a device"
        raise ConfigError(f"{shown_path(path)} is {kind}: a file is needed")
    if not status.st_size:
        raise ConfigError(f"{shown_path(path)} is empty")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ConfigError(
            f"{shown_path(path)} has {status.st_size} bytes: at most {max_bytes} are read"
        )
    return status.st_size


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds, of at most 64 MiB. ConfigError says what it is instead."""
    size = check_file(path, _MAX_JSON_BYTES)
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(size), object_pairs_hook=_object)
    except OSError as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"{shown_path(path)}: {_TOO_DEEP}") from None
    except ConfigError as error:
        raise ConfigError(f"{shown_path(path)}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{shown_path(path)} is not JSON: {told(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{shown_path(path)}: an object is needed")
    check_depth(shown_path(path), content)
    return content


def check_depth(where: str, value: Any) -> None:
    """ConfigError for what code that recurses could not walk through."""
    level: Iterable[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner = [child for parent in level for child in _children(parent)]
        level = {id(child): child for child in inner}.values()  # a host's may hold one twice
        if not level:
            return
    raise ConfigError(f"{where}: {_TOO_DEEP}")


def shown_path(path: Path) -> str:
    """Return the path as it is if it is printable and short, else quoted."""
    text = os.fspath(path)
    return text if text.isprintable() and len(text) < 4096 else shown(text)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of them; a name that stands for two values has no meaning."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and found[name] != value:
            raise ConfigError(f"{shown(name)} is there twice, and the values differ")
        found[name] = value
    return found
