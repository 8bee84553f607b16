"""`ControlTokens`: prevents texts of clients in a chat from becoming control tokens.

A template writes both its control tokens and the client's texts as text. So the control tokens
in client texts are marked before the template is rendered. In the rendered text, every control
token without a mark belongs to the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

_FIRST_MARK = 0xF0000  # the first code point of a Unicode plane for private use


class ControlTokens:
    """The special tokens of a tokenizer, by their texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().items()
        self._ids = {one.content: token for token, one in added if one.special and one.content}
        longest_first = sorted(self._ids, key=len, reverse=True)
        any_token = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._any = re.compile(any_token)
        # matches letters one at a time: tokens may overlap, or be parts of others
        self._first_letter = re.compile(f"(?={any_token}).", re.DOTALL)
        self._longest = max(map(len, self._ids), default=0)
        firsts = sorted({text[0] for text in self._ids})
        self._marks = {first: chr(_FIRST_MARK + index) for index, first in enumerate(firsts)}
        self._unmarked = str.maketrans({mark: first for first, mark in self._marks.items()})

    def marked(self, value: Any) -> Any:
        """Return a copy of the value with control tokens marked in all its strings."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        return value

    def pieces(self, text: str) -> Iterator[str | int]:
        """Yield the parts of a rendered template: ids of control tokens, and unmarked text."""
        at = 0
        for found in self._any.finditer(text):
            if at < found.start():
                yield text[at : found.start()].translate(self._unmarked)
            yield self._ids[found.group()]
            at = found.end()
        if at < len(text):
            yield text[at:].translate(self._unmarked)

    def _marked(self, text: str) -> str:
        """Return `text` with a mark in place of the first letter of each control token.

        The beginning of a control token at the end of `text` is also marked, because the template
        could complete it.
        """
        text = self._first_letter.sub(lambda found: self._marks[found[0]], text)
        for at in range(max(0, len(text) - self._longest), len(text)):
            rest = text[at:]
            if any(one.startswith(rest) for one in self._ids):
                text = text[:at] + self._marks[text[at]] + text[at + 1 :]
        return text
