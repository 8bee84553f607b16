"""A recording as frozen values, and its file: versioned JSON lines.

The first line is the header, then comes a line for each iteration, then at most one that tells
how the run ended. docs/recording.md describes every key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gptmanager.recorder.values import RecordingError, field_names, from_json, to_json
from gptmanager.step import Intake, Schedule, StepResult

logger = logging.getLogger("gptmanager")

FORMAT = "gptmanager.recording"
VERSION = 1


class End(NamedTuple):
    """A final response. `reason`: a name of FinishReason, or "ERROR"; then `error` is its text."""

    request_id: int
    reason: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run ended: `reason` "drained", "aborted", or "failed" with the text of the error."""

    reason: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Header:
    """What the recorded loop was made of.

    `blueprint`: options, sizes, policy; see `assembly.Blueprint`. `state`: the loop before the
    first iteration of the recording, None: nothing was active and no memory had ever been taken.
    """

    blueprint: Mapping[str, Any]
    version: int = VERSION
    library: str = ""
    fields: Mapping[str, list[str]] = field(default_factory=dict)
    state: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Iteration:
    """One turn of the loop that had something to do.

    `index` counts them from the start of the run. `num_active`: before the intake was taken in.
    `schedule` None: nobody ran, or, with `kept` False, it was not kept. `result` belongs to the
    schedule with the iteration number `result_of`: under run-ahead that of an earlier turn. `ends`
    None: not recorded, as in a black box. `idle_turns`: turns before it, since
    the last one that had something to do; nothing was active, and Get returned nothing. None: not
    recorded.
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


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole recorded run, or the end of one."""

    header: Header
    iterations: tuple[Iteration, ...] = ()
    end: RunEnd | None = None

    @property
    def duration_s(self) -> float:
        """From the first intake to the last result."""
        results = [turn.result.now for turn in self.iterations if turn.result is not None]
        return results[-1] - self.iterations[0].intake.now if results else 0.0


class Turn:
    """An iteration that is being recorded: what becomes an `Iteration` when it is read."""

    __slots__ = (
        "ends", "idle_turns", "index", "intake", "kept", "num_active", "result", "result_of",
        "schedule",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        num_active: int,
        intake: Intake,
        ends: list[End] | None,
        idle_turns: int = 0,
    ) -> None:
        self.index = index
        self.num_active = num_active
        self.intake = intake
        self.schedule: Schedule | None = None
        self.kept = True
        self.result_of: int | None = None
        self.result: StepResult | None = None
        self.ends = ends
        self.idle_turns = idle_turns

    @property
    def is_idle(self) -> bool:
        """Nothing could happen, and nothing did."""
        intake = self.intake
        return not (
            self.num_active
            or self.schedule is not None
            or self.result is not None
            or intake.requests
            or intake.stops
            or intake.failures
            or intake.ready
        )

    def line(self) -> bytes:
        values = {name: getattr(self, name) for name in self.__slots__}
        return to_json({"kind": "iteration", **values})


def make_header(
    blueprint: Mapping[str, Any], state: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The header line of a recording that is being written."""
    return {
        "kind": "header",
        "format": FORMAT,
        "version": VERSION,
        "library": _library_version(),
        "blueprint": blueprint,
        "fields": field_names(Iteration),
        "state": state,
    }


def read_recording(path: str | Path) -> Recording:
    """Read a recording whole. Raises RecordingError naming the line that is wrong.

    A last line that is cut off, by a crash, is left out with a warning.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    return read_lines(lines, str(path))


def read_lines(lines: Iterable[bytes], name: str = "recording") -> Recording:
    """As `read_recording`; `name` stands in messages."""
    values = _values(lines, name)
    _, first = next(values, (0, {}))
    header = _read_header(first, name)
    iterations: list[Iteration] = []
    end: RunEnd | None = None
    for number, value in values:
        kind = value.get("kind")
        try:
            if kind == "iteration":
                iterations.append(from_json(Iteration, value, header.fields))
            elif kind == "end":
                end = from_json(RunEnd, value, header.fields)
            else:
                raise RecordingError(f"unknown kind {kind!r}")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise RecordingError(f"{name}, line {number}: {error}") from error
    return Recording(header, tuple(iterations), end)


def _values(lines: Iterable[bytes], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, line in numbered:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if number == numbered[-1][0] and number > 1:
                logger.warning("%s, line %d is cut off and left out", name, number)
                return
            raise RecordingError(f"{name}, line {number} is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise RecordingError(f"{name}, line {number} is no JSON object")
        yield number, value


def _read_header(value: Mapping[str, Any], name: str) -> Header:
    if value.get("format") != FORMAT:
        raise RecordingError(f"{name} is no recording: its first line is not a {FORMAT} header")
    if value.get("version") != VERSION:
        raise RecordingError(
            f"{name} has format version {value.get('version')!r}, this library "
            f"({_library_version()}) reads version {VERSION}"
        )
    return Header(
        blueprint=value["blueprint"],
        library=value.get("library", ""),
        fields=value["fields"],
        state=value.get("state"),
    )


def _library_version() -> str:
    try:
        return version("gptmanager")
    except PackageNotFoundError:
        return "unknown"
