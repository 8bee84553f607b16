"""Runs `gptmanager replay` with parsed arguments."""

from __future__ import annotations

import argparse
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gptmanager.errors import ConfigError, response_text
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay.replaying import EndedRequest, replay
from gptmanager.replay.request_table import write_table
from gptmanager.terminal.arguments import check_distinct
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.tables import print_report


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    recording = read_recording(options.recording)
    bars = ProgressBars(options.region)

    def track(iterations: Iterable[Any]) -> Iterator[Any]:
        for number, iteration in enumerate(iterations):
            bars.update("iterations", number, len(recording.iterations))
            yield iteration

    ended: list[EndedRequest] = []
    check_distinct({"FILE": options.recording, "--table": options.table})
    report = replay(
        recording,
        create_scheduler=imported(options.scheduler) if options.scheduler else None,
        track=track,
        on_end=ended.append,
    )
    bars.close()
    if options.table is not None:
        write_table(options.table, ended)
    divergence = report.divergence
    result = {
        "iterations": report.iterations,
        "compared": report.compared,
        "divergence": None if divergence is None else divergence.plain(),
        "broke_off": report.broke_off,
    }
    if divergence is not None:
        lines = [f"diverged after {report.iterations - 1} iterations\n{divergence}"]
    else:
        lines = [f"{report.iterations} iterations, {report.compared} compared: no divergence"]
        if report.broke_off:
            lines.append(f"the recorded run broke off in the last one: {report.broke_off}")
    print_report(result, lines, as_json=options.json)
    return 0 if divergence is None else 1


def imported(name: str) -> Callable[..., Any]:
    """Return a function that calls `MODULE:NAME` and raises ConfigError if the call fails.

    Raise ConfigError if `MODULE:NAME` does not exist or is not callable. Modules of the current
    folder are found, as with `python -m`.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"--scheduler {name}: expected MODULE:NAME, such as my_sched:make")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(f"--scheduler {name}: {response_text(error)}") from error
    if not callable(found):
        raise ConfigError(f"--scheduler {name}: {found!r} is not callable")

    def create(**options: Any) -> Any:
        try:
            return found(**options)
        except Exception as error:  # the user's callable may raise anything
            raise ConfigError(f"--scheduler {name}: {response_text(error)}") from error

    create.__qualname__ = getattr(found, "__qualname__", type(found).__name__)
    return create
