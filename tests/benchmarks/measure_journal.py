"""The cost of a journal: tokens a second with one against without.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/measure_journal.py [--pairs 15] [--sync 20]

A manager of a small model runs the same 64 streamed requests again and again. Every second run
passes the journal by: two managers would differ by up to 7 %, since their memory differs. The cost
is the median over the pairs of runs, by the clock and by the CPU time of the process. What "always"
waits for the disk is measured and shown apart: the bar is 3 % beyond it. Prints JSON, and exits
with 1 if the bar is missed by both clocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import gptmanager.journal.journal as journal_module
from gptmanager.bench import SMALL_LLAMA, Load, random_llama
from gptmanager.bench.engine import Session
from gptmanager.config import KvCacheConfig, OptionalParams
from gptmanager.journal import opening
from gptmanager.journal.journaled_host import JournaledHost
from gptmanager.request.inference_request import NamedTensor
from gptmanager.step import Host, Intake

BAR = 0.03


class Disk:
    """Counts the seconds that the calling threads wait in `fdatasync`."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        self._real = os.fdatasync

    def fdatasync(self, file: int) -> None:
        began = time.perf_counter()
        self._real(file)
        self.seconds += time.perf_counter() - began
        self.calls += 1


class SwitchedHost(JournaledHost):
    """A host whose journal can be passed by. `hosts`: all that were made."""

    is_on = True
    hosts: ClassVar[list[SwitchedHost]] = []

    def __init__(self, host: Host, *more: Any) -> None:
        super().__init__(host, *more)
        self.hosts.append(self)
        fetch, respond, poll = self.fetch, self.respond, self.poll

        def fetch_either(room: int | None, num_active: int) -> Intake:
            return (fetch if self.is_on else host.fetch)(room, num_active)

        def respond_either(
            request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
        ) -> None:
            (respond if self.is_on else host.respond)(request_id, tensors, is_final, error)

        def poll_either() -> None:
            (poll if self.is_on else host.poll)()

        self.fetch, self.respond, self.poll = fetch_either, respond_either, poll_either


def measure(pairs: int, sync: Any, folder: Path, load: Load) -> dict[str, Any]:
    source = (SMALL_LLAMA, random_llama(SMALL_LLAMA, 7))
    requests = load.requests(SMALL_LLAMA["vocab_size"])
    disk = Disk()
    journal_module.os.fdatasync = disk.fdatasync
    opening.JournaledHost = SwitchedHost
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=32768, tokens_per_block=64),
        max_batch_size=64,
        journal_path=folder,
        journal_sync=sync,
    )
    walls, cpus, waits, calls, rates = [], [], [], [], []
    with Session(source, params) as session:
        [host] = SwitchedHost.hosts
        session.warm_up()
        session.run(requests, is_streaming=True)
        for number in range(pairs):
            found = {}
            for is_on in (False, True) if number % 2 else (True, False):
                host.is_on = is_on
                disk.seconds, disk.calls, began = 0.0, 0, time.process_time()
                figures = session.run(requests, is_streaming=True)
                found[is_on] = figures.seconds, time.process_time() - began
                if is_on:
                    waits.append(disk.seconds)
                    calls.append(disk.calls)
                    rates.append(figures.tokens_per_second)
            waited = waits[-1] if sync == "always" else 0.0
            walls.append((found[True][0] - waited) / found[False][0] - 1)
            cpus.append(found[True][1] / found[False][1] - 1)
    return {
        "sync": sync,
        "pairs": pairs,
        "tokens_per_second": round(statistics.median(rates)),
        "cost_wall": round(statistics.median(walls), 4),
        "cost_cpu": round(statistics.median(cpus), 4),
        "fdatasync_s": round(statistics.median(waits), 4),
        "fdatasync_calls": statistics.median(calls),
        "bar": BAR,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--sync", default="20", help="milliseconds, always, or never")
    parser.add_argument("--tokens", type=int, default=128, help="the most of an output")
    options = parser.parse_args()
    sync = options.sync if options.sync in ("always", "never") else float(options.sync)
    with tempfile.TemporaryDirectory() as folder:
        load = Load(64, (16, 64), (options.tokens // 2, options.tokens))
        found = measure(options.pairs, sync, Path(folder) / "journal", load)
    print(json.dumps(found))
    return int(min(found["cost_wall"], found["cost_cpu"]) > BAR)


if __name__ == "__main__":
    sys.exit(main())
