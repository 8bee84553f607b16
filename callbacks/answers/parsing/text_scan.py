"""Finds tags, and the ends of JSON objects, in a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

_ENDS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}  # ends of strings, and escapes


class ObjectScan:
    """Finds the end of a JSON object in a text that arrives in pieces.

    `breaks` are the brackets and quotation marks of its syntax, which may be that of Python.
    """

    breaks: ClassVar[re.Pattern[str]] = re.compile(r'["{}\[\]]')

    def __init__(self) -> None:
        self.quote = ""  # the quote of the string that the scan is in
        self._depth = 0
        self._is_escaped = False

    def take(self, text: str, depth: int = 0) -> int | None:
        """Scan the next piece; return the index after the closing bracket that reduces the depth to
        `depth`.

        The depth is the number of open brackets. The result is None if the piece does not have this
        closing bracket.
        """
        at = 0
        if self._is_escaped and text:
            self._is_escaped, at = False, 1
        while True:
            found = (_ENDS[self.quote] if self.quote else self.breaks).search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == "\\":
                if at == len(text):
                    self._is_escaped = True
                at += 1
            elif found[0] in _ENDS:
                self.quote = "" if self.quote else found[0]
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == depth and found[0] in "}]":
                    return at


def num_tag_letters(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is an incomplete beginning of `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def first_tag(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """Return the index of the tag that occurs first in `text`, and this tag, or (-1, "")."""
    return min(((text.find(tag), tag) for tag in tags if tag in text), default=(-1, ""))
