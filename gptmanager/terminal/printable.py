"""Make text from any source safe to show on a terminal or a page."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"


def printable(text: str) -> str:
    """Return a text on one line, without control characters."""
    return text if text.isprintable() else "".join(map(_replacement, text))


def printable_lines(text: str) -> str:
    """Return a text without control characters other than line ends."""
    return "\n".join(map(printable, text.split("\n")))


def printable_text(text: str) -> str:
    """Return a text for a terminal, without control characters other than line ends and tabs.

    Characters that join emoji and letters stay.
    """
    return "".join(
        character if character in _KEPT or character.isprintable() else _replacement(character)
        for character in text
    )


def _replacement(character: str) -> str:
    if character == "\n":
        return "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    if character.isprintable():
        return character
    category = unicodedata.category(character)
    if category == "Zs" or character == "\t":
        return " "
    # format characters are invisible, but could reverse the direction of the text after them
    return "" if category == "Cf" or character == "\r" else "\N{REPLACEMENT CHARACTER}"
