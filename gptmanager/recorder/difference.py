"""The first difference of two schedules, and a schedule as one line of text."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from gptmanager.step import Schedule

_NOTHING = "no request runs"


def difference(recorded: Any, replayed: Any, path: str) -> tuple[str, Any, Any] | None:
    """Return the first difference of two values, searched recursively; None if they are equal.

    The difference is a path, which begins with `path`, and the recorded and the replayed value at
    this path.
    """
    if recorded == replayed:
        return None
    names = getattr(recorded, "_fields", None)
    if dataclasses.is_dataclass(recorded):
        names = [field.name for field in dataclasses.fields(recorded)]
    pairs: list[tuple[str, Any, Any]] = []
    if names is not None and type(recorded) is type(replayed):
        pairs = [(f"{path}.{n}", getattr(recorded, n), getattr(replayed, n)) for n in names]
    elif isinstance(recorded, dict) and isinstance(replayed, dict):
        names = dict.fromkeys((*recorded, *replayed))
        pairs = [(f"{path}.{n}", recorded.get(n), replayed.get(n)) for n in names]
    elif isinstance(recorded, (list, tuple)) and isinstance(replayed, (list, tuple)):
        items = itertools.zip_longest(recorded, replayed, fillvalue="nothing")
        pairs = [(f"{path}[{index}]", *both) for index, both in enumerate(items)]
    found = (difference(one, other, inner) for inner, one, other in pairs)
    return next((item for item in found if item is not None), (path, recorded, replayed))


def summary(schedule: Schedule | None) -> str:
    """Return a description of a schedule in one line. `schedule` is None if no request runs."""
    if schedule is None:
        return _NOTHING
    context = " ".join(
        f"{row.request_id}({row.position}+{row.num_tokens})" for row in schedule.context_rows
    )
    generation = " ".join(str(row.request_id) for row in schedule.generation_rows)
    paused = " ".join(map(str, schedule.paused))
    parts = [("context", context), ("generation", generation), ("paused", paused)]
    return f"number {schedule.iteration}, " + ", ".join(
        f"{name} {ids}" for name, ids in parts if ids
    )
