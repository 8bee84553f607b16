"""Drives a manager beyond what it can do: does each request get its final response?

make marathon-overload MINUTES=5

At first as many requests as may be open find the capacity. Then requests arrive at random at 1.2
times that rate, and `max_waiting_requests` limits what may wait. Each is a canary: it is answered
as alone, or refused with a CapacityError. Prints JSON, and exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from marathon_soak import (
    MOST_MB_A_MINUTE,
    NUM_CANARIES,
    Canary,
    Run,
    canaries,
    judge_handle,
    learn,
    resident_mb,
    rise_of,
)

from gptmanager.errors import CapacityError

LOAD = 1.2
WAITING = 16  # requests that may wait
LEAST_SHARE = 0.7  # of the capacity, that is still served under overload
MOST_IDLE_S = 20.0  # from the last arrival until nothing is left
_CAPACITY_S = 10.0


class Clients:
    """Submits canaries to a run, and judges their answers."""

    def __init__(self, run: Run, found: list[Canary], chance: random.Random) -> None:
        self._run, self._canaries, self._chance = run, found, chance
        self._next = 0
        self._pending: list[tuple[Any, Canary, int]] = []
        self.ends: Counter[str] = Counter()
        self.failures: list[str] = []

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self) -> None:
        self._next += 1
        canary = self._chance.choice(self._canaries)
        self._pending.append((self._run.submit(canary, self._next), canary, self._next))

    def settle(self) -> None:
        """Judge what has ended."""
        done = [it for it in self._pending if it[0].done()]
        if not done:
            return
        self._pending = [it for it in self._pending if not it[0].done()] if done else []
        for handle, canary, number in done:
            if isinstance(handle.exception(), CapacityError):
                self.ends["refused"] += 1
            else:
                self.ends[judge_handle(handle, canary, number, self.failures)] += 1


def capacity(clients: Clients, seconds: float) -> float:
    """Requests a second, with as many open as may run and wait."""
    end, before = time.monotonic() + seconds, clients.ends["equal"]
    while time.monotonic() < end:
        while clients.num_pending < WAITING:
            clients.submit()
        time.sleep(0.002)
        clients.settle()
    return (clients.ends["equal"] - before) / seconds


def overload(minutes: float, seed: int, num_canaries: int, capacity_s: float) -> dict[str, Any]:
    chance = random.Random(seed)
    found = canaries(chance, num_canaries)
    learn(found)
    run = Run(max_tokens=1024, max_batch_size=8, max_active=None, max_waiting=WAITING)
    clients = Clients(run, found, chance)
    capacity(clients, 0.3 * capacity_s)  # warms up
    most = capacity(clients, capacity_s)
    before = Counter(clients.ends)
    samples: list[tuple[float, float]] = []
    began = at = last = time.monotonic()
    seconds = 60 * minutes
    while at < began + seconds:
        at += chance.expovariate(LOAD * most)
        while (left := at - time.monotonic()) > 0:
            time.sleep(min(left, 0.005))
            clients.settle()
        clients.submit()
        if time.monotonic() - last > 1:
            last = time.monotonic()
            samples.append((last - began, resident_mb()))
    served = clients.ends["equal"] - before["equal"]
    arrived, rate = time.monotonic(), served / (time.monotonic() - began)
    while clients.num_pending and time.monotonic() < arrived + 60:
        time.sleep(0.005)
        clients.settle()
    idle_s = time.monotonic() - arrived
    failures = clients.failures + run.faults()
    run.end()
    if clients.num_pending:
        failures.append(f"{clients.num_pending} requests have no final response")
    refused = clients.ends["refused"] - before["refused"]
    rise = rise_of(minutes, samples)
    if seconds >= 60:  # a shorter run tells nothing of amounts
        failures += [f"only {rate:.1f} of {most:.1f} requests/s"] * (rate < LEAST_SHARE * most)
        failures += ["no request was refused: raise the load"] * (not refused)
        failures += [f"idle only after {idle_s:.1f} s"] * (idle_s > MOST_IDLE_S)
    failures += [f"the resident set grows by {rise} MB a minute"] * (
        rise is not None and rise >= MOST_MB_A_MINUTE
    )
    return {
        "minutes": minutes,
        "seed": seed,
        "capacity": round(most, 1),
        "offered": round(LOAD * most, 1),
        "served": round(rate, 1),
        "ends": dict(clients.ends),
        "finals": run.counts["finals"],
        "fetched": run.counts["fetched"],
        "refused": refused,
        "idle_s": round(idle_s, 2),
        "mb_a_minute": rise,
        "failures": failures[:20],
        "num_failures": len(failures),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    told = overload(options.minutes, options.seed, NUM_CANARIES, _CAPACITY_S)
    print(json.dumps(told))
    return 1 if told["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
