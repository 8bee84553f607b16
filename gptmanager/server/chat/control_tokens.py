"""`ControlTokens`: texts of clients in a chat that never become control tokens.

A template writes its control tokens as text, and the texts of clients beside them. So what would
make a control token in a client's text is marked before the template is filled in; behind it, every
control token that is left is the template's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

_FIRST_MARK = 0xF0000  # of a plane for private use, in which no text has a meaning


class ControlTokens:
    """The special tokens of a tokenizer, by their texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().items()
        self._ids = {one.content: token for token, one in added if one.special and one.content}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = max(map(len, self._ids), default=0)
        firsts = sorted({text[0] for text in self._ids})
        self._marks = {first: chr(_FIRST_MARK + index) for index, first in enumerate(firsts)}
        self._unmarked = str.maketrans({mark: first for first, mark in self._marks.items()})

    def marked(self, value: Any) -> Any:
        """Return the same lists and objects, in whose texts no control token begins."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        return value

    def pieces(self, text: str) -> Iterator[str | int]:
        """Yield the parts of a template's text: ids of its control tokens, and what is plain."""
        at = 0
        for found in self._any.finditer(text):
            if at < found.start():
                yield text[at : found.start()].translate(self._unmarked)
            yield self._ids[found.group()]
            at = found.end()
        if at < len(text):
            yield text[at:].translate(self._unmarked)

    def _marked(self, text: str) -> str:
        """With a mark for the first letter of each control token, also of one that another text
        could complete.
        """
        text = self._any.sub(lambda found: self._marks[found[0][0]] + found[0][1:], text)
        for at in range(max(0, len(text) - self._longest), len(text)):
            rest = text[at:]
            if any(one.startswith(rest) for one in self._ids):
                text = text[:at] + self._marks[text[at]] + text[at + 1 :]
        return text
