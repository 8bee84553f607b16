"""The sampling options of `gptmanager run` and `gptmanager chat`.

The server's fields have the same names and limits, and take both from here.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from typing import NamedTuple

from gptmanager.errors import quoted
from gptmanager.terminal.arguments import integer, number

LEAST_TEMPERATURE = 1e-30  # the least that a manager samples with; less is 0


class SamplingValue(NamedTuple):
    """The name of a sampling value in a request, its limits, and the help of its option."""

    tensor: str
    low: float
    high: float
    help: str

    def read(self, text: str) -> float:
        """Read the value of an option."""
        low, high = self.low, self.high
        return number(
            text, f"a number from {low:g} to {high:g}", lambda value: low <= value <= high
        )

    def read_temperature(self, text: str) -> float:
        """Read a temperature."""
        found = self.read(text)
        return found if found >= LEAST_TEMPERATURE else 0.0

    def read_count(self, text: str) -> int:
        """Read an integer. Return 0, which is unlimited, for -1."""
        found = integer(text)
        if not self.low <= found <= self.high:
            need = f"must be an integer from {self.low} to {self.high}"
            raise ArgumentTypeError(f"{need}, got {quoted(text)}")
        return max(found, 0)


# by the names of the server's fields and of generation_config.json
SAMPLING_VALUES = {
    "temperature": SamplingValue("temperature", 0, 100, "0: always the most likely token"),
    "top_k": SamplingValue(
        "runtime_top_k", -1, 2**31 - 1, "sample from the N most likely tokens only; 0: from all"
    ),
    "top_p": SamplingValue(
        "runtime_top_p",
        *(0, 1),
        "sample only from the most likely tokens that together have this probability",
    ),
    "min_p": SamplingValue(
        "runtime_min_p",
        *(0, 1),
        "sample only from tokens with at least X times the probability of the most likely one",
    ),
    "repetition_penalty": SamplingValue(
        "repetition_penalty", 0.01, 100, "above 1: fewer repetitions"
    ),
    "presence_penalty": SamplingValue(
        "presence_penalty", -2, 2, "subtracted once from the logits of generated tokens"
    ),
    "frequency_penalty": SamplingValue(
        "frequency_penalty", -2, 2, "subtracted for each time that a token has been generated"
    ),
}


def add_sampling(parser: argparse.ArgumentParser, description: str) -> None:
    """Add an option for each sampling value. An option that is not given is None."""
    add = parser.add_argument_group("sampling", description).add_argument
    for name, value in SAMPLING_VALUES.items():
        read = {"temperature": value.read_temperature, "top_k": value.read_count}
        add(
            f"--{name.replace('_', '-')}",
            type=read.get(name, value.read),
            metavar="N" if name == "top_k" else "X",
            help=value.help,
        )


def given_sampling(options: argparse.Namespace) -> dict[str, float]:
    """Return the values of the options that are given, by the names of `SAMPLING_VALUES`."""
    found = {name: getattr(options, name) for name in SAMPLING_VALUES}
    return {name: value for name, value in found.items() if value is not None}
