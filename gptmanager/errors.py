"""The error classes of the library.

An error's class states the cause, such as the configuration, one request, a scheduler, a callback,
or a manager that has ended. An error response begins with the class's name, so that a host can
distinguish causes without parsing the text. The functions at the end quote values, paths and errors
of other libraries in messages.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import reprlib
from pathlib import Path
from typing import Any

_LINE_BREAK = re.compile(r"\n\s*")
_MAX_QUOTED, _MAX_SUMMARY = 200, 500  # characters of a quoted value, of another library's error
_MAX_WRITTEN = 100_000  # characters of a value that is written out before it is cut
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class GptManagerError(Exception):
    """The base class of all errors of this library."""


class ConfigError(GptManagerError, ValueError):
    """A checkpoint, an option or an argument cannot be used."""


class RequestError(GptManagerError):
    """Something is wrong with one request; all other requests continue."""


class InvalidRequestError(RequestError):
    """An input of the request is unknown, missing, misshapen, or out of its range."""


class DuplicateRequestIdError(RequestError):
    """The id belongs to a request that has not had its final response yet."""


class CapacityError(RequestError):
    """A resource, such as the KV cache or the queue, does not suffice for the request."""


class AdapterError(RequestError):
    """A LoRA adapter is not cached, does not fit, or does not match the model."""


class LogitsError(RequestError):
    """No token can be chosen: the logits of a row hold NaN or +inf, or everything is banned."""


class SchedulerError(GptManagerError):
    """A scheduler raised, or returned requests that it must not return."""


class CallbackError(GptManagerError):
    """A callback of the host raised, or returned what its contract does not allow."""


class StepError(GptManagerError):
    """An iteration failed, which ends all started requests, or a response could not be created."""


class ManagerDeadError(GptManagerError):
    """The manager's loop has ended; `__cause__` is the error that ended it."""


class SleepError(GptManagerError):
    """`sleep` was called while the manager is asleep, or `wake` while it is not."""


class RankError(GptManagerError):
    """A rank has died, hangs, or has other options or decisions than rank 0."""


class RecordingError(GptManagerError, ValueError):
    """A recording cannot be written, read, or understood, or contradicts itself."""


class JournalError(GptManagerError, ValueError):
    """A journal is damaged, or cannot be read or written."""


def response_text(error: BaseException) -> str:
    """Return the text of an error response: the class's name, then the error's text.

    Surrogates, for which UTF-8 has no bytes, are written as escapes.
    """
    name = type(error).__name__
    try:
        text = str(error)
        return f"{name}: {text}".encode(errors="backslashreplace").decode() if text else name
    except BaseException:  # noqa: B036 - its own `__str__` may fail
        return f"{name}: (its text cannot be read)"


def error_class(text: str) -> str:
    """Return the name of the class in a text of `response_text`; "" for an empty text."""
    return text.partition(":")[0]


def write_error(what: str, error: OSError) -> GptManagerError:
    """Return the error for a file that cannot be written: a ConfigError if its path is the cause.

    With a full or broken disk, the same call may succeed later. `what` names the file.
    """
    text = f"{what} cannot be written: {error.strerror}"
    return GptManagerError(text) if error.errno in _OF_DISKS else ConfigError(text)


class _Short(reprlib.Repr):
    """Writes only the first items of a long value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3

    def repr_dict(self, given: dict[Any, Any], level: int) -> str:
        """Write a dict as the base class does, but without sorting all its keys first."""
        some = dict(itertools.islice(given.items(), self.maxdict + 1))
        return super().repr_dict(some, level)


_SHORT = _Short()


def quoted(value: Any) -> str:
    """Return a value as an error message quotes it, cut to about 200 characters.

    A very long value is cut before it is written out, because the cost of an error must not grow
    with the size of the value that a client has sent.
    """
    if isinstance(value, str) and len(value) > _MAX_WRITTEN:
        start = _written(value[:_MAX_QUOTED])[:_MAX_QUOTED]
        return f"{start}... ({len(value) + 2} characters)"
    if _size(value, _MAX_WRITTEN) > _MAX_WRITTEN:
        return f"{_SHORT.repr(value)[:_MAX_QUOTED]} (more than {_MAX_WRITTEN} characters)"
    return _cut(_written(value), _MAX_QUOTED)


def _written(value: Any) -> str:
    try:
        if isinstance(value, str):
            return repr(value) if value.isprintable() else ascii(value)
        return _LINE_BREAK.sub(" ", repr(value))  # arrays and tensors are written in lines
    except Exception:  # nested too deep, an integer of too many digits, or an object of a host
        return f"(a value of type {type(value).__name__} that cannot be written out)"


def _size(value: Any, limit: int) -> int:
    """Return how many characters and items a value has. Stop counting above `limit`."""
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


def error_summary(error: BaseException) -> str:
    """Return another library's error text on one line, cut: the text may quote a whole file."""
    return _cut(" ".join(str(error).split()), _MAX_SUMMARY)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def quoted_path(path: Path) -> str:
    """Return the path unchanged if it is printable and short, otherwise quoted."""
    text = os.fspath(path)
    return text if text.isprintable() and len(text) < 4096 else quoted(text)
