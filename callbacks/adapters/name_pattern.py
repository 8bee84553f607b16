"""`NamePattern`: a regular expression of an adapter's config, matched in a bounded number of steps.

`NamePattern` supports the syntax that PEFT and its users write. A backtracking matcher such as `re`
takes exponential time for some patterns, and blocks the interpreter meanwhile. This matcher
simulates the pattern's automaton, and counts its own steps. A match of a part of the pattern may
end at several places in the text. The set of these places is an integer with one bit per place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_MAX_LENGTH = 10_000
_MAX_DEPTH = 50
_FOREVER = 1 << 31
_TOKEN = re.compile(
    r"(?P<one>\\[dDwWsS]|\\[^0-9A-Za-z]|\[\^?\]?(?:\\.|[^\\\]])*\]|[^\\()\[{}*+?|^$])"
    r"|(?P<begin>\^|\\A)|(?P<end>\$|\\Z)|(?P<bar>\|)|(?P<close>\))"
    r"|(?P<open>\((?:\?(?:[:=!]|P<\w+>))?)(?!\?)",
    re.DOTALL,
)
_REPEAT = re.compile(
    r"(?:(?P<sign>[*+?])|\{(?P<low>\d{0,9})(?P<comma>,(?P<high>\d{0,9}))?\})\??(?![*+?{])"
)
_SIGNS = {"*": (0, _FOREVER), "+": (1, _FOREVER), "?": (0, 1)}


class PatternError(ValueError):
    """The pattern is invalid, is not supported, or takes too many steps; the message says which."""


@dataclass(slots=True)
class Steps:
    """Counts the steps that several patterns take together, up to `limit`.

    A usual match takes dozens of steps; a million steps take a second.
    """

    limit: int
    taken: int = 0

    def take(self, count: int = 1) -> None:
        """Count `count` steps; raise PatternError beyond the limit."""
        self.taken += count
        if self.taken > self.limit:
            raise PatternError(f"the patterns of the file take more than {self.limit} steps")


@dataclass(slots=True)
class _Name:
    """The text to match. In a set of places, bit i is the place before character i."""

    text: str
    steps: Steps
    _letters: dict[re.Pattern[str], int] = field(default_factory=dict)

    def letters(self, one: re.Pattern[str]) -> int:
        """Return the set of places before the characters that `one` matches."""
        found = self._letters.get(one)
        if found is None:
            found = sum(1 << at for at, letter in enumerate(self.text) if one.fullmatch(letter))
            self._letters[one] = found
        return found


# matches one part of a pattern: (name, set of places before the part) -> set of places after it
_Step = Callable[[_Name, int], int]


class NamePattern:
    """A compiled pattern.

    The constructor raises PatternError if the pattern is invalid or not supported. `steps` counts
    the steps of compiling and matching; several patterns may share one `Steps`.

    Supported are characters, classes, groups, alternatives, repeats, `^`, `$` and look-ahead.
    Backreferences, look-behind, flags and atomic groups are not supported. `matches` agrees with
    `re.fullmatch(..., re.ASCII)`, except that `$` matches only at the very end.
    """

    def __init__(self, pattern: str, steps: Steps) -> None:
        if len(pattern) > _MAX_LENGTH:
            raise PatternError(f"it has {len(pattern)} characters, {_MAX_LENGTH} are allowed")
        steps.take(len(pattern))
        reader = _Reader(pattern)
        self._steps = steps
        self._step = reader.read_alternatives()
        reader.check_end()

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches all of `name`.

        Raise PatternError if matching exceeds the limit of `steps`.
        """
        return bool(self._step(_Name(name, self._steps), 1) >> len(name) & 1)


class _Reader:
    """Parses a pattern from left to right into step functions."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def check_end(self) -> None:
        if self._at < len(self._pattern):
            raise PatternError(f"unbalanced ')' at position {self._at}")

    def read_alternatives(self) -> _Step:
        """Parse up to the end of the pattern, or up to the bracket that closes the group."""
        sequences = [self._read_sequence()]
        while self._pattern.startswith("|", self._at):
            self._at += 1
            sequences.append(self._read_sequence())
        return sequences[0] if len(sequences) == 1 else _any_of(sequences)

    def _read_sequence(self) -> _Step:
        steps: list[_Step] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            steps.append(self._read_repeated())
        return _in_turn(steps)

    def _read_repeated(self) -> _Step:
        step = self._read_one()
        found = _REPEAT.match(self._pattern, self._at)
        if found is None:
            return step
        self._at = found.end()
        if found["sign"]:
            return _repeated(step, *_SIGNS[found["sign"]])
        low = int(found["low"] or 0)
        high = int(found["high"] or _FOREVER) if found["comma"] else low
        if low > high or not (found["low"] or found["high"]):
            raise PatternError(f"{found[0]} is not a repeat such as {{1,3}}")
        return _repeated(step, low, high)

    def _read_one(self) -> _Step:
        start = self._at
        found = _TOKEN.match(self._pattern, start)
        if found is None:
            raise PatternError(
                f"{self._pattern[start : start + 8]!r} at position {start} is not supported"
            )
        self._at = found.end()
        if found["one"]:
            try:
                return _letter(re.compile(found["one"], re.ASCII))
            except re.error as error:
                raise PatternError(f"{error}") from None
        if found["begin"]:
            return lambda name, places: places & 1
        if found["end"]:
            return lambda name, places: places & (1 << len(name.text))
        return self._read_group(found["open"], start)

    def _read_group(self, opening: str, start: int) -> _Step:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"more than {_MAX_DEPTH} groups are nested")
        inner = self.read_alternatives()
        if not self._pattern.startswith(")", self._at):
            raise PatternError(f"missing ')' for the group at position {start}")
        self._at += 1
        self._depth -= 1
        if opening in ("(?=", "(?!"):
            return _ahead(inner, is_wanted=opening == "(?=")
        return inner


def _letter(one: re.Pattern[str]) -> _Step:
    def step(name: _Name, places: int) -> int:
        name.steps.take()
        return (places & name.letters(one)) << 1

    return step


def _in_turn(steps: Sequence[_Step]) -> _Step:
    def step(name: _Name, places: int) -> int:
        name.steps.take()
        for one in steps:
            if not places:
                break
            places = one(name, places)
        return places

    return step


def _any_of(steps: Sequence[_Step]) -> _Step:
    def step(name: _Name, places: int) -> int:
        found = 0
        for one in steps:
            found |= one(name, places)
        return found

    return step


def _repeated(inner: _Step, low: int, high: int) -> _Step:
    def step(name: _Name, places: int) -> int:
        for _ in range(low):
            before, places = places, inner(name, places)
            name.steps.take()
            if places == before:  # further repetitions would not change the places
                break
        found = new = places
        for _ in range(high - low):
            if not new:
                break
            name.steps.take()
            new = inner(name, new) & ~found
            found |= new
        return found

    return step


def _ahead(inner: _Step, *, is_wanted: bool) -> _Step:
    """Return the step of a look-ahead: `(?=...)` if `is_wanted`, otherwise `(?!...)`."""

    def step(name: _Name, places: int) -> int:
        found = 0
        while places:
            lowest = places & -places
            places -= lowest
            name.steps.take()
            if bool(inner(name, lowest)) == is_wanted:
                found |= lowest
        return found

    return step
