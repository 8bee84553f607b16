"""What a server under attack must reach, and a report as JSON of what it reached."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hostile_calls import Outcome
from hostile_case import Case
from memory_growth import lasting_growth
from server_watch import Memory, Watched

_KEPT = 1 << 13  # bytes of a case that are remembered for each one


@dataclass(frozen=True)
class Bars:
    """`warm_share`: of a run, after which memory is judged. The slope counts in runs of `slope_s`
    at least, since noise has a slope, too. `on_time_s`: a late answer counts only if the watcher
    itself was later than this at no time, and if it is still late without the time that the event
    loop's thread waited for a core.
    """

    health_s: float = 0.5
    on_time_s: float = 0.1
    growth_mb: float = 64.0
    mb_a_minute: float = 1.0
    slope_s: float = 1200.0
    warm_share: float = 0.25
    window_s: float = 5.0


@dataclass
class Record:
    """What happened to cases and canaries. `times`: when a case ran; large ones without their
    pieces, which are drawn again where they are needed.
    """

    answers: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    failed: dict[int, Case] = field(default_factory=dict)
    times: list[tuple[float, float, Case]] = field(default_factory=list)
    canaries: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, outcome: Outcome, began: float, ended: float) -> None:
        self.answers.setdefault(case.route, Counter()).update(outcome.answers)
        kept = case if case.size < _KEPT else dataclasses.replace(case, pieces=())
        self.times.append((began, ended, kept))
        if outcome.problem:
            self.fail(f"{case.kind} to {case.route}: {outcome.problem}", case)

    def fail(self, told: str, case: Case | None = None) -> None:
        if case is not None:
            told = f"case {case.number}: {told}"
            self.failed[case.number] = case
        self.failures.append(told)

    def during(self, begin: float, end: float) -> list[Case]:
        return [case for began, ended, case in self.times if began <= end and ended >= begin]


def judge(record: Record, watched: Watched, log: str, bars: Bars) -> dict[str, Any]:
    """The report; `failures` is empty if every bar was reached."""
    late = _judge_health(record, watched, bars)
    memory = {
        name: _judge_memory(record, name, watched.memory, bars) for name in Memory._fields[1:]
    }
    for told, times in _tracebacks(log).items():
        record.fail(f"the log has {times} tracebacks: {told}")
    if not record.canaries["equal"]:
        record.fail("no canary was answered")
    latencies = [poll.latency_s for poll in watched.polls] or [0.0]
    return {
        "cases": len(record.times),
        "kinds": dict(Counter(case.kind for _, _, case in record.times).most_common()),
        "answers": {name: dict(found) for name, found in sorted(record.answers.items())},
        "canaries": dict(record.canaries),
        "health": {
            "polls": len(watched.polls),
            "latency_s": _quantiles(latencies),
            "watcher_late_s": _quantiles([poll.own_late_s for poll in watched.polls] or [0.0]),
            "server_starved_s": _quantiles([poll.starved_s for poll in watched.polls] or [0.0]),
            "late": late,
        },
        "memory": memory,
        "log_lines": log.count("\n"),
        "failures": record.failures[:30],
        "num_failures": len(record.failures),
    }


def _judge_health(record: Record, watched: Watched, bars: Bars) -> list[Mapping[str, Any]]:
    """Late polls, and which cases ran meanwhile; those that count are failures, too."""
    late = []
    for poll in watched.polls:
        if poll.status != 200:
            record.fail(f"/health was answered with {poll.status or 'nothing'}")
        if poll.latency_s < bars.health_s:
            continue
        by_itself = poll.latency_s - poll.starved_s >= bars.health_s
        counts = by_itself and poll.own_late_s <= bars.on_time_s
        during = record.during(poll.at, poll.at + poll.latency_s)
        told = {
            **{name: round(value, 3) for name, value in poll._asdict().items()},
            "counts": counts,
            "cases": [f"{case.number}: {case.kind} to {case.route}" for case in during],
        }
        late.append(told)
        if counts:
            record.fail(f"/health took {poll.latency_s:.2f} s during {told['cases']}")
            record.failed.update({case.number: case for case in during})
    return late[:30]


def _judge_memory(
    record: Record, name: str, samples: Sequence[Memory], bars: Bars
) -> dict[str, Any]:
    """Judge the lowest value in each window, because the memory of one request is freed again."""
    if not samples:
        return {}
    first = samples[0].at
    windows: dict[int, float] = {}
    for sample in samples:
        window = int((sample.at - first) / bars.window_s)
        windows[window] = min(getattr(sample, name), windows.get(window, np.inf))
    length = samples[-1].at - first
    warm = [size for at, size in windows.items() if at * bars.window_s >= bars.warm_share * length]
    share = max(1, len(warm) // 10)
    growth = float(np.median(warm[-share:]) - np.median(warm[:share]))
    slope = None
    if length >= bars.slope_s:
        at = {window * bars.window_s: size for window, size in windows.items()}
        slope = lasting_growth(at, length)
        if slope is not None and slope >= bars.mb_a_minute:
            record.fail(f"memory of {name} grows by {slope} MB a minute")
    if growth >= bars.growth_mb:
        record.fail(f"memory of {name} has grown by {growth:.0f} MB")
    return {
        "first_mb": round(getattr(samples[0], name), 1),
        "peak_mb": round(max(getattr(sample, name) for sample in samples), 1),
        "growth_mb": round(growth, 1),
        "mb_a_minute": slope,
        "by_time_mb": [
            round(size) for size in list(windows.values())[:: max(1, len(windows) // 20)]
        ],
    }


def _tracebacks(log: str) -> Counter[str]:
    """The last lines of each, and how often it is there."""
    found: Counter[str] = Counter()
    for part in log.split("Traceback (most recent call last):\n")[1:]:
        lines = part.split("\n")
        end = next((at for at, line in enumerate(lines) if not line.startswith(" ")), len(lines))
        found[re.sub("0x[0-9a-f]+", "0x", "\n".join(lines[max(0, end - 6) : end + 1]))] += 1
    return found


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    shares = {"p50": 50, "p99": 99, "p99.9": 99.9, "p100": 100}
    return {name: round(float(np.percentile(values, it)), 4) for name, it in shares.items()}
