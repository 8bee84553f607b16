"""The two steps together, iteration by iteration, on the numbers of the reference documents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmanager.config import ContextChunkingPolicy
from gptmanager.errors import CapacityError, ConfigError
from gptmanager.scheduler import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    KvCacheManager,
    LlmRequest,
    LlmRequestState,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    RequestList,
    RequestScheduler,
    SchedulerOutput,
    SimpleScheduler,
    StaticBatchScheduler,
    insert_by_priority,
)

FCFS = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE
MAX_INPUT_LEN = 10_000


class Bench:
    """A host without a model: decides, allocates, steps, and frees, an iteration at a time."""

    def __init__(self, scheduler: RequestScheduler, kv_cache_manager: KvCacheManager) -> None:
        self.scheduler = scheduler
        self.kv = kv_cache_manager
        self.active: RequestList = []
        self.peak_blocks = 0
        self.finished: list[int] = []

    def iterate(self) -> SchedulerOutput:
        output = self.scheduler.schedule_request(self.active, frozenset())
        for request in output.paused_requests:
            self.kv.remove(request.request_id)
            request.pause(MAX_INPUT_LEN)
        for request in output.context_requests:
            if request.is_first_context_chunk:
                self.kv.add_sequence(request)
            request.move_to_next_context_chunk()
            if request.state is not LlmRequestState.CONTEXT_INIT:
                request.add_token()
        for request in output.generation_requests:
            self.kv.add_token(request.request_id)
            request.add_token()
        self.kv.check()
        used = self.kv.get_max_resource_count() - self.kv.get_num_free_blocks()
        self.peak_blocks = max(self.peak_blocks, used)
        for request in [r for r in self.active if r.state is TO_COMPLETE]:
            self.finish(request)
        return output

    def finish(self, request: LlmRequest) -> None:
        request.finish()
        self.kv.remove(request.request_id)
        self.active.remove(request)
        self.finished.append(request.request_id)

    def run(self, max_iterations: int = 10_000) -> int:
        for iteration in range(max_iterations):
            if not self.active:
                return iteration
            output = self.iterate()
            assert any(output), f"nothing was decided at iteration {iteration}"
        raise AssertionError(f"not finished after {max_iterations} iterations")


def ids(requests: RequestList) -> list[int]:
    return [request.request_id for request in requests]


def chunks(output: SchedulerOutput) -> dict[int, int | None]:
    return {r.request_id: r.context_chunk_size for r in output.context_requests}


# The five requests of docs/scheduling.md --------------------------------------------------------


def toy(policy: ContextChunkingPolicy | None) -> Bench:
    kv_cache_manager = KvCacheManager(100, 1)
    scheduler = SimpleScheduler(
        GuaranteedNoEvictScheduler(4, kv_cache_manager),
        MicroBatchScheduler(4, 12, context_chunking_policy=policy, chunk_unit=1),
    )
    bench = Bench(scheduler, kv_cache_manager)
    bench.active = [
        LlmRequest(request_id, prompt_len, max_new_tokens=6)
        for request_id, prompt_len in enumerate([5, 5, 3, 3, 3], start=1)
    ]
    return bench


def test_toy_example_with_whole_contexts() -> None:
    bench = toy(None)

    output = bench.iterate()
    assert (ids(output.context_requests), ids(output.generation_requests)) == ([1, 2], [])

    output = bench.iterate()
    assert (ids(output.context_requests), ids(output.generation_requests)) == ([3, 4], [1, 2])

    bench.finish(bench.active[0])  # its second token was the end
    output = bench.iterate()
    assert (ids(output.context_requests), ids(output.generation_requests)) == ([5], [2, 3, 4])
    assert output.paused_requests == []


def test_toy_example_with_chunks() -> None:
    bench = toy(FCFS)

    output = bench.scheduler.schedule_request(bench.active, frozenset())
    # request 4 takes a place in the batch but gets no token of the budget
    assert chunks(output) == {1: 5, 2: 5, 3: 2}
    # the unfinished context comes first
    assert ids(output.context_requests) == [3, 1, 2]

    bench.iterate()
    output = bench.scheduler.schedule_request(bench.active, frozenset())
    assert chunks(output) == {3: 1, 4: 3}
    assert ids(output.generation_requests) == [1, 2]

    bench.iterate()
    bench.finish(bench.active[0])
    output = bench.iterate()
    assert (ids(output.context_requests), ids(output.generation_requests)) == ([5], [2, 3, 4])


def test_batch_rises_gradually_because_of_the_token_budget() -> None:
    kv_cache_manager = KvCacheManager(100, 10)
    scheduler = SimpleScheduler(
        MaxUtilizationScheduler(8, kv_cache_manager), MicroBatchScheduler(8, 20)
    )
    bench = Bench(scheduler, kv_cache_manager)
    bench.active = [LlmRequest(i, 10, max_new_tokens=50) for i in range(8)]
    sizes = []
    for _ in range(8):
        output = bench.iterate()
        sizes.append(len(output.context_requests) + len(output.generation_requests))
    assert sizes == [2, 3, 4, 5, 6, 7, 8, 8]


# Section 0 of the contract: 20 blocks of 10 tokens, four requests of 10 + 80 ------------------


def four_requests(capacity: Callable[[KvCacheManager], CapacityScheduler]) -> Bench:
    kv_cache_manager = KvCacheManager(20, 10)
    scheduler = SimpleScheduler(capacity(kv_cache_manager), MicroBatchScheduler(4))
    bench = Bench(scheduler, kv_cache_manager)
    bench.active = [LlmRequest(i, 10, max_new_tokens=80) for i in range(4)]
    return bench


def test_no_evict_runs_two_of_four_at_a_time() -> None:
    # a whole life takes 9 blocks, so two lives fit into 20 and a third one does not
    bench = four_requests(lambda kv: GuaranteedNoEvictScheduler(4, kv))
    output = bench.iterate()
    assert ids(output.context_requests) == [0, 1]
    for _ in range(79):
        output = bench.iterate()
        assert ids(output.generation_requests) == [0, 1]
    output = bench.iterate()
    assert ids(output.context_requests) == [2, 3]
    assert bench.run() == 79
    assert bench.peak_blocks == 18
    assert bench.finished == [0, 1, 2, 3]


class UserScheduler(CapacityScheduler):
    """A user's scheduler. It compares the whole needs of all requests with the whole pool."""

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager) -> None:
        super().__init__()
        self.limit = max_num_requests
        self.manager = kv_cache_manager

    def need(self, request: LlmRequest) -> int:
        return self.manager.get_needed_resource_to_completion(request)

    def schedule_request(
        self, active_requests: RequestList
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        first, end = self.no_schedule_until_state.value, self.no_schedule_after_state.value
        left = self.manager.get_max_resource_count()
        chosen: list[LlmRequest] = []
        waiting = []
        for request in active_requests:
            if not first <= request.state.value < end:
                continue
            if len(chosen) >= self.limit or left <= 0:
                break
            if request.state == LlmRequestState.CONTEXT_INIT:
                waiting.append(request)
            else:
                chosen.append(request)
                left -= self.need(request)
        for request in waiting:
            left -= self.need(request)
            if len(chosen) >= self.limit or left < 0:
                break
            chosen.append(request)
        assert chosen, "no request can be completed in this pool"
        return chosen, []


class SwappedNeeds(UserScheduler):
    """Compares the whole pool with needs minus what is held: the mistake that section 0 names."""

    def need(self, request: LlmRequest) -> int:
        return self.manager.get_remaining_blocks_to_completion(request)


def test_a_users_scheduler_runs_as_the_built_in_one() -> None:
    theirs = four_requests(lambda kv: UserScheduler(4, kv))
    ours = four_requests(lambda kv: GuaranteedNoEvictScheduler(4, kv))
    while ours.active:
        expected, output = ours.iterate(), theirs.iterate()
        assert [ids(part) for part in output] == [ids(part) for part in expected]
    assert not theirs.active


def test_total_against_remaining_needs_overcommits_at_iteration_53() -> None:
    bench = four_requests(lambda kv: SwappedNeeds(4, kv))
    for iteration in range(53):
        bench.iterate()
        assert bench.peak_blocks <= 20, iteration
    with pytest.raises(CapacityError):
        bench.iterate()


def test_max_utilization_starts_all_and_pauses_the_last() -> None:
    bench = four_requests(lambda kv: MaxUtilizationScheduler(4, kv))
    output = bench.iterate()
    assert ids(output.context_requests) == [0, 1, 2, 3]
    # 5 blocks each fill the pool: iteration i >= 1 stores position 10 + i, the 51st in 41
    for _ in range(1, 41):
        output = bench.iterate()
        assert ids(output.generation_requests) == [0, 1, 2, 3]
    output = bench.iterate()
    assert ids(output.paused_requests) == [3]
    assert ids(output.generation_requests) == [0, 1, 2]
    # generated tokens went into the prompt
    paused = bench.active[3]
    assert (paused.prompt_len, paused.max_new_tokens, paused.pause_count) == (51, 39, 1)
    bench.run()
    assert bench.peak_blocks == 20
    assert sorted(bench.finished) == [0, 1, 2, 3]


def test_static_batch_waits_for_the_last_of_a_batch() -> None:
    bench = four_requests(lambda kv: StaticBatchScheduler(4, kv))
    bench.active[1].max_new_tokens = 20
    assert ids(bench.iterate().context_requests) == [0, 1]
    for _ in range(79):
        assert bench.iterate().context_requests == []
    assert bench.finished == [1, 0]
    assert ids(bench.iterate().context_requests) == [2, 3]


# Micro batches in flight, priorities, one-step schedulers --------------------------------------


def test_two_micro_batches_of_disjoint_requests() -> None:
    kv_cache_manager = KvCacheManager(10, 10)
    scheduler = SimpleScheduler(
        MaxUtilizationScheduler(4, kv_cache_manager, two_step_lookahead=True),
        MicroBatchScheduler(2),
    )
    active = [LlmRequest(i, 10, max_new_tokens=20) for i in range(5)]
    first = scheduler.schedule_request(active, frozenset())
    second = scheduler.schedule_request(active, {0, 1})
    # four may hold memory, two run in each micro batch
    assert ids(first.context_requests) == [0, 1]
    assert ids(second.context_requests) == [2, 3]
    assert ids(scheduler.schedule_request(active, {0, 1, 2, 3}).context_requests) == []


def test_a_request_in_flight_can_be_chosen_for_pausing() -> None:
    kv_cache_manager = KvCacheManager(2, 10)
    scheduler = SimpleScheduler(
        MaxUtilizationScheduler(4, kv_cache_manager), MicroBatchScheduler(4)
    )
    bench = Bench(scheduler, kv_cache_manager)
    bench.active = [LlmRequest(i, 10, max_new_tokens=5) for i in range(2)]
    bench.iterate()
    # both blocks are full: request 0 takes the block of request 1, in flight or not
    output = scheduler.schedule_request(bench.active, {1})
    assert (ids(output.generation_requests), ids(output.paused_requests)) == ([0], [1])
    output = scheduler.schedule_request(bench.active, {0, 1})
    assert (ids(output.generation_requests), ids(output.paused_requests)) == ([], [1])


def test_priority_decides_the_order_and_arrival_among_equals() -> None:
    active: RequestList = []
    for request_id, priority in enumerate([0.5, 0.5, 0.9, 0.1, 0.9]):
        insert_by_priority(active, LlmRequest(request_id, 3, 3, priority=priority))
    scheduler = SimpleScheduler(MaxRequestsScheduler(4), MicroBatchScheduler(3))
    output = scheduler.schedule_request(active, frozenset())
    assert ids(output.context_requests) == [2, 4, 0]


def test_a_one_step_scheduler_and_two_step_parts_of_a_users_own() -> None:
    class OneAtATime(RequestScheduler):
        def schedule_request(
            self, active_requests: RequestList, inflight_request_ids: object
        ) -> SchedulerOutput:
            first = active_requests[:1]
            in_context = first[0].state is LlmRequestState.CONTEXT_INIT
            return SchedulerOutput(first, [], []) if in_context else SchedulerOutput([], first, [])

    kv_cache_manager = KvCacheManager(2, 10)
    bench = Bench(OneAtATime(), kv_cache_manager)
    bench.active = [LlmRequest(i, 10, max_new_tokens=5) for i in range(3)]
    assert bench.run() == 15
    assert bench.finished == [0, 1, 2]

    class ShortestFirst(MicroBatchScheduler):
        def schedule(
            self, fitting_requests: RequestList, inflight_request_ids: object
        ) -> tuple[RequestList, RequestList]:
            by_length = sorted(fitting_requests, key=lambda request: request.prompt_len)
            return super().schedule(by_length, frozenset())

    scheduler = SimpleScheduler(MaxRequestsScheduler(3), ShortestFirst(1))
    active = [LlmRequest(i, 10 - i, 1) for i in range(3)]
    assert ids(scheduler.schedule_request(active, frozenset()).context_requests) == [2]


def test_output_is_frozen_and_unpacks_in_order() -> None:
    output = SchedulerOutput([], [], [])
    with pytest.raises(AttributeError):
        output.paused_requests = []  # type: ignore[misc]
    assert SchedulerOutput._fields == (
        "context_requests",
        "generation_requests",
        "paused_requests",
    )


# Any load comes to its end ---------------------------------------------------------------------

loads = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.sampled_from([0.1, 0.5, 0.9])),
    min_size=1,
    max_size=8,
)
capacities: dict[str, Callable[[KvCacheManager], CapacityScheduler]] = {
    "no evict": lambda kv: GuaranteedNoEvictScheduler(5, kv),
    "static batch": lambda kv: StaticBatchScheduler(5, kv),
    "user": lambda kv: UserScheduler(5, kv),
    "max utilization": lambda kv: MaxUtilizationScheduler(5, kv),
    "guarded": lambda kv: MaxUtilizationScheduler(
        5, kv, max_pauses=2, resume_headroom_blocks=3, start_headroom_steps=4
    ),
}


@pytest.mark.parametrize("name", capacities)
@settings(max_examples=30 * FUZZ, deadline=None)
@given(
    load=loads,
    spare_blocks=st.integers(0, 12),
    policy=st.sampled_from(ContextChunkingPolicy),
    max_num_tokens=st.integers(8, 40),
)
def test_every_request_ends(
    name: str,
    load: list[tuple[int, int, float]],
    spare_blocks: int,
    policy: ContextChunkingPolicy,
    max_num_tokens: int,
) -> None:
    # Given a pool in which each request could run alone
    blocks = max(-(-(prompt + new) // 4) for prompt, new, _ in load) + spare_blocks
    kv_cache_manager = KvCacheManager(blocks, 4)
    micro_batch = MicroBatchScheduler(
        4, max_num_tokens, context_chunking_policy=policy, chunk_unit=4
    )
    bench = Bench(
        SimpleScheduler(capacities[name](kv_cache_manager), micro_batch), kv_cache_manager
    )
    requests = [LlmRequest(i, p, n, priority=x) for i, (p, n, x) in enumerate(load)]
    for request in requests:
        insert_by_priority(bench.active, request)

    # When the load runs
    bench.run()

    # Then everyone has got all that was asked for, and every block is back
    assert sorted(bench.finished) == list(range(len(load)))
    for request, (prompt_len, max_new_tokens, _) in zip(requests, load, strict=True):
        assert request.num_tokens == prompt_len + max_new_tokens
    assert kv_cache_manager.get_num_free_blocks() == blocks


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"tokens": -1}, "tokens = -1 must be an integer of at least 0"),
        ({"max_new_tokens": -1}, "max_new_tokens = -1 must be an integer of at least 0"),
        ({"beam_width": 0}, "beam_width = 0 must be an integer of at least 1"),
        ({"num_draft_tokens": -2}, "num_draft_tokens = -2 must be an integer of at least 0"),
        ({"context_current_position": 5}, "context_current_position = 5 exceeds the prompt of 4"),
    ],
)
def test_a_request_made_by_hand_is_checked(values: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=f"request 7: {text}"):
        LlmRequest(7, **{"tokens": 4, "max_new_tokens": 4, **values})


def test_the_two_steps_are_not_taken_for_each_other() -> None:
    capacity, micro_batch = MaxRequestsScheduler(4), MicroBatchScheduler(4)
    with pytest.raises(ConfigError, match="^capacity_scheduler = .* must be a CapacityScheduler"):
        SimpleScheduler(micro_batch, capacity)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="^micro_batch_scheduler = None must be a MicroBatchSched"
    ):
        SimpleScheduler(capacity, None)  # type: ignore[arg-type]
