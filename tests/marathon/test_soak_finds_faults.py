"""A short piece of the soak that `make marathon-soak` runs for a quarter of an hour."""

from __future__ import annotations

import pytest
from marathon_soak import soak

pytest.importorskip("llguidance", reason="guided decoding needs llguidance, an extra")


@pytest.mark.timeout(300)
def test_a_tight_cache_changes_no_answer() -> None:
    told = soak(5.0, seed=3, most_requests=32, num_canaries=16)
    assert told["failures"] == []
    assert told["requests"] == 32 and told["pauses"] and len(told["kinds"]) == 8
