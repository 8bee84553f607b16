"""Kills managers with a journal at random points: is each token there exactly once?

make marathon-kill KILLS=200 SEED=1

A run is one host and its journal, over the lives of several managers. Each life is a process that
dies by SIGKILL: from outside after a random time, or in its start; or by itself, at a random line
of the journal's code, in the middle of a write, or after a response. In the last life all requests
end. They are held against an uninterrupted run, with deterministic=True: in every second run the
host has `restore_cb`, and nothing may be wrong, doubled or lost; in the others only what was in
flight at a death may be lost. Prints JSON, and exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kill_faults import FAULTS
from kill_record import InFlight, Verdict, in_flight, judge, outputs_of, read_lines
from kill_requests import DEADLINE_S, KINDS, Life, Requests
from killed_life import Host, Point, Record, fork, live, start

from gptmanager import CapacitySchedulerPolicy
from gptmanager.errors import JournalError

POINTS = ("time", "start", "line", "torn", "send")
_SHARES = (5, 2, 6, 2, 3)
_MOST_KILLS = 12  # kills of one run
_HANG_S = 300.0  # how long a life may send nothing before it counts as one that hangs
_POLL_S = 0.001
_EACH_KIND_FROM = 100  # kills, from which on each kind of request must have continued


@dataclass
class Result:
    """What runs have shown. `kills`: by point; `continued`: requests that a death interrupted."""

    kills: Counter[str] = field(default_factory=Counter)
    continued: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.kills += other.kills
        self.continued += other.continued
        self.counts += other.counts
        self.failures += other.failures


class Kills:
    """Runs `requests`. The uninterrupted run takes place in a process, too."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        with tempfile.TemporaryDirectory() as folder:
            place, began = Path(folder), time.monotonic()

            def work(on_start: Any) -> None:
                unlimited = _Unlimited(
                    requests, Record(place / "record"), restores=False, dies_at=0
                )
                manager = start(unlimited, Life())
                on_start()
                manager.wait_idle()
                manager.shutdown()

            process, reads = fork(work, place / "log")
            os.read(reads, 1)
            os.close(reads)
            self._start_s = time.monotonic() - began
            if os.waitpid(process, 0)[1]:
                raise AssertionError((place / "log").read_text())
            self._life_s = time.monotonic() - began - self._start_s
            self._expected = outputs_of(read_lines(place / "record"))
        errors = {number: it.last for number, it in self._expected.items() if it.last["error"]}
        if errors or len(self._expected) != requests.count:
            raise AssertionError(f"the uninterrupted run is not complete: {errors}")

    def run(
        self,
        chance: random.Random,
        *,
        restores: bool,
        most_kills: int = _MOST_KILLS,
        points: Sequence[str] = POINTS,
        fault: str = "none",
        keeps: Path | None = None,
    ) -> Result:
        """Kill lives until all requests have ended. `keeps`: where to copy a run with failures."""
        result, lossy = Result(counts=Counter(runs=1)), InFlight({}, set())
        place = Path(tempfile.mkdtemp(prefix="gptmanager-kill-"))
        try:
            while True:
                kinds = points if result.kills.total() < most_kills else ("none",)
                how = self._live(place, chance, kinds, restores=restores, fault=fault)
                result.counts["lives"] += 1
                if how in ("", "failed"):
                    break
                result.kills[how] += 1
                self._look(place, lossy, result)
            if how == "failed":
                log = (place / "log").read_text()
                result.failures.append(f"a life hangs, or has failed: {log[-600:]}")
            elif lossy.ends or not restores:
                result.counts["in_flight"] += len(lossy.ends) + sum(
                    map(len, lossy.positions.values())
                )
            deadlines = {
                it: DEADLINE_S
                for it in range(self._requests.count)
                if self._requests.kind(it) == "deadline"
            }
            lines = read_lines(place / "record")
            verdict = judge(lines, self._expected, deadlines, None if restores else lossy)
            self._count(verdict, result)
            if result.failures and keeps is not None:
                shutil.rmtree(keeps, ignore_errors=True)
                shutil.copytree(place, keeps)
            return result
        finally:
            shutil.rmtree(place, ignore_errors=True)

    @staticmethod
    def _count(verdict: Verdict, result: Result) -> None:
        for name in ("wrong", "doubled", "lost"):
            result.counts[name] += getattr(verdict, name)
        result.failures += verdict.notes

    def _look(self, place: Path, lossy: InFlight, result: Result) -> None:
        """See after a death what the journal has, and what may be lost."""
        lines = read_lines(place / "record")
        try:
            found, faults = in_flight(lines, place / "journal", lossy.ends)
        except JournalError as error:
            result.failures.append(f"after a death: {error}")
            return
        result.failures += faults
        lossy.ends.update(found.ends)
        for number, positions in found.positions.items():
            lossy.positions.setdefault(number, set()).update(positions)
            result.continued[self._requests.kind(number)] += 1

    def _live(
        self,
        place: Path,
        chance: random.Random,
        kinds: Sequence[str],
        *,
        restores: bool,
        fault: str,
    ) -> str:
        """Have a life, and return how it was killed; "": all has ended, "failed": it has not."""
        shares = [share for name, share in zip(POINTS, _SHARES, strict=True) if name in kinds]
        kind = chance.choices(kinds, shares)[0] if shares else "none"
        numbers = {"line": (30, 20_000), "torn": (1, 200), "send": (1, 400)}
        number = 0
        if kind in numbers:
            least, most = numbers[kind]
            number = round(math.exp(chance.uniform(math.log(least), math.log(most))))
        life = Life(
            run_ahead=chance.choice([0, 0, 1]),
            policy=chance.choice([*CapacitySchedulerPolicy][:2]),
            max_tokens=chance.choice([4096, 400]),
            sync=chance.choice(["always", 20, "never"]),
            segment_bytes=chance.choice([64 << 20, 2000]),
        )
        limit_s = chance.uniform(0, 0.4 * self._life_s)
        start_s = chance.uniform(0, 1.2 * self._start_s)

        def work(on_start: Any) -> None:
            live(
                *(place, self._requests, life, Point(kind, number)),
                restores=restores,
                fault=FAULTS[fault],
                on_start=on_start,
            )

        process, reads = fork(work, place / "log")
        try:
            if kind == "start":
                status = _wait(process, start_s)
            else:
                select.select([reads], [], [], _HANG_S)
                status = self._wait_for_end(process, place, limit_s if kind == "time" else None)
            if status is None:
                os.kill(process, signal.SIGKILL)
                status = os.waitpid(process, 0)[1]
                if kind not in ("time", "start"):
                    return "failed"  # it hangs
            return {0: "", signal.SIGKILL: kind}.get(status, "failed")
        finally:
            os.close(reads)

    @staticmethod
    def _wait_for_end(process: int, place: Path, limit_s: float | None) -> int | None:
        """Return the wait status of a process; None: it runs on after `limit_s`, or hangs."""
        if limit_s is not None:
            return _wait(process, limit_s)
        status, size = None, -1
        while status is None and (now := (place / "record").stat().st_size) != size:
            size, status = now, _wait(process, _HANG_S)
        return status


class _Unlimited(Host):
    """The host of the uninterrupted run: without deadlines."""

    def get(self, room: int) -> list[Any]:
        made = super().get(room)
        for request in made:
            request.deadline_s = None
        return made


def _wait(process: int, seconds: float) -> int | None:
    """Return the wait status of a process that ends within `seconds`, or None."""
    give_up = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > give_up:
            return None
        time.sleep(_POLL_S)


def report(result: Result, least_kills: int) -> dict[str, Any]:
    """The figures of runs, and the bars that they miss."""
    failures, kills = [*result.failures], result.kills.total()
    if kills < least_kills:
        failures.append(f"{kills} kills, at least {least_kills} must be")
    missing = [kind for kind in KINDS if not result.continued[kind]]
    if least_kills >= _EACH_KIND_FROM and missing:
        failures.append(f"no request continued of the kinds {missing}")
    named = {name: result.counts[name] for name in ("wrong", "doubled", "lost")}
    return {
        "kills": kills,
        "kills_by_point": dict(result.kills),
        **{name: result.counts[name] for name in ("runs", "lives", "in_flight")},
        **named,
        "continued": dict(sorted(result.continued.items())),
        "failures": failures[:20],
        "num_failures": len(failures),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", type=int, help="only this run, of those that a report names")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="plant a fault")
    parser.add_argument("--failed", type=Path, default=Path("build/kill"), metavar="DIR")
    options = parser.parse_args()
    began, result, number = time.monotonic(), Result(), options.run or 0
    kills = Kills(Requests(2 * len(KINDS)))
    while result.kills.total() < options.kills:
        found = kills.run(
            random.Random(f"{options.seed}-{number}"),
            restores=number % 2 == 0,
            fault=options.fault,
            keeps=options.failed / f"{options.seed}-{number}",
        )
        found.failures = [f"run {number}: {failure}" for failure in found.failures]
        result.add(found)
        number += 1
        if options.run is not None:
            break
    told = report(result, 0 if options.run is not None else options.kills)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seed": options.seed, "seconds": seconds, **told}))
    return 1 if told["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
