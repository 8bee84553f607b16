"""Kernel cases run one after the other, each beside its peers in turn, right before fast.

Decides what becomes of a contender that fails, is absent or wrong, and of cases for which no time
is left. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tqdm import tqdm

from gptmanager.bench.cases import OURS, Absent, Bed, Case, Contender, Prepared
from gptmanager.bench.roofline import Ceilings
from gptmanager.bench.timing import Budget, Spread, Stopwatch, Timer, take_turns

Status = Literal["ok", "wrong", "failed", "absent", "skipped"]


@dataclass(frozen=True)
class Entry:
    """What one contender came to in one case. `note`: why it has no figure, or what is wrong."""

    status: Status
    note: str = ""
    error: float | None = None
    spread: Spread | None = None
    how: str = ""


@dataclass(frozen=True, eq=False)
class CaseResult:
    case: Case
    tolerance: float | None
    entries: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def ours(self) -> Entry:
        return self.entries[OURS]

    def times(self, name: str) -> float | None:
        """How many times as long as ours a peer takes; None where one has no right figure."""
        ours, peer = self.ours, self.entries[name]
        if ours.spread is None or peer.spread is None or "wrong" in (ours.status, peer.status):
            return None
        return peer.spread.median / ours.spread.median


def run_cases(
    cases: Sequence[Case],
    bed: Bed,
    timer: Timer,
    *,
    rounds: int,
    budget: Budget,
    peers: Sequence[str] | None = None,
) -> Iterator[CaseResult]:
    """Each case's result, as soon as there is one. `peers`: beginnings of names; None: all."""
    with tqdm(cases, unit="case", leave=False, disable=None) as bar:
        for number, case in enumerate(bar):
            bar.set_description(f"{case.part}, {case.name}")
            if budget.is_spent:
                yield CaseResult(case, None, {OURS: Entry("skipped", "no time left")})
                continue
            yield _run_case(case, bed, timer, rounds, budget.share(len(cases) - number), peers)


def _run_case(
    case: Case,
    bed: Bed,
    timer: Timer,
    rounds: int,
    budget: Budget,
    peers: Sequence[str] | None,
) -> CaseResult:
    torch.manual_seed(bed.seed)
    prepared, problem = _attempt(lambda: case.prepare(bed))
    if prepared is None:
        return CaseResult(case, None, {OURS: problem})
    entries: dict[str, Entry] = {}
    watches: dict[str, Stopwatch] = {}
    makers: dict[str, Callable[[], Contender]] = {OURS: lambda: prepared.ours}
    for name, maker in prepared.peers.items():
        if peers is None or any(name.startswith(wanted) for wanted in peers):
            makers[name] = maker
    for name, maker in makers.items():
        entry, watch = _enter(maker, prepared, timer)
        entries[name] = entry
        if watch is not None:
            watches[name] = watch
    for name, seconds in take_turns(watches, rounds, budget).items():
        own = entries[name]
        spread = Spread.of(seconds)
        entries[name] = Entry(own.status, own.note, own.error, spread, watches[name].how)
    return CaseResult(case, prepared.tolerance, entries)


def _enter(
    maker: Callable[[], Contender], prepared: Prepared, timer: Timer
) -> tuple[Entry, Stopwatch | None]:
    """One contender: is it there, does it run, is it right? And what times it, if so."""

    def checked() -> tuple[float, Stopwatch]:
        run = maker()
        error = prepared.error(run(0))  # the first call: inputs are as they were prepared
        return error, timer.prepare(run, prepared.num_sets)

    done, problem = _attempt(checked)
    if done is None:
        return problem, None
    error, watch = done
    if not error <= prepared.tolerance:
        note = f"error {error:.2g}, allowed {prepared.tolerance:.2g}"
        return Entry("wrong", note, error), watch
    return Entry("ok", "", error), watch


def _attempt(work: Callable[[], Any]) -> tuple[Any, Entry]:
    """The result, or None and what went wrong: nothing of that ends the benchmark."""
    try:
        return work(), Entry("ok")
    except Absent as error:
        return None, Entry("absent", f"{error}: skipped")
    except Exception as error:  # of whatever library a peer comes from
        text = str(error).strip().splitlines()
        return None, Entry("failed", f"{type(error).__name__}: {text[0] if text else ''}"[:120])


def report(results: Sequence[CaseResult], ceilings: Ceilings) -> list[dict[str, Any]]:
    """As plain values: for JSON, and for the table."""
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
            **({} if entry.spread is None else _figures(case, entry, entry.spread, ceilings)),
        }
        times = None if name == OURS else result.times(name)
        if times is not None:
            row["engines"][name]["times_ours"] = round(times, 3)
    if case.goal is not None and result.ours.spread is not None:
        other = medians.get((case.part, case.goal.of))
        if other is not None or not case.goal.of:
            is_right = result.ours.status == "ok"
            met = is_right and case.goal.is_met(case, result.ours.spread, ceilings, other)
            row["goal"] = {"text": case.goal.text, "met": met}
    return row


def _figures(case: Case, entry: Entry, spread: Spread, ceilings: Ceilings) -> dict[str, Any]:
    median = spread.median
    floor = ceilings.floor_s(case.num_bytes, case.flops)
    return {
        "median_us": round(median * 1e6, 3),
        "best_us": round(spread.best * 1e6, 3),
        "quartiles_us": [round(cut * 1e6, 3) for cut in spread.quartiles],
        "rounds": spread.rounds,
        "timed_by": entry.how,
        "tb_per_s": round(case.num_bytes / median / 1e12, 4),
        "tflop_per_s": round(case.flops / median / 1e12, 3),
        "share_of_copy": round(case.num_bytes / median / ceilings.copy_bytes_per_s, 4),
        "share_of_roofline": round(floor / median, 4),
    }
