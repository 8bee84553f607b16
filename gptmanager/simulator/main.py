"""Run `gptmanager simulate`: simulate a load under each scheduling policy, print the figures."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import orjson

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.errors import ConfigError, GptManagerError
from gptmanager.recorder import Recorder
from gptmanager.recorder.recording_file import Recording, located, read_recording
from gptmanager.replay.main import imported
from gptmanager.simulator.comparison import Machine, hypothetical, variant
from gptmanager.simulator.cost_model import CostModel, fit
from gptmanager.simulator.figures import Figures
from gptmanager.simulator.load import Load, RecordedLoad, SyntheticLoad
from gptmanager.simulator.report import Comparison
from gptmanager.simulator.simulation import simulate
from gptmanager.terminal.arguments import check_distinct
from gptmanager.terminal.printable import printable
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.tables import print_report

_SYNTHETIC = ("num_requests", "prompt_len", "output_len", "rate", "seed")  # fields of SyntheticLoad


def main(options: argparse.Namespace) -> int:
    """Run the command, and return its exit status."""
    paths = _record_paths(options)
    recording = None if options.recording is None else read_recording(options.recording)
    machine = Machine(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Machine)}
    )
    if recording is None:
        synthetic = _synthetic(options)
        load: Load = synthetic
        blueprint = hypothetical(machine, synthetic.prompt_len[1] + synthetic.output_len[1])
    else:
        load = _recorded(options, recording)
        blueprint = recording.header.blueprint
    cost = _cost(options, recording)
    columns = {policy.name.lower(): variant(blueprint, policy, machine)
               for policy in options.policies}  # fmt: skip
    if options.scheduler:
        policy = blueprint.scheduler.capacity_scheduler_policy
        columns[options.scheduler] = variant(
            blueprint, policy, machine, imported(options.scheduler)
        )
    started = time.perf_counter()
    bars, figures = ProgressBars(options.region), {}
    for name, column in columns.items():
        on_progress = _progress_of(bars, printable(name), len(load.arrivals))
        figures[name] = _simulate_one(column, load, cost, paths[name], on_progress)
    bars.close()
    taken = time.perf_counter() - started
    queue = load.queue if isinstance(load, RecordedLoad) else None
    comparison = Comparison(figures, cost, taken, recording, queue)
    print_report(comparison.plain(), comparison.parts(), as_json=options.json)
    return 0


def _record_paths(options: argparse.Namespace) -> dict[str, Path | None]:
    """Return column -> the file for its recording: `--record`, if there is only one column.

    With several columns, the column's name is added to the stem of `--record`. If the name is
    "module:class", only the part after the last colon is added. Raise ConfigError if a recording
    would overwrite another one, or a file that the command reads.
    """
    names = [policy.name.lower() for policy in options.policies]
    names += [options.scheduler] if options.scheduler else []
    record: Path | None = options.record
    paths: dict[str, Path | None] = dict.fromkeys(names, record)
    written: dict[str, Path | None] = {"--record": record}
    if record is not None and len(names) > 1:
        paths = {
            name: record.with_name(f"{record.stem}.{name.rpartition(':')[2]}{record.suffix}")
            for name in names
        }
        written |= {f"--record (of {name})": path for name, path in paths.items()}
    is_file = options.cost is not None and "=" not in options.cost
    read = options.recording, options.fit, Path(options.cost) if is_file else None
    for option, path in zip(("--recording", "--fit", "--cost"), read, strict=True):
        check_distinct({option: path, **written})
    return paths


def _progress_of(bars: ProgressBars, name: str, total: int) -> Callable[[int], None]:
    """Return a function to call with the number of requests that ended since the last call."""
    ended = 0

    def update(more: int) -> None:
        nonlocal ended
        ended += more
        bars.update(name, ended, total)

    return update


def _synthetic(options: argparse.Namespace) -> SyntheticLoad:
    if options.arrivals is not None:
        raise ConfigError(f"--arrivals {options.arrivals} needs --recording")
    return SyntheticLoad(**{"num_requests": 1000, **_given(options)})


def _recorded(options: argparse.Namespace, recording: Recording) -> RecordedLoad:
    for name in _given(options):
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} needs a synthetic load: pass either it or --recording")
    with located(str(options.recording)):
        return RecordedLoad(recording, options.arrivals or "time")


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given options that describe a synthetic load, by field of `SyntheticLoad`."""
    given = {name: getattr(options, name) for name in _SYNTHETIC}
    return {name: value for name, value in given.items() if value is not None}


def _simulate_one(
    blueprint: Blueprint,
    load: Load,
    cost: CostModel,
    path: Path | None,
    on_progress: Callable[[int], object],
) -> Figures:
    """Simulate one column of the report. If `path` is not None, record the run to `path`."""
    recorder = None if path is None else Recorder(path)
    where: AbstractContextManager[None] = nullcontext()
    if isinstance(load, RecordedLoad) and blueprint.scheduler.create_scheduler is None:
        where = located(f"{load.name}: the recorded load")
    with where:
        figures = simulate(blueprint, load, cost, recorder=recorder, on_progress=on_progress)
    if recorder is not None and recorder.error:
        raise GptManagerError(f"--record {path}: {recorder.error}")
    return figures


def _cost(options: argparse.Namespace, recording: Recording | None) -> CostModel:
    if options.fit is not None:
        recording = read_recording(options.fit)
    if options.cost is None:
        if recording is None:
            return CostModel()
        with located(str(options.fit or options.recording)):
            return fit(recording)
    if "=" in options.cost:
        return CostModel.parse(options.cost)
    try:
        values = orjson.loads(Path(options.cost).read_bytes())
        return CostModel.from_plain(values)
    except OSError as error:
        raise ConfigError(f"--cost {options.cost}: {error.strerror}") from error
    except (orjson.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"--cost {options.cost}: {error}") from error
