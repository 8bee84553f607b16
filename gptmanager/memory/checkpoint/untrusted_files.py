"""Checks the kind and size of a checkpoint's files, which are not trusted, and reads JSON files.

The nesting depth of JSON values is limited, but their meaning is not checked.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptmanager.errors import ConfigError, error_summary, quoted, quoted_path

_MAX_JSON_BYTES = 64 << 20
_MAX_DEPTH = 64
_MAX_POINTER_BYTES = 1024
_LFS = b"version https://git-lfs"
_TOO_DEEP = f"its values are nested deeper than {_MAX_DEPTH} levels"


def check_file(path: Path, max_bytes: int | None = None) -> int:
    """Return the size of a file in bytes.

    Raises ConfigError unless `path` is a regular, nonempty file of at most `max_bytes`, and not a
    pointer of Git LFS. Reading a FIFO, or a file in /proc of reported size 0, could block forever.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ConfigError(f"{quoted_path(path)} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{quoted_path(path)} cannot be read: {why}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a FIFO, a socket or a device"
        raise ConfigError(f"{quoted_path(path)} is {kind}: it must be a file")
    if not status.st_size:
        raise ConfigError(f"{quoted_path(path)} is empty")
    if status.st_size < _MAX_POINTER_BYTES and _is_lfs_pointer(path):
        raise ConfigError(
            f"{quoted_path(path)} is a pointer of Git LFS, not the file: run `git lfs pull`"
        )
    if max_bytes is not None and status.st_size > max_bytes:
        raise ConfigError(
            f"{quoted_path(path)} has {status.st_size} bytes: the limit is {max_bytes}"
        )
    return status.st_size


def _is_lfs_pointer(path: Path) -> bool:
    """Return whether a small file is a pointer to a file that Git LFS has not fetched."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:  # the code that later reads the file reports the error
        return False


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of at most 64 MiB. Raises ConfigError for other content."""
    size = check_file(path, _MAX_JSON_BYTES)
    try:
        with path.open("rb") as file:
            return parse_object(quoted_path(path), file.read(size))
    except OSError as error:
        raise ConfigError(f"{quoted_path(path)} cannot be read: {error.strerror}") from error


def parse_object(where: str, content: bytes) -> dict[str, Any]:
    """Return the JSON object that is written in `content`. Raises ConfigError for other content."""
    try:
        found = json.loads(content, object_pairs_hook=_object)
    except RecursionError:
        raise ConfigError(f"{where}: {_TOO_DEEP}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error_summary(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: must be a JSON object")
    check_depth(where, found)
    return found


def check_depth(where: str, value: Any) -> None:
    """Raise ConfigError if `value` is nested deeper than 64 levels: too deep for recursive code."""
    level: Iterable[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner = [child for parent in level for child in _children(parent)]
        # A value may contain the same object many times: follow each object only once per level.
        level = {id(child): child for child in inner}.values()
        if not level:
            return
    raise ConfigError(f"{where}: {_TOO_DEEP}")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises ConfigError if a name occurs with different values."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and found[name] != value:
            raise ConfigError(f"{quoted(name)} occurs twice, with different values")
        found[name] = value
    return found
