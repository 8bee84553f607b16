"""`Warnings`: what a client should know about its answer, as the header `Warning`.

Decides how much fits and which bytes are allowed. A refusal is an `ApiError` instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from gptmanager.errors import quoted

_MOST = 8  # warnings of one answer
_LONGEST = 300  # characters of each: proxies allow a few kilobytes of headers
_MOST_NAMES, _LONGEST_NAME = 10, 64


class Warnings:
    """The warnings of one request, collected before the head of its response is written.

    A text may quote what a client has sent: whatever cannot be in a header is replaced.
    """

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}  # in order, each once
        self._num_left_out = 0

    def add(self, text: str) -> None:
        """Report `text` in the header `Warning`. Beyond 8 warnings only their number is kept."""
        safe = _safe(text)
        if len(self._texts) < _MOST or safe in self._texts:
            self._texts[safe] = None
        else:
            self._num_left_out += 1

    def add_ignored(self, names: Iterable[str], why: str) -> None:
        """Report the fields `names`, which change nothing, and the reason, if there are any."""
        listed = list(names)
        if listed:
            told = ", ".join(_name(name) for name in listed[:_MOST_NAMES])
            more = len(listed) - _MOST_NAMES
            self.add(f"{why}: {told}{f' and {more} more' if more > 0 else ''}")

    def headers(self) -> dict[str, str]:
        """Return the header of a response; empty if nothing was added."""
        texts = list(self._texts)
        if self._num_left_out:
            texts.append(f"and {self._num_left_out} more warnings")
        listed = ", ".join(f'299 - "{text}"' for text in texts)
        return {"Warning": listed} if listed else {}


def _name(name: str) -> str:
    return (
        name if name.isidentifier() and len(name) <= _LONGEST_NAME else quoted(name[:_LONGEST_NAME])
    )


def _safe(text: str) -> str:
    """Return `text` as the inside of a quoted string of printable ASCII, cut where it is long."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    plain = "".join(letter if " " <= letter <= "~" else "?" for letter in cut)
    return plain.replace("\\", "\\\\").replace('"', '\\"')
