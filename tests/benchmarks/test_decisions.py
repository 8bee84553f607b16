"""What one capacity and micro-batch decision costs: at most 150 us over 256 requests.

1,200 us over 2,048, and 0.1 us for each that waits behind the first that does not fit. `make test`
runs each case once, `make bench` times them, and `python tests/benchmarks/test_decisions.py` prints
the medians of CPU time as a table.
"""

from __future__ import annotations

import random
import statistics
import time

import pytest

from gptmanager import ContextChunkingPolicy
from gptmanager.request.llm_request import LlmRequest
from gptmanager.scheduler import (
    GuaranteedNoEvictScheduler,
    KvCacheManager,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    ReuseCredit,
    SimpleScheduler,
)

POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "MAX_UTILIZATION with guards")
GUARDS = {"max_pauses": 3, "resume_headroom_blocks": 1, "start_headroom_steps": 16}
STATES = ("generating", "waiting", "half of each")
LARGE = 20_000  # tokens of the one that does not fit


def scheduler(policy, kv_cache, count, chunking=True):
    if policy == "GUARANTEED_NO_EVICT":
        capacity = GuaranteedNoEvictScheduler(count, kv_cache)
    else:
        guards = GUARDS if "guards" in policy else {}
        capacity = MaxUtilizationScheduler(count, kv_cache, **guards)
    if kv_cache.enable_block_reuse:
        capacity = ReuseCredit(capacity, kv_cache)
    micro_batch = MicroBatchScheduler(
        count,
        context_chunking_policy=ContextChunkingPolicy.FIRST_COME_FIRST_SERVED if chunking else None,
        chunk_unit=64,
        mixed_beam_widths=True,
    )
    return SimpleScheduler(capacity, micro_batch)


def requests(count, first_id=0):
    chance = random.Random(first_id)
    return [
        LlmRequest(
            first_id + i,
            [chance.randrange(32_000) for _ in range(chance.randint(16, 256))],
            chance.randint(16, 128),
        )
        for i in range(count)
    ]


def start(kv_cache, started):
    for request in started:
        kv_cache.add_sequence(request)
        kv_cache.store_context(request)
        request.move_to_next_context_chunk()
        request.add_token(7)


def decision(policy, state, count, reuse):
    """A function that decides about `count` requests, who all can run."""
    kv_cache = KvCacheManager(100_000, enable_block_reuse=reuse)
    active = requests(count)
    start(kv_cache, active[: {"generating": count, "waiting": 0}.get(state, count // 2)])
    one = scheduler(policy, kv_cache, count)
    return lambda: one.schedule_request(active, frozenset())


def misfits(policy, count, reuse):
    """A function that decides where 64 run and `count` wait behind one that does not fit."""
    kv_cache = KvCacheManager(400, enable_block_reuse=reuse)
    running = requests(64)
    start(kv_cache, running)
    active = [*running, LlmRequest(64, [1] * LARGE, 100), *requests(count, 65)]
    one = scheduler(policy, kv_cache, len(active))
    return lambda: one.schedule_request(active, frozenset())


@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("count", [256, 2048])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.every(4)
def test_decision(benchmark, policy, state, count, reuse):
    context, generation, paused = benchmark(decision(policy, state, count, reuse))
    num_started = {"generating": count, "waiting": 0}.get(state, count // 2)
    assert len(generation) == num_started
    assert len(context) == count - num_started and not paused


@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_about_requests_after_a_misfit(benchmark, policy, reuse):
    context, generation, _ = benchmark(misfits(policy, 2_000, reuse))
    assert len(generation) == 64 and not context


def median_us(run, rounds=60):
    times = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - began)
    return statistics.median(times) / 1000


if __name__ == "__main__":
    print("| policy | requests | 256 | 2,048 | 256, reuse | 2,048, reuse |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for policy in POLICIES:
        for state in STATES:
            cells = [
                f"{median_us(decision(policy, state, count, reuse)):,.0f} us"
                for reuse in (False, True)
                for count in (256, 2048)
            ]
            print("|", " | ".join([policy, state, *cells]), "|")
        waits = []
        for reuse in (False, True):
            few, many = (median_us(misfits(policy, count, reuse)) for count in (100, 2_100))
            waits += [f"{(many - few) / 2_000:.3f} us each", ""]
        print("|", " | ".join([policy, "behind a misfit", *waits]), "|")
