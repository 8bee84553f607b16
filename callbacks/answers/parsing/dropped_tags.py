"""Drops tags that some models write around the content of an answer."""

from __future__ import annotations

import re

from gptmanager.callbacks.answers.parsing.answer_parts import Content, Found
from gptmanager.callbacks.answers.parsing.text_scan import num_tag_letters


class DroppedTags:
    """Receives the parts of an answer, and returns them without `tags` in the content."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self._tags = tags
        self._pattern = re.compile("|".join(map(re.escape, tags)))
        self._held: Content | None = None  # content that may begin a tag

    def push(self, found: list[Found]) -> list[Found]:
        """Add the next parts; return the parts that are now certain."""
        if not self._tags:
            return found
        kept: list[Found] = []
        for one in found:
            if not isinstance(one, Content):
                kept += [*self.flush(), one]
                continue
            if self._held is not None:
                one = Content(self._held.text + one.text, self._held.begin, one.end)
                self._held = None
            kept += self._pieces(one)
        return kept

    def flush(self) -> list[Found]:
        """Return the content that was held back, unless it is a tag that begins a longer one."""
        held, self._held = self._held, None
        return [] if held is None or held.text in self._tags else [held]

    def _pieces(self, content: Content) -> list[Found]:
        """Return the parts of `content` between tags; hold back an end that may begin a tag."""
        text, at = content.text, 0
        held = max(num_tag_letters(text, tag) for tag in self._tags)
        pieces: list[Found] = []
        for end, after in [*(it.span() for it in self._pattern.finditer(text)), (len(text), 0)]:
            end = min(end, len(text) - held)
            if at < end:
                pieces.append(Content(text[at:end], content.begin + at, content.begin + end))
            at = after
        if held:
            begin = content.end - held
            self._held = Content(text[-held:], begin, content.end)
        return pieces
