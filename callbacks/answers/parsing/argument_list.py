"""Parses calls with a list of arguments, which commas separate, and which are not JSON."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection
from typing import ClassVar

from gptmanager.callbacks.answers.parsing.answer_parts import Arguments, Found
from gptmanager.callbacks.answers.parsing.call_parser import CallParser, State, read_header
from gptmanager.callbacks.answers.parsing.python_values import LiteralScan, as_json


class ArgumentListParser(CallParser):
    """A parser that returns each argument when it is complete.

    `scan_class` finds the end of each. The bracket after the last argument ends the call.
    """

    scan_class: ClassVar[type[LiteralScan]] = LiteralScan

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._num_values = 0
        self._scan = self.scan_class()

    @abstractmethod
    def _header(self) -> tuple[str | re.Pattern[str], ...]:
        """Return the parts of a call up to its arguments, see `read_header`."""

    @abstractmethod
    def _argument(self, text: str, index: int) -> tuple[str, str]:
        """Return the name and the value, as JSON, of argument `index` of a call."""

    def _read_header(self, found: list[Found]) -> bool:
        header = read_header(self._text, self._header())
        if header == ("", 0):
            return False
        if header is None or header[0] not in self._names:
            return self._reject_call(found)
        self._take(header[1])
        self._call(header[0], found)
        self._num_values, self._scan, self._state = 0, self.scan_class(), State.ARGUMENTS
        return True

    def _read_arguments(self, found: list[Found]) -> bool:
        end = self._scan.take(self._text)
        if end is None:
            return False
        piece, last = self._take(end), self._take(1)
        self._scan = self.scan_class()
        index = self.num_calls - 1
        if piece.strip():
            name, value = self._argument(piece, self._num_values)
            before = ", " if self._num_values else "{"
            found.append(Arguments(index, f"{before}{as_json(name)}: {value}"))
            self._num_values += 1
        if last != ",":
            found.append(Arguments(index, "}" if self._num_values else "{}"))
            self._state = State.BETWEEN
        return True
