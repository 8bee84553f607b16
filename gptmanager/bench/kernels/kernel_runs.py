"""Runs a kernel case: checks the results of our kernel and its peers, and times all.

This module also decides how the report shows skipped cases, and contenders that fail, are wrong or
are absent. It does not depend on any kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from gptmanager.bench.kernels.cases import OURS, Absent, Case, Contender, Planned, Prepared, Rig
from gptmanager.bench.roofline import Ceilings
from gptmanager.bench.timing import Budget, Spread, Stopwatch, Timer, host_seconds, measure_all

NO_TIME = "no time left"
Status = Literal["ok", "wrong", "failed", "absent", "skipped"]


@dataclass(frozen=True)
class Entry:
    """The result of one contender in one case. `note`: the reason for a missing or wrong result.

    `error` rates the first result, see `Prepared`. `first_use_s` is the time to the first result,
    including compilation. `plan_s` is the time in which the host makes the plan of one step, for a
    `Planned` contender. `spread`, the times of one call, includes neither.
    """

    status: Status
    note: str = ""
    error: float | None = None
    spread: Spread | None = None
    timed_by: str = ""
    first_use_s: float | None = None
    plan_s: float | None = None

    @property
    def correct_s(self) -> float | None:
        """The median time of a call in seconds; None if the result is wrong or missing."""
        return self.spread.median if self.spread and self.status == "ok" else None


@dataclass(frozen=True, eq=False)
class CaseResult:
    """The results of all contenders in one case. `tolerance` is None if the case did not run."""

    case: Case
    tolerance: float | None
    entries: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def ours(self) -> Entry:
        return self.entries[OURS]

    def times(self, name: str) -> float | None:
        """Return a peer's time divided by ours; None unless both are correct."""
        ours, peer = self.ours.correct_s, self.entries[name].correct_s
        return peer / ours if ours and peer else None


def run_case(
    case: Case,
    rig: Rig,
    timer: Timer,
    *,
    rounds: int,
    budget: Budget,
    peers: Sequence[str] | None = None,
) -> CaseResult:
    """Run a case, or skip it if the device cannot run it, or if time or memory do not suffice.

    `peers`: only peers with names that begin with one of these texts take part; None for all.
    """
    if budget.is_spent:
        return CaseResult(case, None, {OURS: Entry("skipped", NO_TIME)})
    reason = _reason_not_to_fit(case, rig)
    if reason:
        return CaseResult(case, None, {OURS: Entry("skipped", reason)})
    torch.manual_seed(0)
    try:
        prepared = case.prepare(rig)
    except Absent as error:
        return CaseResult(case, None, {OURS: Entry("skipped", str(error))})
    except Exception as error:
        return CaseResult(case, None, {OURS: _error_entry(error)})
    entries: dict[str, Entry] = {}
    watches: dict[str, Stopwatch] = {}
    makers: dict[str, Callable[[], Contender]] = {OURS: lambda: prepared.ours}
    for name, maker in prepared.peers.items():
        if peers is None or any(name.startswith(wanted) for wanted in peers):
            makers[name] = maker
    for name, maker in makers.items():
        try:
            entries[name], watches[name] = _try_contender(maker, prepared, timer, rig.device)
        except Exception as error:  # peers raise errors of their own libraries
            entries[name] = _error_entry(error)
    for name, seconds in measure_all(watches, rounds, budget).items():
        spread = Spread.of(seconds)
        entries[name] = replace(entries[name], spread=spread, timed_by=watches[name].timed_by)
    return CaseResult(case, prepared.tolerance, entries)


def _reason_not_to_fit(case: Case, rig: Rig) -> str:
    """Return why memory cannot hold all input sets and a peer's copy of them; "" if it can."""
    needed = 2 * rig.num_sets(case.num_bytes) * case.num_bytes
    if rig.free_bytes is None or needed <= rig.free_bytes():
        return ""
    return (
        f"needs about {needed / 2**30:.1f} GiB of memory, {rig.free_bytes() / 2**30:.1f} are free"
    )


def _try_contender(
    maker: Callable[[], Contender], prepared: Prepared, timer: Timer, device: torch.device
) -> tuple[Entry, Stopwatch]:
    """Create a contender, check its first result, and prepare its stopwatch."""
    started = time.perf_counter()
    run = maker()
    error = prepared.error(run(0))  # only the first call has the original inputs
    first_use_s = time.perf_counter() - started
    plan_s = host_seconds(run.plan, device) if isinstance(run, Planned) else None
    watch = timer.prepare(run, prepared.num_sets)
    entry = Entry("ok", error=error, first_use_s=first_use_s, plan_s=plan_s)
    if not error <= prepared.tolerance:
        note = f"error {error:.2g}, allowed {prepared.tolerance:.2g}"
        return replace(entry, status="wrong", note=note), watch
    return entry, watch


def _error_entry(error: Exception) -> Entry:
    """Return the entry for an error of a contender. The error does not end the benchmark."""
    if isinstance(error, Absent):
        return Entry("absent", f"{error}: skipped")
    text = str(error).strip().splitlines()
    return Entry("failed", f"{type(error).__name__}: {text[0] if text else ''}"[:120])


def report(results: Sequence[CaseResult], ceilings: Ceilings) -> list[dict[str, Any]]:
    """Return the results as plain values, for JSON and for the table."""
    medians = {
        (result.case.part, result.case.name): result.ours.spread.median
        for result in results
        if result.ours.spread is not None
    }
    return [_row(result, ceilings, medians) for result in results]


def _row(
    result: CaseResult, ceilings: Ceilings, medians: Mapping[tuple[str, str], float]
) -> dict[str, Any]:
    case = result.case
    row: dict[str, Any] = {
        "part": case.part,
        "case": case.name,
        "bytes": case.num_bytes,
        "flops": case.flops,
        "floor_us": round(ceilings.floor_s(case.num_bytes, case.flops) * 1e6, 3),
        "tolerance": result.tolerance,
        "engines": {},
    }
    for name, entry in result.entries.items():
        row["engines"][name] = {
            "status": entry.status,
            **({"note": entry.note} if entry.note else {}),
            **({} if entry.error is None else {"error": float(f"{entry.error:.3g}")}),
            **({} if entry.first_use_s is None else {"first_use_s": round(entry.first_use_s, 3)}),
            **({} if entry.plan_s is None else {"plan_us": round(entry.plan_s * 1e6, 1)}),
            **({} if entry.spread is None else _figures(case, entry, entry.spread, ceilings)),
        }
        times = None if name == OURS else result.times(name)
        if times is not None:
            row["engines"][name]["times_ours"] = round(times, 3)
    row["goals"] = list(_judged_goals(result, ceilings, medians))
    return row


def _judged_goals(
    result: CaseResult, ceilings: Ceilings, medians: Mapping[tuple[str, str], float]
) -> Iterator[dict[str, Any]]:
    """Yield each goal that can be judged, and whether our kernel meets it.

    A goal can be judged if our kernel has times. A goal relative to a peer also needs a correct
    result of the peer. A goal relative to another case needs times of our kernel in that case.
    """
    case, ours = result.case, result.ours
    peers = {name: entry.correct_s for name, entry in result.entries.items()}
    for goal in case.goals:
        other = peers.get(goal.of) if goal.kind == "peer" else medians.get((case.part, goal.of))
        if ours.spread is not None and (other is not None or not goal.of):
            met = ours.status == "ok" and goal.is_met(case, ours.spread, ceilings, other)
            yield {"text": goal.text, "met": met}


def _figures(case: Case, entry: Entry, spread: Spread, ceilings: Ceilings) -> dict[str, Any]:
    median = spread.median
    floor = ceilings.floor_s(case.num_bytes, case.flops)
    return {
        "median_us": round(median * 1e6, 3),
        "best_us": round(spread.best * 1e6, 3),
        "quartiles_us": [round(cut * 1e6, 3) for cut in spread.quartiles],
        "rounds": spread.rounds,
        "timed_by": entry.timed_by,
        "tb_per_s": round(case.num_bytes / median / 1e12, 4),
        "tflop_per_s": round(case.flops / median / 1e12, 3),
        "share_of_copy": round(case.num_bytes / median / ceilings.copy_bytes_per_s, 4),
        "share_of_roofline": round(floor / median, 4),
        "times_floor": round(median / floor, 3),
    }
