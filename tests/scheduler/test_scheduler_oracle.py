"""The schedulers against `scheduling_oracle`, the same rules written a second time.

`PYTHONPATH=tests/support python tests/scheduler/test_scheduler_oracle.py 10000` runs 10,000 traces.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from scheduling_traces import POLICIES, Trace, run_trace

SEEDS = 60


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.every(4)
def test_every_decision_is_the_oracles(policy: str, reuse: bool) -> None:
    totals = total([run_trace(seed, policy, reuse) for seed in range(SEEDS)])

    assert totals["finished"] > 100 and totals["chunks"] > 100
    assert (totals["paused"] > 20) == (policy == "max_utilization")


def total(traces: list[Trace]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for trace in traces:
        totals["traces"] += 1
        totals["finished"] += trace.num_finished
        totals["chunks"] += trace.num_chunks
        totals["paused"] += trace.num_paused
    return totals


if __name__ == "__main__":
    print(total([run_trace(seed) for seed in range(int(sys.argv[1]))]))
