"""Convert and check the texts of command-line arguments. argparse shows the errors.

The functions of os.path are used, because `Path.is_dir` and others raise an error if a path is too
long, or is in a folder that this user cannot read, and `Path.resolve` if links form a loop.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from gptmanager.config import DEVICE
from gptmanager.environment.machine.local_models import find_model, missing_hint
from gptmanager.errors import ConfigError, quoted

_MAX_THREADS = 1024
_MAX_COUNT = 2**31 - 1


def text_argument(argument: str) -> str:
    """Read a text. Bytes that the locale cannot decode are lone surrogates, which are refused."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise ArgumentTypeError(f"must be a text in {encoding}, got {quoted(argument)}") from None
    return argument


def nonempty_text(argument: str) -> str:
    """Read a text of at least one character."""
    return text_argument(_nonempty(argument))


def positive(text: str) -> int:
    """Read an integer from 1 to 2^31 - 1."""
    number = int(text[:20]) if text.isdecimal() else 0
    if number < 1:
        raise ArgumentTypeError(f"must be a positive integer, got {text!r}")
    if number > _MAX_COUNT:
        raise ArgumentTypeError(f"must be at most {_MAX_COUNT}, got {text!r}")
    return number


def natural(text: str) -> int:
    """Read an integer of at least 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def integer(text: str) -> int:
    """Read any integer."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"must be an integer, got {quoted(text)}") from None


def threads(text: str) -> int:
    """Read a number of threads, from 1 to 1024."""
    if positive(text) > _MAX_THREADS:
        raise ArgumentTypeError(f"must be at most {_MAX_THREADS}, got {text!r}")
    return int(text)


def span(text: str) -> tuple[int, int]:
    """Read a range like `16:256`, or one number for both ends."""
    low, _, high = text.partition(":")
    if not (low + high).isdecimal():
        raise ArgumentTypeError(f"must be LOW:HIGH, or one number, got {text!r}")
    ends = (positive(low), positive(high or low))
    if ends[0] > ends[1]:
        raise ArgumentTypeError(f"must be LOW:HIGH with LOW at most HIGH, got {text!r}")
    return ends


def seconds(text: str) -> float:
    """Read a time in seconds, from 0 to less than 3600."""
    return number(text, "a time in seconds below 3600", lambda value: 0 <= value < 3600)


def journal_sync(text: str) -> float | str:
    """Read "always", "never", or a time in milliseconds, from 1 to 60000."""
    if text in ("always", "never"):
        return text
    return number(
        text, "always, never, or milliseconds from 1 to 60000", lambda value: 1 <= value <= 60e3
    )


def minutes(text: str) -> float:
    """Read a time in minutes, above 0 and below 10000."""
    return number(
        text, "a time in minutes above 0 and below 10000", lambda value: 0 < value < 10000
    )


def rate(text: str) -> float:
    """Read a finite number above 0."""
    return number(text, "a number above 0", lambda value: 0 < value < math.inf)


def _nonempty(argument: str) -> str:
    if not argument:
        raise ArgumentTypeError("must have at least one character, got ''")
    return argument


def number(text: str, need: str, is_valid: Callable[[float], bool]) -> float:
    """Read a number for which `is_valid` is true. `need` describes such numbers in the error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_valid(value):
        raise ArgumentTypeError(f"must be {need}, got {text!r}")
    return value


def words(text: str) -> tuple[str, ...]:
    """Read a list of words like `a,b`."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ArgumentTypeError(f"must be words like a,b, got {text!r}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Read a list of positive integers like `1,32`."""
    return tuple(positive(word) for word in words(text))


def device(text: str) -> str:
    """Read the name of a device."""
    if not DEVICE.fullmatch(text):
        raise ArgumentTypeError(f"must be cpu, cuda, cuda:N or emulator, got {text!r}")
    return text


def path_argument(text: str) -> Path:
    """Read a path, in any bytes. An empty one is refused: `Path("")` is the current folder."""
    return Path(_nonempty(text))


def folder(text: str) -> Path:
    """Read the path of an existing folder."""
    if not os.path.isdir(text):
        raise ArgumentTypeError(f"must be a folder, got {text!r}")
    return Path(text)


def named_folder(text: str) -> tuple[str, Path]:
    """Read NAME=DIR, where DIR is an existing folder. Return the name and the folder."""
    name, equals, path = text.partition("=")
    if not (name and equals and name.isprintable()):
        raise ArgumentTypeError(f"must be NAME=DIR, got {text!r}")
    return name, folder(path)


def checkpoint(text: str) -> Path:
    """Return the path of a checkpoint, given its path or a name that `gptmanager models` lists.

    The files of the checkpoint are not checked.
    """
    if os.path.isdir(text) or os.path.isfile(text):
        return Path(text)
    if (path := find_model(text)) is not None:
        return path
    raise ArgumentTypeError(
        "must be a folder, a file, or a name that `gptmanager models` lists, got "
        f"{quoted(text)}{missing_hint(text)}"
    )


def named_checkpoint(text: str) -> tuple[str | None, Path]:
    """Return the name by which a checkpoint is given, None if it is given as a path; and its path.

    The files of the checkpoint are not checked.
    """
    path = checkpoint(text)
    return None if path == Path(text) else text, path


def writable(text: str) -> Path:
    """Read the path of a file to write: in an existing folder, and not a folder itself.

    A wrong path is thus reported before slow work begins.
    """
    file = path_argument(text)
    if os.path.isdir(text):
        raise ArgumentTypeError(f"must be a file, got the folder {text!r}")
    if not os.path.isdir(file.parent):
        raise ArgumentTypeError(f"must be in an existing folder, got {text!r}")
    return file


def check_distinct(paths: dict[str, Path | None]) -> None:
    """Raise ConfigError if two options name the same file. `paths`: option -> its file."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None or (os.path.exists(path) and not os.path.isfile(path)):
            continue  # options may share /dev/null
        other = seen.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(f"{other} and {option} must be different files, not both {path}")
