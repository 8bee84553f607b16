"""A recording as values, and its file, which consists of versioned JSON lines.

The first line is the header. After it the file has one line for each iteration that had work, and
at most one line that says how the run ended. docs/recording.md describes every key.
"""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, NamedTuple

import orjson

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.environment import distribution
from gptmanager.environment.legible_json import legible
from gptmanager.errors import GptManagerError, RecordingError, response_text
from gptmanager.lifecycle.log import logger
from gptmanager.loop.token_loop import LoopState
from gptmanager.recorder.limits import Bounds, checked_blueprint, without_code
from gptmanager.recorder.requests import Allowance
from gptmanager.recorder.values import Decoder, field_names, to_json
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import Intake, Schedule, StepResult

FORMAT = "gptmanager.recording"
VERSION = 5
_ONE_END_ID = 4  # like 5, but sampling parameters have `end_id` (-1 if unset), not `end_ids`
_ONE_PENDING = 3  # like 4, but `pending` of a state is one schedule or null, not a list

_LONGEST_LINE = 1 << 30  # bytes
# number of values by which each byte of the file increases the `Allowance`
_UNFOLDED_PER_BYTE = 16


class End(NamedTuple):
    """A final response. `reason` is a name of FinishReason, or "ERROR" with the message `error`."""

    request_id: int
    reason: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of the run. `reason` is "drained", "aborted", or "failed".

    `error` is the message of a failed run.
    """

    reason: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a recording, which describes the recorded loop.

    `blueprint` has options, sizes and policy; of a custom scheduler it has only the name.
    `library` is the version of the library that wrote the file. `fields` has the names of the
    fields of each named tuple in the file. `state` is the state of the loop before the first
    recorded iteration; None for a new loop.
    """

    blueprint: Blueprint
    version: int = VERSION
    library: str = ""
    fields: Mapping[str, list[str]] = field(default_factory=dict)
    state: LoopState | None = None


@dataclass(slots=True)
class Iteration:
    """One iteration of the loop that had work. It changes only while it is being recorded.

    `index` counts from the start of the run. `num_active` requests were active before the intake.
    `schedule` is None if no request ran, or if the schedule was dropped. `kept` is False only if
    the schedule was dropped. `result` belongs to the schedule with the number `result_of`; with
    run-ahead this is an earlier schedule. If the iteration took several results, `result` is the
    last result, and `recalled` has the earlier results, each with the number of its schedule. The
    last `num_late` results were taken after the iteration, by a call of the host such as `sleep`.
    `ends` has the final responses; None if they are not recorded, as in a black box. `idle_turns`
    is the number of iterations without work since the previous recorded iteration; None if this
    number is not recorded. `recovered` is the state of the loop after an iteration that raised;
    None after other iterations.
    """

    index: int
    num_active: int
    intake: Intake
    schedule: Schedule | None = None
    kept: bool = True
    result_of: int | None = None
    result: StepResult | None = None
    ends: tuple[End, ...] | None = None
    idle_turns: int | None = None
    recovered: LoopState | None = None
    recalled: tuple[tuple[int, StepResult], ...] = ()
    num_late: int = 0

    @property
    def results(self) -> tuple[tuple[int, StepResult], ...]:
        """Return all results in order, each with the number of its schedule."""
        if self.result is None or self.result_of is None:
            return self.recalled
        return *self.recalled, (self.result_of, self.result)

    @property
    def is_empty(self) -> bool:
        """Return whether the intake has only its time, and nothing ran or was recovered."""
        outcome = self.schedule, self.result, self.recovered
        return outcome == (None, None, None) and self.intake == Intake(self.intake.now)

    def line(self) -> bytes:
        """Return the line of the file."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return to_json({"kind": "iteration", **values})


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole recorded run, or the last part of one.

    `name` is the name of its file. `lines` has the line number of each iteration in
    the file. The header is line 1.
    """

    header: Header
    iterations: tuple[Iteration, ...] = ()
    end: RunEnd | None = None
    name: str = "recording"
    lines: tuple[int, ...] = ()

    def where(self, iteration: int | None = None) -> str:
        """Return where the header, or `iterations[iteration]`, is: the file's name and the line."""
        if iteration is None:
            return f"{self.name}, line 1"
        line = self.lines[iteration] if iteration < len(self.lines) else iteration + 2
        return f"{self.name}, line {line}"

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first intake to the last result."""
        results = [result.now for iteration in self.iterations for _, result in iteration.results]
        return results[-1] - self.iterations[0].intake.now if results else 0.0


def make_header(blueprint: Blueprint, state: LoopState | None = None) -> dict[str, Any]:
    """Return the values of the first line of a new recording. The recording begins with `state`."""
    create = blueprint.scheduler.create_scheduler
    name = "" if create is None else getattr(create, "__qualname__", type(create).__name__)
    return {
        "kind": "header",
        "format": FORMAT,
        "version": VERSION,
        "library": distribution.VERSION,
        "blueprint": legible(
            replace(
                blueprint,
                params=without_code(blueprint),
                scheduler=replace(blueprint.scheduler, create_scheduler=None),
                custom_scheduler=name,
            )
        ),
        "fields": field_names(Iteration, LoopState),
        "state": state,
    }


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a whole recording. Raise RecordingError, with the line number if a line is invalid.

    A last line that a crash has cut off is dropped with a warning. The file may come from a
    stranger, so its values are never run as code, and its names are never imported.
    """
    try:
        with _open(path) as file:
            return read_lines(_lines(file, str(path)), str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except MemoryError as error:
        raise RecordingError(f"{path} needs more memory than is available") from error


def read_lines(lines: Iterable[bytes], name: str = "recording") -> Recording:
    """Read a recording from its lines, as `read_recording` does; messages contain `name`."""
    allowance = Allowance()
    values = _values(lines, name, allowance)
    _, first = next(values, (0, {}))
    with located(f"{name}, line 1"):
        header, decoder, bounds = _read_header(first, allowance)
    iterations: list[Iteration] = []
    numbers: list[int] = []
    end: RunEnd | None = None
    for number, value in values:
        kind = value.get("kind")
        with located(f"{name}, line {number}"):
            if end is not None:
                raise RecordingError("a line follows the end of the recording")
            if kind == "iteration":
                value["recovered"] = _upgraded(value.get("recovered"), header)
                iteration = decoder.decode(Iteration, value)
                bounds.check(iteration.intake, iteration.schedule)
                bounds.check_results([it for _, it in iteration.results], iteration.num_late)
                if iteration.index <= (iterations[-1].index if iterations else -1):
                    raise RecordingError(f"iteration {iteration.index} is out of order")
                iterations.append(iteration)
                numbers.append(number)
            elif kind == "end":
                end = decoder.decode(RunEnd, value)
            else:
                raise RecordingError(f"unknown kind {reprlib.repr(kind)}")
    return Recording(header, tuple(iterations), end, name, tuple(numbers))


@contextmanager
def located(where: str) -> Iterator[None]:
    """Raise a RecordingError with `where` if the block raises an error for a wrong value.

    A recording may come from a stranger, so any of its values may be wrong.
    """
    try:
        yield
    except MemoryError as error:
        raise RecordingError(f"{where}: it needs more memory than is available") from error
    except (GptManagerError, ArithmeticError, AssertionError, AttributeError, LookupError,
            RuntimeError, StopIteration, TypeError, ValueError) as error:  # fmt: skip
        text = error if isinstance(error, GptManagerError) else response_text(error)
        raise RecordingError(f"{where}: {text}") from error


def _open(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file. Other files are refused, because a device or a pipe may never end."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    file = open(number, "rb")
    if not stat.S_ISREG(os.fstat(number).st_mode):
        file.close()
        raise RecordingError(f"{path} must be a regular file")
    return file


def _lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise RecordingError(f"{name} has a line of more than {_LONGEST_LINE} bytes")
        yield line


def _values(
    lines: Iterable[bytes], name: str, allowance: Allowance
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and JSON object of each nonempty line; each line increases `allowance`."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in numbered:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if number == 1 or next(numbered, None) is not None:
                raise RecordingError(f"{name}, line {number} must be JSON: {error}") from error
            logger.warning("%s, line %d is truncated, so it is dropped", name, number)
            return
        if not isinstance(value, dict):
            raise RecordingError(f"{name}, line {number} must be a JSON object")
        allowance.left += _UNFOLDED_PER_BYTE * len(line)
        yield number, value


def _read_header(value: Mapping[str, Any], allowance: Allowance) -> tuple[Header, Decoder, Bounds]:
    if value.get("format") != FORMAT:
        raise RecordingError(f"not a recording: its first line must be a {FORMAT} header")
    version = value.get("version")
    if version not in (_ONE_PENDING, _ONE_END_ID, VERSION):
        raise RecordingError(
            f"it has format version {reprlib.repr(version)}, this library ({distribution.VERSION}) "
            f"reads versions {_ONE_PENDING} to {VERSION}: read it with the library that "
            f"wrote it ({reprlib.repr(value.get('library'))}), or record the run again"
        )
    names = Decoder({}).decode(dict[str, list[str]], value.get("fields"))
    upgrades = {} if version == VERSION else {SamplingParams: _with_end_ids}
    decoder = Decoder(names, allowance, upgrades)
    blueprint = checked_blueprint(decoder.decode(Blueprint, value.get("blueprint")))
    header = Header(
        blueprint=blueprint,
        version=version,
        library=decoder.decode(str, value.get("library", "")),
        fields=names,
    )
    state = decoder.decode(LoopState | None, _upgraded(value.get("state"), header))
    return replace(header, state=state), decoder, Bounds(blueprint)


def _upgraded(state: Any, header: Header) -> Any:
    """Return a state's JSON value in the current format."""
    if state is not None and header.version == _ONE_PENDING:
        index = header.fields["LoopState"].index("pending")
        state[index] = [] if state[index] is None else [state[index]]
    return state


def _with_end_ids(params: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters in the current format."""
    end_id = params.get("end_id", -1)
    return {**params, "end_ids": [] if end_id == -1 else [end_id]}
