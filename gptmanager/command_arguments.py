"""What a word on the command line must be; argparse shows what these raise."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


def span(text: str) -> tuple[int, int]:
    """`16:256`, or one number for both ends."""
    low, _, high = text.partition(":")
    ends = (positive(low), positive(high or low))
    if ends[0] > ends[1]:
        raise ArgumentTypeError(f"{text!r} does not rise")
    return ends


def natural(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"{text!r} is no folder")
    return Path(text)


def writable(text: str) -> Path:
    """A file that may be there or not, in a folder that is there: told before anything slow."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{str(path.parent)!r} is no folder")
    return path
