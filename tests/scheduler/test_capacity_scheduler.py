"""The capacity policies: examples by hand, and an independent model over generated states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmanager.errors import ConfigError
from gptmanager.scheduler import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    KvCacheManager,
    LlmRequest,
    LlmRequestState,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
    RequestList,
    ReuseCredit,
    StaticBatchScheduler,
)
from gptmanager.scheduler.wait_reasons import Wait, WaitReason

State = LlmRequestState
CONTEXT, GENERATION = State.CONTEXT_INIT, State.GENERATION_IN_PROGRESS
LAST_TOKEN, COMPLETE = State.GENERATION_TO_COMPLETE, State.GENERATION_COMPLETE


def ids(requests: RequestList) -> list[int]:
    return [request.request_id for request in requests]


def decide(scheduler: CapacityScheduler, active: RequestList) -> tuple[list[int], list[int]]:
    fitting, paused = scheduler.schedule_request(active)
    return ids(fitting), ids(paused)


class Adapters:
    """A cache of `max_pages`; the adapter with task id n takes n pages."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages

    def get_max_device_pages(self) -> int:
        return self.max_pages

    def determine_num_pages(self, lora_task_id: int) -> int:
        return lora_task_id


def waiting(request_id: int, prompt_len: int = 10, max_new_tokens: int = 10, **more) -> LlmRequest:
    return LlmRequest(request_id, prompt_len, max_new_tokens, **more)


def generating(
    kv: KvCacheManager, request_id: int, prompt_len: int = 10, max_new_tokens: int = 10, **more
) -> LlmRequest:
    """A request that has launched its first token and holds its prompt's blocks."""
    request = LlmRequest(request_id, prompt_len, max_new_tokens, **more)
    kv.add_sequence(request)
    request.move_to_next_context_chunk()
    request.add_token()
    return request


def in_context(
    kv: KvCacheManager, request_id: int, done: int, prompt_len: int = 30, **more
) -> LlmRequest:
    """A request with `done` tokens of its context computed, holding its whole prompt's blocks."""
    request = LlmRequest(request_id, prompt_len, 10, context_chunk_size=done, **more)
    kv.add_sequence(request)
    request.move_to_next_context_chunk()
    return request


# No KV cache ------------------------------------------------------------------------------------


def test_max_requests_takes_the_first_schedulable() -> None:
    states = [CONTEXT, COMPLETE, GENERATION, State.UNKNOWN, LAST_TOKEN, State.ENCODER_INIT, CONTEXT]
    active = [LlmRequest(i, 5, 5, state=state) for i, state in enumerate(states)]
    assert decide(MaxRequestsScheduler(3), active) == ([0, 2, 4], [])
    assert decide(MaxRequestsScheduler(9), active) == ([0, 2, 4, 6], [])


def test_a_subclass_may_open_other_states() -> None:
    class WithEncoder(MaxRequestsScheduler):
        no_schedule_until_state = State.ENCODER_INIT
        no_schedule_after_state = State.GENERATION_TO_COMPLETE

    active = [LlmRequest(i, 5, 5, state=state) for i, state in enumerate(State)]
    assert decide(WithEncoder(9), active) == ([1, 2, 3], [])


# GUARANTEED_NO_EVICT ----------------------------------------------------------------------------


def test_no_evict_reserves_what_running_requests_may_still_need() -> None:
    kv = KvCacheManager(10, 10)
    # 7 blocks in a life, 1 held: 9 free, 6 of them reserved
    running = generating(kv, 0, max_new_tokens=60)
    scheduler = GuaranteedNoEvictScheduler(8, kv)
    assert decide(scheduler, [running, waiting(1, 10, 20)]) == ([0, 1], [])
    assert decide(scheduler, [running, waiting(1, 10, 21)]) == ([0], [])


def test_no_evict_stops_at_the_first_misfit() -> None:
    kv = KvCacheManager(6, 10)
    running = generating(kv, 4)
    active = [waiting(0), waiting(1, 30, 30), waiting(2), waiting(3), running]
    # request 4 stands behind the misfit and runs all the same; 2 and 3 would fit and wait
    assert decide(GuaranteedNoEvictScheduler(8, kv), active) == ([4, 0], [])


def test_no_evict_limits_the_number_of_requests() -> None:
    kv = KvCacheManager(100, 10)
    active = [waiting(0), generating(kv, 1), waiting(2), generating(kv, 3)]
    assert decide(GuaranteedNoEvictScheduler(1, kv), active) == ([1], [])
    assert decide(GuaranteedNoEvictScheduler(2, kv), active) == ([1, 3], [])
    assert decide(GuaranteedNoEvictScheduler(3, kv), active) == ([1, 3, 0], [])


def test_no_evict_takes_an_unfinished_context_with_its_remaining_need() -> None:
    kv = KvCacheManager(5, 10)
    # 4 blocks in a life, 3 held
    unfinished = in_context(kv, 0, done=10)
    scheduler = GuaranteedNoEvictScheduler(8, kv)
    assert decide(scheduler, [unfinished, waiting(1, 5, 5)]) == ([0, 1], [])
    assert decide(scheduler, [waiting(1, 10, 5), unfinished]) == ([1], [])


def test_no_evict_counts_adapter_pages_of_running_requests_first() -> None:
    kv = KvCacheManager(100, 10)
    running = generating(kv, 9, lora_task_id=3)
    active = [
        waiting(0, lora_task_id=4),
        waiting(1, lora_task_id=2),
        waiting(2),
        waiting(3, lora_task_id=3),
        waiting(4, lora_task_id=2),
        waiting(5, lora_task_id=1),
        running,
    ]
    # 5 pages, 3 claimed: 4 is too large and is passed over alone; 2 and 3 are shared afterwards
    scheduler = GuaranteedNoEvictScheduler(9, kv, peft_cache_manager=Adapters(5))
    assert decide(scheduler, active) == ([9, 1, 2, 3, 4], [])
    assert scheduler.why_waiting(active)[0].text == (
        "for adapter pages: it needs 4, 5 are free, 3 must stay free for 1 running request, "
        "short by 2"
    )


@pytest.mark.parametrize(
    ("running", "starting", "text"),
    [
        (1, 0, "1 running request"),
        (2, 0, "2 running requests"),
        (0, 1, "1 starting request"),
        (2, 1, "2 running and 1 starting requests"),
        (0, 0, "0 running requests"),
    ],
)
def test_a_wait_names_the_requests_that_come_first(running: int, starting: int, text: str) -> None:
    wait = Wait(WaitReason.BATCH_FULL, 1, 3, 3, running, starting)
    assert wait.text == f"for room in the batch: {text}, at most 3 at once"


def test_no_evict_stops_at_a_cross_cache_misfit() -> None:
    kv, cross = KvCacheManager(100, 10), KvCacheManager(4, 10, cross=True)
    active = [waiting(0, encoder_len=20), waiting(1, encoder_len=30), waiting(2, encoder_len=1)]
    scheduler = GuaranteedNoEvictScheduler(9, kv, cross_kv_cache_manager=cross)
    assert decide(scheduler, active) == ([0], [])


def test_a_wait_for_blocks_of_the_cross_cache_has_the_numbers_of_that_cache() -> None:
    kv, cross = KvCacheManager(2, 10), KvCacheManager(2, 10, cross=True)
    scheduler = GuaranteedNoEvictScheduler(9, kv, cross_kv_cache_manager=cross)
    waits = scheduler.why_waiting([waiting(0, encoder_len=30)])  # 2 blocks of the first would do
    assert waits == {0: Wait(WaitReason.KV_BLOCKS, needed=3, free=2)}


def test_static_batch_admits_only_when_nothing_runs() -> None:
    kv = KvCacheManager(20, 10)
    running = generating(kv, 0)
    scheduler = StaticBatchScheduler(8, kv)
    assert decide(scheduler, [waiting(1), running]) == ([0], [])
    reason = Wait(WaitReason.STATIC_BATCH, running=1)
    assert scheduler.why_waiting([waiting(1), running]) == {1: reason}
    assert decide(scheduler, [waiting(1), in_context(kv, 2, done=10)]) == ([1, 2], [])


# MAX_UTILIZATION --------------------------------------------------------------------------------


def full_pool(num_requests: int, tokens_per_block: int = 10) -> tuple[KvCacheManager, RequestList]:
    """Requests whose next step takes a block each, in a pool without a free one."""
    kv = KvCacheManager(num_requests, tokens_per_block)
    return kv, [generating(kv, i, tokens_per_block) for i in range(num_requests)]


def test_a_wait_counts_the_blocks_that_running_requests_take_in_the_step() -> None:
    kv = KvCacheManager(2, 10)
    waits = MaxUtilizationScheduler(8, kv).why_waiting([generating(kv, 0), waiting(1, 5)])
    assert waits == {1: Wait(WaitReason.KV_BLOCKS, needed=1, free=1, reserved=1, running=1)}


def test_max_utilization_pauses_from_the_end() -> None:
    kv, active = full_pool(5)
    # each victim's block serves one request in front: 4 for 0, 3 for 1, and 2 for itself
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0, 1], [4, 3, 2])


def test_max_utilization_may_pause_the_request_itself() -> None:
    kv = KvCacheManager(2, 10)
    # request 0 has room in its block; request 1 needs another one
    active = [generating(kv, 0, prompt_len=5), generating(kv, 1)]
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0], [1])


def test_max_utilization_never_pauses_what_the_pass_has_taken() -> None:
    kv = KvCacheManager(2, 10)
    active = [generating(kv, 0, prompt_len=5), waiting(1, 15), generating(kv, 2, prompt_len=5)]
    # even the victim's block is not enough for request 1, and request 0 is safe
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0], [2])


def test_max_utilization_walk_ends_before_the_victim() -> None:
    kv = KvCacheManager(4, 10)
    active = [generating(kv, 0), waiting(1, 20), generating(kv, 2), waiting(3, 1)]
    # 0 takes one of two free blocks, 1 needs two: 2 is paused, 3 stands behind it
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0, 1], [2])


def test_max_utilization_stops_without_a_victim() -> None:
    kv = KvCacheManager(4, 10)
    active = [generating(kv, 0, prompt_len=5), waiting(1, 40), waiting(2, 5)]
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0], [])


def test_started_means_generation_or_past_the_first_chunk() -> None:
    kv = KvCacheManager(4, 10)
    active = [waiting(0, 20), in_context(kv, 1, done=10), waiting(2, 10, context_chunk_size=0)]
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0], [1])


def test_a_later_chunk_needs_no_block() -> None:
    kv = KvCacheManager(3, 10)
    assert decide(MaxUtilizationScheduler(8, kv), [in_context(kv, 0, done=10)]) == ([0], [])


def test_max_utilization_pauses_started_requests_beyond_the_limit() -> None:
    kv = KvCacheManager(100, 10)
    active = [waiting(0), waiting(1), generating(kv, 2), waiting(3), generating(kv, 4)]
    assert decide(MaxUtilizationScheduler(2, kv), active) == ([0, 1], [4, 2])
    assert decide(MaxUtilizationScheduler(3, kv), active) == ([0, 1, 2], [4])


def test_max_utilization_pauses_for_adapter_pages() -> None:
    kv = KvCacheManager(100, 10)
    active = [
        generating(kv, 0, lora_task_id=3),
        generating(kv, 1, lora_task_id=3),
        waiting(2, lora_task_id=2),
        generating(kv, 3),
    ]
    # a victim's pages do not count, nor do they help: 2 does not fit beside 3
    scheduler = MaxUtilizationScheduler(8, kv, peft_cache_manager=Adapters(4))
    assert decide(scheduler, active) == ([0, 1], [3])


def test_lookahead_asks_for_two_steps() -> None:
    kv = KvCacheManager(2, 10)
    active = [generating(kv, 0, prompt_len=9), generating(kv, 1, prompt_len=9)]
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0, 1], [])
    ahead = MaxUtilizationScheduler(8, kv, two_step_lookahead=True)
    assert decide(ahead, active) == ([0], [1])


def test_a_decision_changes_neither_the_list_nor_the_accounts() -> None:
    kv, active = full_pool(5)
    before = list(active)
    scheduler = MaxUtilizationScheduler(8, kv)
    assert decide(scheduler, active) == decide(scheduler, active)
    assert active == before
    kv.check()
    assert kv.get_num_free_blocks() == 0


# Guards -----------------------------------------------------------------------------------------


def paused_often(request: LlmRequest, times: int) -> LlmRequest:
    request.pause_count = times
    return request


def test_an_exempt_request_is_spared_and_runs_on() -> None:
    kv = KvCacheManager(3, 10)
    active = [
        generating(kv, 0),
        generating(kv, 1),
        paused_often(generating(kv, 2, prompt_len=5), 3),
        waiting(3, 1),
    ]
    scheduler = MaxUtilizationScheduler(8, kv, max_pauses=3)
    assert decide(scheduler, active) == ([0, 2], [1])
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0], [2, 1])


def test_an_exempt_request_is_paused_when_there_is_no_other_victim() -> None:
    kv, active = full_pool(2)
    paused_often(active[1], 3)
    # the other victim is request 0 itself
    assert decide(MaxUtilizationScheduler(8, kv, max_pauses=3), active) == ([1], [0])
    paused_often(active[0], 3)
    assert decide(MaxUtilizationScheduler(8, kv, max_pauses=3), active) == ([0], [1])


def test_nothing_new_starts_at_the_cost_of_an_exempt_request() -> None:
    kv = KvCacheManager(2, 10)
    active = [waiting(0, 20), paused_often(generating(kv, 1, prompt_len=5), 3), waiting(2, 1)]
    assert decide(MaxUtilizationScheduler(8, kv, max_pauses=3), active) == ([1], [])
    assert decide(MaxUtilizationScheduler(8, kv), active) == ([0], [1])


def test_a_paused_request_starts_again_only_with_headroom() -> None:
    kv = KvCacheManager(7, 10)
    active = [
        generating(kv, 0),
        paused_often(waiting(1, 20), 1),
        waiting(2, 5),
        generating(kv, 3, prompt_len=5),
    ]
    # 5 blocks are free: 1 for request 0, 2 for the context, 2 besides
    with_two = MaxUtilizationScheduler(8, kv, resume_headroom_blocks=2)
    assert decide(with_two, active) == ([0, 1, 2, 3], [])
    # nothing new overtakes it, and who runs goes on
    with_three = MaxUtilizationScheduler(8, kv, resume_headroom_blocks=3)
    assert decide(with_three, active) == ([0, 3], [])
    # alone it needs no headroom
    assert decide(with_three, active[1:]) == ([1, 2, 3], [])


@pytest.mark.parametrize(("steps", "starts"), [(0, True), (4, True), (5, False)])
def test_a_request_starts_only_where_all_can_go_on(steps: int, starts: bool) -> None:
    kv = KvCacheManager(4, 10)
    # 2 blocks are free: request 0 takes one in 5 steps, request 1 now and another in 5 steps
    active = [generating(kv, 0, prompt_len=15), waiting(1, 6), waiting(2, 1)]
    scheduler = MaxUtilizationScheduler(2, kv, start_headroom_steps=steps)
    assert decide(scheduler, active) == ([0, 1] if starts else [0], [])
    if not starts:
        waits = scheduler.why_waiting(active)
        assert waits is not None
        assert waits[1] == Wait(WaitReason.KV_BLOCKS, needed=1, free=2, reserved=2, running=1)
    # alone it needs no headroom
    assert decide(scheduler, active[1:2]) == ([1], [])


def test_the_headroom_ends_with_the_outputs() -> None:
    kv = KvCacheManager(3, 10)
    active = [generating(kv, 0, prompt_len=5, max_new_tokens=6), waiting(1, 10, 10)]
    # the first stores 10 of its 11 tokens: one block; the second 19 of 20: two blocks
    assert decide(MaxUtilizationScheduler(2, kv, start_headroom_steps=99), active) == ([0, 1], [])
    kv = KvCacheManager(2, 10)
    active = [generating(kv, 0, prompt_len=5, max_new_tokens=6), waiting(1, 10, 10)]
    assert decide(MaxUtilizationScheduler(2, kv, start_headroom_steps=99), active) == ([0], [])


def test_the_headroom_ends_with_the_attention_window() -> None:
    def active(kv: KvCacheManager) -> list[LlmRequest]:
        return [generating(kv, 0, prompt_len=15, max_new_tokens=90), waiting(1, 9, 90)]

    scheduler = MaxUtilizationScheduler
    kv = KvCacheManager(4, 10, max_attention_window=20)  # two blocks each, however long they get
    assert decide(scheduler(2, kv, start_headroom_steps=99), active(kv)) == ([0, 1], [])
    kv = KvCacheManager(4, 10)
    assert decide(scheduler(2, kv, start_headroom_steps=99), active(kv)) == ([0], [])


def test_the_headroom_takes_no_rights_from_a_higher_rank() -> None:
    kv = KvCacheManager(3, 10)
    lowest = generating(kv, 2)
    active = [generating(kv, 0), waiting(1, 5), lowest]
    scheduler = MaxUtilizationScheduler(8, kv, start_headroom_steps=20)
    # a first start pauses the lower rank, as without the guard
    assert decide(scheduler, active) == ([0, 1], [2])
    # a start after a pause does not
    assert decide(scheduler, [active[0], paused_often(active[1], 1), lowest]) == ([0], [2])


def test_the_guards_of_a_bare_class_are_off() -> None:
    kv = KvCacheManager(1)
    scheduler = MaxUtilizationScheduler(1, kv)
    assert scheduler.max_pauses is None
    assert scheduler.resume_headroom_blocks == scheduler.start_headroom_steps == 0
    assert not GuaranteedNoEvictScheduler(1, kv).started_contexts_first
    assert not StaticBatchScheduler(1, kv).started_contexts_first


# Constructors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [GuaranteedNoEvictScheduler, StaticBatchScheduler])
def test_limits_are_checked(policy: Callable[..., CapacityScheduler]) -> None:
    kv = KvCacheManager(1)
    with pytest.raises(ConfigError, match="max_num_requests = 0 "):
        policy(0, kv)
    with pytest.raises(ConfigError, match="max_num_requests = 'all'"):
        policy("all", kv)
    with pytest.raises(ConfigError, match="max_pauses = -1"):
        MaxUtilizationScheduler(1, kv, max_pauses=-1)
    with pytest.raises(ConfigError, match="resume_headroom_blocks = -1"):
        MaxUtilizationScheduler(1, kv, resume_headroom_blocks=-1)
    with pytest.raises(ConfigError, match="start_headroom_steps = -1"):
        MaxUtilizationScheduler(1, kv, start_headroom_steps=-1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_requests": 1.5}, "max_num_requests = 1.5 must be an integer of at least 1"),
        ({"max_num_requests": True}, "max_num_requests = True must be an integer of at least 1"),
        ({"kv_cache_manager": None}, "kv_cache_manager must not be None: use MaxRequests"),
        ({"kv_cache_manager": 100}, "kv_cache_manager = 100 must be a KvCacheManager"),
        ({"cross_kv_cache_manager": 7}, "cross_kv_cache_manager = 7 must be a KvCacheManager"),
        ({"peft_cache_manager": "on"}, "peft_cache_manager = 'on' must be a LoRA cache"),
        ({"two_step_lookahead": 1}, "two_step_lookahead = 1 must be True or False"),
    ],
)
@pytest.mark.parametrize(
    "policy", [GuaranteedNoEvictScheduler, StaticBatchScheduler, MaxUtilizationScheduler]
)
def test_every_argument_is_checked_by_name(
    policy: Callable[..., CapacityScheduler], options: dict[str, Any], text: str
) -> None:
    good: dict[str, Any] = {"max_num_requests": 1, "kv_cache_manager": KvCacheManager(1)}
    with pytest.raises(ConfigError, match=text):
        policy(**{**good, **options})


def test_arguments_of_single_policies_are_checked_by_name() -> None:
    kv = KvCacheManager(1)
    with pytest.raises(ConfigError, match="max_num_requests = 0 must be an integer of at least 1"):
        MaxRequestsScheduler(0)
    with pytest.raises(ConfigError, match="started_contexts_first = None must be True"):
        GuaranteedNoEvictScheduler(1, kv, started_contexts_first=None)  # type: ignore[arg-type]
    for name in ("max_pauses", "resume_headroom_blocks", "start_headroom_steps"):
        with pytest.raises(ConfigError, match=f"{name} = 0.5 must be an integer of at least 0"):
            MaxUtilizationScheduler(1, kv, **{name: 0.5})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="capacity_scheduler = None must be a CapacityScheduler"):
        ReuseCredit(None, kv)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache_manager = 5 must be a KvCacheManager"):
        ReuseCredit(MaxRequestsScheduler(1), 5)  # type: ignore[arg-type]


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CapacityScheduler()  # type: ignore[abstract]


class Partial:
    """A host's own manager, which has some of the bulk counts; `asked` are those that were used."""

    def __init__(self, kv: KvCacheManager, names: set[str]) -> None:
        self.kv, self.names, self.asked = kv, names, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("sum_", "most_")):
            if name not in self.names:
                raise AttributeError(name)
            return lambda *args: self.asked.add(name) or getattr(self.kv, name)(*args)
        return getattr(self.kv, name)


BULK = ["sum_remaining_blocks_to_completion", "most_blocks_to_completion",
        "sum_needed_blocks_one_step", "most_blocks_one_step"]  # fmt: skip


@pytest.mark.parametrize("num_blocks", [5, 7, 12, 40])
@pytest.mark.parametrize("policy", [GuaranteedNoEvictScheduler, MaxUtilizationScheduler])
@pytest.mark.parametrize("name", [None, *BULK])
def test_a_manager_that_has_not_all_bulk_counts_decides_the_same(name, policy, num_blocks) -> None:
    kv = KvCacheManager(num_blocks, 10)
    active = [generating(kv, 1, 20), generating(kv, 2, 20, 30), waiting(3), waiting(4, 25)]
    expected = decide(policy(8, kv), active)
    for names in (set(BULK) - {name}, {name} & set(BULK)):
        partial = Partial(kv, names)
        assert decide(policy(8, partial), active) == expected
        assert partial.asked <= names
        if name is None and names:
            assert partial.asked == set(
                BULK[:2] if policy is GuaranteedNoEvictScheduler else BULK[2:]
            )


# Against a model --------------------------------------------------------------------------------


@dataclass
class Case:
    """One request and what the stub below says of it. Counts in blocks."""

    request: LlmRequest
    remaining: int
    one_step: int
    held: int
    cross: int


class Ledger:
    """A KV cache manager that knows only what the cases say."""

    def __init__(self, cases: list[Case], free: int, column: str = "remaining") -> None:
        self.cases = {case.request.request_id: case for case in cases}
        self.free = self.what_if = free
        self.column = column

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        return getattr(self.cases[request.request_id], self.column)

    def get_needed_blocks_one_step(self, request: LlmRequest, two_step_lookahead: bool) -> int:
        return self.cases[request.request_id].one_step * (1 + two_step_lookahead)

    def start_scheduling(self) -> None:
        self.what_if = self.free

    def scheduling_remove_sequence(self, request_id: int) -> None:
        self.what_if += self.cases[request_id].held

    def scheduling_has_free_blocks(self, num_required: int = 1) -> bool:
        return num_required <= self.what_if


@st.composite
def case_lists(draw: st.DrawFn) -> list[Case]:
    cases = []
    for request_id in range(draw(st.integers(0, 9))):
        state = draw(st.sampled_from([CONTEXT, GENERATION, CONTEXT, GENERATION, *State]))
        request = LlmRequest(
            request_id,
            10,
            10,
            state=state,
            lora_task_id=draw(st.none() | st.integers(1, 4)),
            context_current_position=draw(st.sampled_from([0, 4])),
            context_chunk_size=draw(st.sampled_from([None, 0, 4])),
        )
        numbers = [draw(st.integers(0, 5)) for _ in range(4)]
        cases.append(Case(request, *numbers))
    return cases


def is_open(case: Case) -> bool:
    return State.CONTEXT_INIT <= case.request.state < State.GENERATION_COMPLETE


def pages_of(cases: list[Case]) -> int:
    return sum({case.request.lora_task_id or 0 for case in cases})


def model_no_evict(
    cases: list[Case], free: int, free_cross: int, max_pages: int, limit: int, static: bool
) -> list[Case]:
    """Admission as a fold: what is taken so far decides on the next one, all counted anew."""
    taken = [c for c in cases if c.request.state in (GENERATION, LAST_TOKEN)][:limit]
    if static and taken:
        return taken
    for case in [c for c in cases if c.request.state is CONTEXT]:
        both = [*taken, case]
        if len(both) > limit:
            return taken
        if sum(c.remaining for c in both) > free or sum(c.cross for c in both) > free_cross:
            # requirement and reservations are on one side here; nothing else is reserved
            return taken
        if pages_of(both) <= max_pages or pages_of(both) == pages_of(taken):
            taken = both
    return taken


def model_max_utilization(
    cases: list[Case], free: int, max_pages: int, limit: int, steps: int
) -> tuple[list[Case], list[Case]]:
    """The walk as a recursion over (place, end), all counted anew at each place."""

    def started(case: Case) -> bool:
        request = case.request
        if request.state is CONTEXT:
            return request.context_chunk_size is not None and request.context_current_position > 0
        return request.state in (GENERATION, LAST_TOKEN)

    def walk(
        place: int, end: int, taken: list[Case], paused: list[Case]
    ) -> tuple[list[Case], list[Case]]:
        if place == end:
            return taken, paused
        case = cases[place]
        if not is_open(case):
            return walk(place + 1, end, taken, paused)
        both = [*taken, case]
        blocks = steps * sum(c.one_step for c in both)
        if (
            len(both) <= limit
            and blocks <= free + sum(c.held for c in paused)
            and pages_of(both) <= max_pages
        ):
            return walk(place + 1, end, both, paused)
        victims = [other for other in range(place, end) if started(cases[other])]
        if not victims:
            return taken, paused
        return walk(place, max(victims), taken, [*paused, cases[max(victims)]])

    return walk(0, len(cases), [], [])


limits = {
    "free": st.integers(0, 20),
    "max_pages": st.integers(0, 10),
    "limit": st.integers(1, 9),
}


@settings(max_examples=120 * FUZZ, deadline=None)
@given(cases=case_lists(), free_cross=st.integers(0, 20), static=st.booleans(), **limits)
def test_no_evict_agrees_with_the_model(
    cases: list[Case], free: int, free_cross: int, max_pages: int, limit: int, static: bool
) -> None:
    policy = StaticBatchScheduler if static else GuaranteedNoEvictScheduler
    scheduler = policy(
        limit,
        Ledger(cases, free),  # type: ignore[arg-type]
        cross_kv_cache_manager=Ledger(cases, free_cross, "cross"),  # type: ignore[arg-type]
        peft_cache_manager=Adapters(max_pages),
    )
    expected = model_no_evict(cases, free, free_cross, max_pages, limit, static)
    fitting, paused = scheduler.schedule_request([case.request for case in cases])
    assert ids(fitting) == ids([case.request for case in expected])
    assert paused == []


@settings(max_examples=120 * FUZZ, deadline=None)
@given(cases=case_lists(), lookahead=st.booleans(), **limits)
def test_max_utilization_agrees_with_the_model(
    cases: list[Case], free: int, max_pages: int, limit: int, lookahead: bool
) -> None:
    scheduler = MaxUtilizationScheduler(
        limit,
        Ledger(cases, free),  # type: ignore[arg-type]
        peft_cache_manager=Adapters(max_pages),
        two_step_lookahead=lookahead,
    )
    expected = model_max_utilization(cases, free, max_pages, limit, 1 + lookahead)
    decided = scheduler.schedule_request([case.request for case in cases])
    for requests, part in zip(decided, expected, strict=True):
        assert ids(requests) == ids([case.request for case in part])


@settings(max_examples=50 * FUZZ, deadline=None)
@given(cases=case_lists(), counts=st.lists(st.integers(0, 3), min_size=9, max_size=9), **limits)
def test_guards_pause_no_more_than_the_bare_policy_and_keep_it_going(
    cases: list[Case], counts: list[int], free: int, max_pages: int, limit: int
) -> None:
    for case, count in zip(cases, counts, strict=False):
        case.request.pause_count = count
    active = [case.request for case in cases]
    ledger = Ledger(cases, free)
    guarded = MaxUtilizationScheduler(
        limit,
        ledger,  # type: ignore[arg-type]
        peft_cache_manager=Adapters(max_pages),
        max_pauses=2,
        resume_headroom_blocks=2,
    )
    fitting, paused = guarded.schedule_request(active)
    # nobody is decided on twice, and only schedulable requests are decided on
    decided = ids(fitting) + ids(paused)
    assert len(set(decided)) == len(decided)
    assert all(CONTEXT <= request.state < COMPLETE for request in fitting + paused)
    # what fits does fit
    assert sum(ledger.cases[i].one_step for i in ids(fitting)) <= ledger.what_if
    assert len(fitting) <= limit
