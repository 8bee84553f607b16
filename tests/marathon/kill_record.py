"""The record of a host: one line for each response. What is wrong in it, what is there twice, and
what is missing.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptmanager import FinishReason
from gptmanager.journal.entries import Entries
from gptmanager.journal.records import Kind, RecordReader
from gptmanager.journal.segments import JournalFolder

_MOST_ENDS = 8  # ends in an iteration: the batch size


class Record:
    """A file of JSON lines that outlives the process which writes it."""

    def __init__(self, path: Path) -> None:
        self.lines = read_lines(path)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        data = path.read_bytes()
        os.ftruncate(self._file, data.rfind(b"\n") + 1)  # a line that was not written completely

    def add(self, **line: Any) -> None:
        os.write(self._file, json.dumps(line | {"time": time.time()}).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a record."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def line_of(request_id: int, tensors: Any, is_final: bool, error: str) -> dict[str, Any]:
    """A response as plain data: the tokens of each position, of one or several beams."""
    named = {name: tensor.tolist() for name, tensor in tensors}
    rows = []
    if "output_ids" in named:
        lengths = named["sequence_length"][0]
        rows = [ids[:n] for ids, n in zip(named["output_ids"][0], lengths, strict=True)]
    columns = [[ids[at] if at < len(ids) else -1 for ids in rows] for at in range(_longest(rows))]
    return {
        "id": request_id,
        "offset": named.get("output_offset", [0])[0],
        "ids": columns,
        "log_probs": named.get("output_log_probs", [[[]]])[0][0],
        "final": is_final,
        "error": error,
        "finish": named["finish_reasons"][0] if is_final and "finish_reasons" in named else [],
    }


def _longest(rows: list[list[int]]) -> int:
    return max(map(len, rows), default=0)


@dataclass
class Output:
    """What a host has of a request. `doubled`: positions and finals that it got once more."""

    columns: dict[int, list[int]] = field(default_factory=dict)
    log_probs: dict[int, float] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    doubled: int = 0

    def add(self, line: dict[str, Any]) -> None:
        for at, column in enumerate(line["ids"], line["offset"]):
            self.doubled += at in self.columns
            self.columns[at] = column
        for at, log_prob in enumerate(line["log_probs"], line["offset"]):
            self.log_probs[at] = log_prob
        self.doubled += self.last is not None
        self.last = line if line["final"] else self.last

    @property
    def num_tokens(self) -> int:
        return max(self.columns, default=-1) + 1


def outputs_of(lines: Iterable[dict[str, Any]]) -> dict[int, Output]:
    """Return what the host has of each request."""
    found: dict[int, Output] = defaultdict(Output)
    for line in lines:
        if "got" not in line and not line["error"].startswith("DuplicateRequestIdError"):
            found[line["id"]].add(line)
    return found


def returned(lines: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Return the requests that Get has returned, and when it did so first."""
    times: dict[int, float] = {}
    for line in lines:
        for number in line.get("got", ()):
            times.setdefault(number, line["time"])
    return times


class InFlight(NamedTuple):
    """What a host without a record may lack: positions by request, and requests without a final."""

    positions: dict[int, set[int]]
    ends: set[int]


def in_flight(
    lines: list[dict[str, Any]], folder: Path, lost_before: set[int]
) -> tuple[InFlight, list[str]]:
    """Return what a death may have lost, of a host and its journal, and what it must not have.

    `lost_before`: the requests without a final response of which an earlier death lost it.
    """
    outputs, found, faults = outputs_of(lines), InFlight({}, set()), []
    entries, ended = _journal_of(folder)
    unknown = []
    last_got = next((line["got"] for line in reversed(lines) if "got" in line), [])
    for number in returned(lines):
        output = outputs.get(number, Output())
        if output.last is not None:
            continue
        if number not in entries:
            found.ends.add(number)
            is_known = number in last_got or number in lost_before
            if not is_known and (ended is None or number not in ended):
                unknown.append(number)
            continue
        sent = len(entries[number].tokens)
        found.positions[number] = set(range(output.num_tokens, sent))
        if output.num_tokens > sent:
            faults.append(f"request {number}: {output.num_tokens} tokens sent, {sent} written")
    if ended is not None or len(unknown) > _MOST_ENDS:
        faults += [f"request {number} is neither final nor in the journal" for number in unknown]
    return found, faults


def _journal_of(folder: Path) -> tuple[Entries, set[int] | None]:
    """Return the unfinished requests, and those that ended with the last write. None: it has begun
    a new segment since, which does not name them.
    """
    if not folder.exists():  # killed before it was made
        return Entries(), set()
    found = JournalFolder(folder).read()
    if found is None:
        return Entries(), set()
    ended: set[int] | None = None
    with found.path.open("rb") as file:
        for record in RecordReader(file, found.end, str(found.path)):
            kind, payload = record.kind, record.payload
            if kind not in (Kind.BEGIN, Kind.UNFINISHED, Kind.RESUMED):
                ended = set(np.frombuffer(payload, "<u8").tolist()) if kind is Kind.FINAL else set()
    return found.entries, ended


@dataclass
class Verdict:
    """Positions and finals that are not those of an uninterrupted run, and why."""

    wrong: int = 0
    doubled: int = 0
    lost: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, number: int, what: str) -> None:
        self.notes.append(f"request {number}: {what}")


def judge(
    lines: list[dict[str, Any]],
    expected: Mapping[int, Output],
    deadline_s: Mapping[int, float],
    lossy: InFlight | None,
) -> Verdict:
    """Compare a record with that of an uninterrupted run.

    `deadline_s`: of the requests that have one. `lossy`: what a host without `restore_cb` may lack.
    """
    found, verdict, accepted = outputs_of(lines), Verdict(), returned(lines)
    for number, right in expected.items():
        output = found.get(number, Output())
        for at, column in output.columns.items():
            if column != right.columns.get(at) or output.log_probs.get(at) != right.log_probs.get(
                at
            ):
                verdict.wrong += 1
                verdict.note(number, f"{column} at {at}, expected {right.columns.get(at)}")
        if output.doubled:
            verdict.doubled += output.doubled
            verdict.note(number, f"{output.doubled} responses or tokens came twice")
        last, missing = output.last, set(right.columns) - set(output.columns)
        if last is not None and last["finish"] == [FinishReason.TIMED_OUT] and number in deadline_s:
            missing = {at for at in missing if at < output.num_tokens}
            if last["time"] - accepted[number] < deadline_s[number]:
                verdict.wrong += 1
                verdict.note(number, "it timed out before its deadline")
        elif last is not None and (last["error"] or last["finish"] != right.last["finish"]):
            verdict.wrong += 1
            verdict.note(number, f"ends with {last['error'] or last['finish']}")
        has_no_end = last is None
        if lossy is not None:
            if number in lossy.ends:
                missing, has_no_end = {at for at in missing if at < output.num_tokens}, False
            missing -= lossy.positions.get(number, set())
        if missing or has_no_end:
            verdict.lost += len(missing) + has_no_end
            verdict.note(number, f"lacks {sorted(missing)}{' and its end' * has_no_end}")
    return verdict
