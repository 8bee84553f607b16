"""Texts from anywhere, as a terminal and a page may show them."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """On one line, and without anything that could steer a terminal."""
    return text if text.isprintable() else "".join(map(_shown, text))


def printable_lines(text: str) -> str:
    """Make a text printable, like `printable`, but keep its line ends."""
    return "\n".join(map(printable, text.split("\n")))


def _shown(character: str) -> str:
    if character == "\n":
        return "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    if character.isprintable():
        return character
    category = unicodedata.category(character)
    if category == "Zs" or character == "\t":
        return " "
    # formatting is invisible, but could turn the direction of what follows
    return "" if category == "Cf" or character == "\r" else "\N{REPLACEMENT CHARACTER}"
