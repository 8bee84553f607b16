"""Capacity schedulers over a cache with block reuse: who waits for whose blocks, what counts."""

from __future__ import annotations

import random

import pytest

from gptmanager.scheduler import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    KvCacheManager,
    LlmRequest,
    LlmRequestState,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    RequestList,
    ReuseCredit,
    SimpleScheduler,
    StaticBatchScheduler,
)
from gptmanager.scheduler.wait_reasons import WaitReason

BOTH = pytest.mark.parametrize("policy", [GuaranteedNoEvictScheduler, MaxUtilizationScheduler])
CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


def caching(num_blocks: int = 20) -> KvCacheManager:
    return KvCacheManager(num_blocks, 10, enable_block_reuse=True)


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def ids(requests: RequestList) -> list[int]:
    return [request.request_id for request in requests]


def step(kv: KvCacheManager, scheduler: CapacityScheduler, active: RequestList) -> list[int]:
    """One iteration: decide, pause, run what fits, end what is done; who ran."""
    fitting, paused = scheduler.schedule_request(active)
    for request in paused:
        kv.remove(request.request_id)
        request.pause(10**6)
    for request in fitting:
        if request.state is not CONTEXT_INIT:
            kv.add_token(request.request_id)
            request.add_token(5)
            continue
        if request.request_id not in kv:
            kv.add_sequence(request)
        request.move_to_next_context_chunk()
        if request.state is not CONTEXT_INIT:
            kv.store_context(request)
            request.add_token(5)
    for request in [r for r in fitting if r.num_generated == r.max_new_tokens]:
        kv.remove(request.request_id)
        active.remove(request)
    kv.check()
    return ids(fitting)


def run(kv: KvCacheManager, scheduler: CapacityScheduler, active: RequestList) -> list[list[int]]:
    ran = []
    while active:
        ran.append(step(kv, scheduler, active))
    assert kv.get_num_free_blocks() == kv.get_max_resource_count()
    return ran


@BOTH
def test_a_duplicate_waits_until_the_first_context_has_finished(policy) -> None:
    kv = caching(5)
    active = [LlmRequest(0, tokens(11), 2), LlmRequest(1, tokens(11), 2)]
    assert run(kv, policy(3, kv), active) == [[0], [0, 1], [1]]
    assert kv.reuse_counts.reused_blocks == 1


@BOTH
def test_a_duplicate_waits_for_every_chunk(policy) -> None:
    kv = caching(10)
    first, second = (
        LlmRequest(0, tokens(45), 2, context_chunk_size=20),
        LlmRequest(1, tokens(45), 2),
    )
    scheduler = policy(3, kv)
    active = [first, second]
    for _ in range(2):
        assert step(kv, scheduler, active) == [0]
        first.context_chunk_size = 20
    assert first.context_current_position == 40
    assert step(kv, scheduler, active) == [0]
    assert step(kv, scheduler, active) == [0, 1]
    assert kv.num_cached_tokens(1) == 40


@BOTH
def test_a_request_that_begins_differently_does_not_wait(policy) -> None:
    kv = caching(50)
    active = [
        LlmRequest(0, tokens(25), 5),
        LlmRequest(1, tokens(25, 100), 5),
        LlmRequest(2, tokens(25), 5, cache_salt="a"),
        LlmRequest(3, tokens(25), 5, lora_task_id=1),
        LlmRequest(4, tokens(9), 5),  # no full block: nothing to wait for
        LlmRequest(5, tokens(9), 5),
        LlmRequest(6, [*tokens(10), 77, *tokens(20)], 5),  # the same first block
        LlmRequest(7, tokens(10), 5),  # full blocks count with their last token
    ]
    assert ids(policy(20, kv).schedule_request(active)[0]) == [0, 1, 2, 3, 4, 5]


class Whole(LlmRequest):
    """A request that needs its whole prompt computed."""

    reads_cache = False


@BOTH
@pytest.mark.parametrize(("num_blocks", "num_fitting"), [(50, 3), (8, 2)])
def test_a_request_that_needs_its_whole_prompt_does_not_wait(
    policy, num_blocks, num_fitting
) -> None:
    kv = caching(num_blocks)
    active = [Whole(0, tokens(25), 5), LlmRequest(1, tokens(25), 5), Whole(2, tokens(25), 5)]
    assert ids(policy(20, kv).schedule_request(active)[0]) == [0, 2]
    active[0], active[1] = active[1], active[0]
    assert ids(policy(20, kv).schedule_request(active)[0]) == [1, 0, 2][:num_fitting]


@BOTH
def test_only_the_first_block_that_is_not_cached_counts(policy) -> None:
    kv = caching(50)
    scheduler = policy(20, kv)
    run(kv, scheduler, [LlmRequest(0, tokens(21), 1)])
    active = [
        LlmRequest(1, tokens(20), 5),
        LlmRequest(2, tokens(25), 5),
        LlmRequest(3, tokens(35), 5),  # contributes its third block
        LlmRequest(4, [*tokens(30), 77], 5),
        LlmRequest(5, [*tokens(29), 77, 78], 5),
    ]
    assert ids(scheduler.schedule_request(active)[0]) == [1, 2, 3, 5]


@BOTH
def test_a_delayed_request_neither_stops_the_pass_nor_is_paused(policy) -> None:
    kv = caching(4)
    active = [
        LlmRequest(0, tokens(11), 2),
        LlmRequest(1, tokens(11), 60),  # would not fit
        LlmRequest(2, tokens(11, 50), 2),
    ]
    fitting, paused = policy(20, kv).schedule_request(active)
    assert (ids(fitting), paused) == ([0, 2], [])


def test_the_delay_is_checked_before_the_limit_on_requests() -> None:
    kv = caching(50)
    active = [LlmRequest(i, tokens(11), 2) for i in range(2)]
    assert ids(GuaranteedNoEvictScheduler(1, kv).schedule_request(active)[0]) == [0]
    started = LlmRequest(9, tokens(15, 300), 5)
    kv.add_sequence(started)
    started.move_to_next_context_chunk()
    started.add_token()
    scheduler = MaxUtilizationScheduler(1, kv)
    # 1 is delayed; else it would be the misfit for which 9 is paused
    fitting, paused = scheduler.schedule_request([*active, started])
    assert (ids(fitting), ids(paused)) == ([0], [9])
    fitting, paused = scheduler.schedule_request([started, *active])
    assert (ids(fitting), ids(paused)) == ([9], [])


def test_max_utilization_skips_a_context_that_it_tries_again_after_a_pause() -> None:
    kv = caching(4)
    started = LlmRequest(9, tokens(15, 300), 5)
    kv.add_sequence(started)
    started.move_to_next_context_chunk()
    started.add_token()
    waiting = LlmRequest(1, tokens(25), 5)
    fitting, paused = MaxUtilizationScheduler(5, kv).schedule_request([waiting, started])
    assert (fitting, ids(paused)) == ([], [9])


def test_a_delayed_request_waits_for_what_the_context_waits_for_that_it_would_reuse() -> None:
    """The context with the same beginning is paused in the same decision."""
    kv = caching(7)
    paused = LlmRequest(9, tokens(35), 5, context_chunk_size=20)
    kv.add_sequence(paused)
    paused.move_to_next_context_chunk()
    active = [LlmRequest(1, tokens(40, 300), 5), LlmRequest(2, tokens(25), 5), paused]
    scheduler = MaxUtilizationScheduler(5, kv)
    assert ids(scheduler.schedule_request(active)[1]) == [9]
    waits = scheduler.why_waiting(active)
    assert waits is not None
    assert waits[2] == waits[9] and waits[9].behind == 1
    assert waits[9].cause is WaitReason.KV_BLOCKS


def test_a_static_batch_does_not_wait() -> None:
    kv = caching(20)
    active = [LlmRequest(i, tokens(11), 2) for i in range(3)]
    assert run(kv, StaticBatchScheduler(3, kv), active) == [[0, 1, 2]] * 2


@BOTH
def test_without_reuse_no_request_waits(policy) -> None:
    kv = KvCacheManager(20, 10)
    active = [LlmRequest(i, tokens(11), 2) for i in range(3)]
    assert ids(policy(3, kv).schedule_request(active)[0]) == [0, 1, 2]


@BOTH
def test_blocks_of_a_live_sequence_are_not_needed_again(policy) -> None:
    kv = caching(6)
    scheduler = policy(5, kv)
    active = [LlmRequest(0, tokens(35), 5), LlmRequest(1, [*tokens(30), 70, 71], 8)]
    assert step(kv, scheduler, active) == [0]
    assert kv.get_num_free_blocks() == 2
    assert step(kv, scheduler, active) == [0, 1]  # one block beside the three that it shares
    assert kv.get_num_free_blocks() == 1


def test_a_victims_blocks_that_a_scheduled_context_shares_do_not_become_free() -> None:
    kv = caching(7)
    victim = LlmRequest(9, tokens(35), 30)  # holds 4, three of them shared with request 1
    kv.add_sequence(victim)
    victim.move_to_next_context_chunk()
    kv.store_context(victim)
    victim.add_token()
    sharer = LlmRequest(1, [*tokens(30), 70, 71], 8)  # takes 1
    for prompt_len, fits in [(30, True), (40, False)]:  # 3 are free, the victim gives 1: 4 - 1
        other = LlmRequest(2, tokens(prompt_len, 100), 8)
        fitting, paused = MaxUtilizationScheduler(5, kv).schedule_request([sharer, other, victim])
        assert ids(paused) == [9]
        assert ids(fitting) == [1]  # 2 is tried again after the pause: its own record
        third = LlmRequest(3, tokens(prompt_len, 500), 8)
        active = [sharer, other, third, victim]
        fitting, _ = MaxUtilizationScheduler(5, kv).schedule_request(active)
        assert ids(fitting) == ([1, 3] if fits else [1])
        kv.start_scheduling()
        kv.scheduling_add_sequence(sharer)
        kv.scheduling_remove_sequence(9)
        needed = 1 + kv.get_needed_blocks_one_step(other)
        assert kv.scheduling_has_free_blocks(needed) is fits


@BOTH
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.every(3)
def test_what_is_scheduled_always_has_its_blocks(policy, seed) -> None:
    """`step` raises if it has not. Few different beginnings, a pool that is tight."""
    chance = random.Random(seed)
    kv = KvCacheManager(16, 3, enable_block_reuse=True)
    guards = {"started_contexts_first": True} if policy is GuaranteedNoEvictScheduler else {}
    scheduler = policy(chance.choice([2, 5, 20]), kv, **guards)
    active = []
    for i in range(60):
        prompt = [chance.choice([1, 1, 1, 2]) for _ in range(chance.randint(1, 25))]
        active.append(LlmRequest(i, prompt, chance.randint(1, 20)))
    for _ in range(2000):
        if not active:
            break
        for request in active:
            if request.state is CONTEXT_INIT:
                request.context_chunk_size = chance.choice([3, 6, 100])
        step(kv, scheduler, active)
    assert not active and kv.get_num_free_blocks() == 16


# The credit for reusable tokens ------------------------------------------------------------------


def test_a_bare_scheduler_leaves_the_estimate_alone() -> None:
    kv = caching(20)
    run(kv, GuaranteedNoEvictScheduler(9, kv), [LlmRequest(0, tokens(25), 1)])
    request = LlmRequest(1, tokens(25), 5)
    GuaranteedNoEvictScheduler(9, kv).schedule_request([request])
    assert request.estimated_reusable_tokens == 0


def test_the_credit_is_what_will_be_found_in_full_blocks() -> None:
    kv = caching(20)
    scheduler = ReuseCredit(GuaranteedNoEvictScheduler(9, kv), kv)
    run(kv, scheduler, [LlmRequest(0, tokens(25), 1)])
    request = LlmRequest(1, tokens(25), 5)
    assert scheduler.schedule_request([request]) == ([request], [])
    assert request.estimated_reusable_tokens == 20
    micro_batch = MicroBatchScheduler(9, 5, reuse_credit_rule="shift")
    simple = SimpleScheduler(scheduler, micro_batch)
    assert simple.schedule_request([request], frozenset()).context_requests == [request]
    kv.clear_cached()
    assert simple.schedule_request([request], frozenset()).context_requests == []
    assert request.estimated_reusable_tokens == 0


def test_a_context_between_two_chunks_has_no_credit() -> None:
    kv = caching()
    first = LlmRequest(1, tokens(25), 5)
    kv.add_sequence(first)
    kv.store_context(first)
    later = LlmRequest(2, tokens(25, 500), 5, context_chunk_size=10)
    kv.add_sequence(later)
    later.move_to_next_context_chunk()
    later.tokens[:20] = tokens(20)  # as if they were cached only now
    scheduler = ReuseCredit(GuaranteedNoEvictScheduler(9, kv), kv)
    assert scheduler.schedule_request([later]) == ([later], [])
    assert later.estimated_reusable_tokens == 0
