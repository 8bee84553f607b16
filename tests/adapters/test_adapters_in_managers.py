"""Whole managers whose requests have adapters: the tokens are those of merged models.

Requests in random mixes under random configurations. What must have happened on the way is counted.
"""

from __future__ import annotations

from collections import Counter

import pytest
from adapter_runs import Run
from fuzz import FUZZ

SEEDS = (6, 8, 12, 15, 16)  # in these all of MUST_HAPPEN happens
NUM_MORE = 10 * (FUZZ - 1)
NUM_REQUESTS = 16
MUST_HAPPEN = (  # whether requests are paused depends on when adapters are there
    *("host_evictions", "device_evictions", "hits", "misses", "reused", "drafted"),
    *("swapped", "beams", "waits"),
)


@pytest.mark.timeout(300 * FUZZ)
def test_random_mixes_under_random_configurations():
    counts = Counter()
    for seed in (*SEEDS, *range(18, 18 + NUM_MORE)):
        run = Run(seed, NUM_REQUESTS)
        run.check_tokens(run.run())
        counts.update(run.counts)
    assert not [name for name in MUST_HAPPEN if not counts[name]], counts
