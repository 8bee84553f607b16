"""`Warnings`: collects warnings about an answer for the response header `Warning`.

The header has a limited number of warnings, each of limited length.
"""

from __future__ import annotations

from collections.abc import Iterable

from gptmanager.errors import quoted

_MAX_WARNINGS = 8  # warnings in one answer
_MAX_LENGTH = 300  # characters of each warning: proxies allow a few kilobytes of headers
_MAX_NAMES, _MAX_NAME_LENGTH = 10, 64


class Warnings:
    """The warnings of one request, collected before the head of its response is written.

    A warning may quote a client's input: characters that a header cannot contain are replaced.
    """

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}  # an ordered set
        self._num_left_out = 0

    def add(self, text: str) -> None:
        """Add `text` to the header. After the 8th warning, further ones are only counted."""
        safe = _safe(text)
        if len(self._texts) < _MAX_WARNINGS or safe in self._texts:
            self._texts[safe] = None
        else:
            self._num_left_out += 1

    def add_ignored(self, names: Iterable[str], why: str) -> None:
        """Add one warning that lists the ignored fields `names`, if any, with the reason `why`."""
        listed = list(names)
        if listed:
            shown = ", ".join(_name(name) for name in listed[:_MAX_NAMES])
            more = len(listed) - _MAX_NAMES
            self.add(f"{why}: {shown}{f' and {more} more' if more > 0 else ''}")

    def headers(self) -> dict[str, str]:
        """Return the response header as a mapping, which is empty without warnings."""
        texts = list(self._texts)
        if self._num_left_out:
            texts.append(f"and {self._num_left_out} more warnings")
        listed = ", ".join(f'299 - "{text}"' for text in texts)
        return {"Warning": listed} if listed else {}


def _name(name: str) -> str:
    return (
        name
        if name.isidentifier() and len(name) <= _MAX_NAME_LENGTH
        else quoted(name[:_MAX_NAME_LENGTH])
    )


def _safe(text: str) -> str:
    """Return `text`, cut to `_MAX_LENGTH`, as printable ASCII escaped for a quoted string."""
    cut = text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
    plain = "".join(letter if " " <= letter <= "~" else "?" for letter in cut)
    return plain.replace("\\", "\\\\").replace('"', '\\"')
