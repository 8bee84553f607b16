"""Reads the keys of `--api-key` and `--api-key-file`. Errors never quote a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gptmanager.errors import ConfigError, quoted_path

MAX_BYTES = 1 << 20
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class ApiKey:
    """A key that clients may send.

    `name`: the key's name in the log, empty if it has none. `max_requests`: how many requests with
    this key may run and wait at once; None means no limit.
    """

    value: str = field(repr=False)
    name: str = ""
    max_requests: int | None = None


def read_key(value: str) -> ApiKey:
    """Return the key of `--api-key`.

    Raises ConfigError if the key is empty, or if a header cannot carry the key.
    """
    _check("api_key", value)
    return ApiKey(value)


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file, which has either one key alone, or lines NAME KEY [MAX_REQUESTS].

    Blank lines and lines that begin with # are ignored. Raises ConfigError for anything else.
    """
    where = f"api_key_file = {quoted_path(path)}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it must be UTF-8"
        raise ConfigError(f"{where} cannot be read: {reason}") from None
    except ValueError as error:  # a path with a null character
        raise ConfigError(f"{where} cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{where} must have at most {MAX_BYTES} bytes")
    is_comment = text.lstrip().startswith("#")
    if "\n" not in text.strip("\r\n") and len(text.split()) <= 1 and not is_comment:
        value = text.rstrip("\r\n")
        _check(f"{where}: the key", value)
        return (ApiKey(value),)
    return tuple(_distinct(where, text))


def _distinct(where: str, text: str) -> Iterator[ApiKey]:
    names, values = set(), set()
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key = _of_words(f"{where}, line {number}", words)
        if key.name in names or key.value in values:
            what = "name" if key.name in names else "key"
            raise ConfigError(f"{where}, line {number}: the {what} is in the file twice")
        names.add(key.name)
        values.add(key.value)
        yield key
    if not names:
        raise ConfigError(f"{where} must have at least one key")


def _of_words(where: str, words: list[str]) -> ApiKey:
    if len(words) not in (2, 3):
        raise ConfigError(f"{where} must be NAME KEY [MAX_REQUESTS]")
    name, value, *rest = words
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name must be 1 to 64 letters, digits or ._@-")
    _check(f"{where}: the key", value)
    if rest and not (rest[0].isascii() and rest[0].isdecimal() and 1 <= len(rest[0]) <= 9):
        raise ConfigError(f"{where}: MAX_REQUESTS must be an integer from 1 to 999999999")
    most = int(rest[0]) if rest else None
    if most == 0:
        raise ConfigError(f"{where}: MAX_REQUESTS must be an integer from 1 to 999999999")
    return ApiKey(value, name, most)


def _check(where: str, key: str) -> None:
    if key == "":
        raise ConfigError(f"{where} is empty: leave it out to start the server without a key")
    if not (key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"{where} must be printable and must not begin or end with a space: a header cannot "
            "carry it otherwise"
        )
