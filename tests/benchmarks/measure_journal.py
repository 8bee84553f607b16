"""The cost of a journal: tokens a second with one against without.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/measure_journal.py [--pairs 15] [--sync 20]

Two managers of one small model, one with a journal, run the same 64 streamed requests by turns. The
cost is the median over the pairs, by the clock and by the CPU time of the process. What "always"
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
from typing import Any

import gptmanager.journal.journal as journal_module
from gptmanager.bench import SMALL_LLAMA, Load, random_llama
from gptmanager.bench.engine import Session
from gptmanager.config import KvCacheConfig, OptionalParams

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


def measure(pairs: int, sync: Any, folder: Path, load: Load) -> dict[str, Any]:
    source = (SMALL_LLAMA, random_llama(SMALL_LLAMA, 7))
    requests = load.requests(SMALL_LLAMA["vocab_size"])
    disk = Disk()
    journal_module.os.fdatasync = disk.fdatasync

    def session(**journal: Any) -> Session:
        cache = KvCacheConfig(max_tokens=32768, tokens_per_block=64)
        return Session(source, OptionalParams(kv_cache_config=cache, max_batch_size=64, **journal))

    walls, cpus, waits, calls, rates = [], [], [], [], []
    with session() as bare, session(journal_path=folder, journal_sync=sync) as journaled:
        for it in (bare, journaled):
            it.warm_up()
            it.run(requests, is_streaming=True)
        for number in range(pairs):
            found = {}
            for it in (bare, journaled) if number % 2 else (journaled, bare):
                disk.seconds, disk.calls, began = 0.0, 0, time.process_time()
                figures = it.run(requests, is_streaming=True)
                found[it] = figures.seconds, time.process_time() - began
                if it is journaled:
                    waits.append(disk.seconds)
                    calls.append(disk.calls)
                    rates.append(figures.tokens_per_second)
            waited = waits[-1] if sync == "always" else 0.0
            walls.append((found[journaled][0] - waited) / found[bare][0] - 1)
            cpus.append(found[journaled][1] / found[bare][1] - 1)
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
