"""Whole managers whose requests have adapters: the tokens are those of merged models.

Requests in random mixes under random configurations. What must have happened on the way is counted.
"""

from __future__ import annotations

from collections import Counter

import pytest
from adapter_runs import Run
from fuzz import FUZZ

NUM_CONFIGURATIONS = 12 * FUZZ
NUM_REQUESTS = 16
MUST_HAPPEN = (  # whether requests are paused depends on when adapters are there
    *("host_evictions", "device_evictions", "hits", "misses", "reused", "drafted"),
    *("swapped", "beams", "waits"),
)


@pytest.mark.timeout(300 * FUZZ)
def test_random_mixes_under_random_configurations():
    counts = Counter()
    for seed in range(6, 6 + NUM_CONFIGURATIONS):  # in the first of them all happens
        run = Run(seed, NUM_REQUESTS)
        run.check_tokens(run.run())
        counts.update(run.counts)
    assert not [name for name in MUST_HAPPEN if not counts[name]], counts
