"""What a terminal would show: as much of one as the commands use."""

from __future__ import annotations

import re
import unicodedata

_TOKENS = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\s\S])")


class Screen:
    """Lines that wrap at `width`; nothing scrolls away."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.cells: list[list[str]] = [[]]
        self.line = self.column = 0
        self.shows_cursor = True
        self.styles: list[str] = []

    @property
    def lines(self) -> list[str]:
        return ["".join(cells).rstrip() for cells in self.cells[: self.line + 1]]

    def feed(self, text: str) -> None:
        for argument, command, character in _TOKENS.findall(text):
            if command:
                self._control(argument, command)
            else:
                self._put(character)

    def _control(self, argument: str, command: str) -> None:
        if command == "A":
            self.line -= int(argument or 1)
            assert self.line >= 0, "above the top"
        elif command == "K":
            assert argument == "2"
            self.cells[self.line] = []
        elif command in "hl" and argument == "?25":
            self.shows_cursor = command == "h"
        elif command == "m":
            self.styles.append(argument)
        else:
            raise AssertionError(f"unknown: {argument}{command}")

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        else:
            assert character.isprintable(), f"{character!r} steers the terminal"
            self._write(character)

    def _write(self, character: str) -> None:
        if unicodedata.combining(character):
            self.cells[self.line][self.column - 1] += character
            return
        width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if self.column + width > self.width:
            self.column = 0
            self._down()
        cells = self.cells[self.line]
        cells.extend(" " * (self.column - len(cells)))
        cells[self.column : self.column + width] = [character] + [""] * (width - 1)
        self.column += width

    def _down(self) -> None:
        self.line += 1
        if self.line == len(self.cells):
            self.cells.append([])
