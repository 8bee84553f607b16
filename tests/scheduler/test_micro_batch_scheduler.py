"""The micro batch scheduler: examples by hand, and an independent model over generated states."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmanager.config import ContextChunkingPolicy
from gptmanager.errors import ConfigError, SchedulerError
from gptmanager.scheduler import LlmRequest, LlmRequestState, MicroBatchScheduler, RequestList
from gptmanager.scheduler.wait_reasons import WaitReason

State = LlmRequestState
GENERATION = State.GENERATION_IN_PROGRESS
FCFS = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS
FORCE_CHUNK = ContextChunkingPolicy.FORCE_CHUNK


def ids(requests: RequestList) -> list[int]:
    return [request.request_id for request in requests]


def decide(
    scheduler: MicroBatchScheduler, requests: RequestList, inflight: frozenset[int] = frozenset()
) -> tuple[list[int], list[int]]:
    context, generation = scheduler.schedule(requests, inflight)
    return ids(context), ids(generation)


def sizes(requests: RequestList) -> list[int | None]:
    return [request.context_chunk_size for request in requests]


def context(request_id: int, prompt_len: int, position: int = 0, **more) -> LlmRequest:
    return LlmRequest(request_id, prompt_len, 10, context_current_position=position, **more)


def generation(request_id: int, beam_width: int = 1, num_draft_tokens: int = 0) -> LlmRequest:
    return LlmRequest(
        request_id,
        10,
        10,
        beam_width=beam_width,
        num_draft_tokens=num_draft_tokens,
        state=GENERATION,
    )


# The pass over the list -----------------------------------------------------------------------


def test_list_order_decides_and_the_first_token_misfit_ends_the_pass() -> None:
    requests = [context(0, 5), generation(1), context(2, 7), generation(3), context(4, 1)]
    assert decide(MicroBatchScheduler(9, 12), requests) == ([0], [1])
    assert decide(MicroBatchScheduler(9, 13), requests) == ([0, 2], [1])
    assert decide(MicroBatchScheduler(9), requests) == ([0, 2, 4], [1, 3])
    # nothing was cut, so no size was written
    assert sizes(requests) == [None] * 5


def test_the_rest_of_a_context_that_the_loop_has_cut_costs_what_is_left() -> None:
    rest = context(0, 12, 8, context_chunk_size=4)
    assert decide(MicroBatchScheduler(9, 10), [rest, context(1, 6)]) == ([0, 1], [])
    assert decide(MicroBatchScheduler(9, 9), [rest, context(1, 6)]) == ([0], [])


def test_batch_size_counts_contexts_and_generations() -> None:
    requests = [context(0, 5), generation(1), context(2, 5), generation(3)]
    assert decide(MicroBatchScheduler(3), requests) == ([0, 2], [1])


def test_unschedulable_requests_and_those_in_flight_are_passed_over() -> None:
    requests = [LlmRequest(i, 5, 5, state=state) for i, state in enumerate(State)]
    assert decide(MicroBatchScheduler(9), requests) == ([2], [3, 4])
    requests = [generation(0), context(1, 5), generation(2), context(3, 5)]
    assert decide(MicroBatchScheduler(2), requests, frozenset({0, 1})) == ([3], [2])


def test_drafts_cost_tokens() -> None:
    requests = [generation(0, num_draft_tokens=4), context(1, 5, num_draft_tokens=2)]
    assert decide(MicroBatchScheduler(9, 12), requests) == ([1], [0])
    assert decide(MicroBatchScheduler(9, 11), requests) == ([], [0])


def test_generation_requests_share_the_beam_width_of_the_first() -> None:
    requests = [generation(0, 2), generation(1, 1), context(2, 5, beam_width=4), generation(3, 2)]
    # the skipped one takes no slot
    assert decide(MicroBatchScheduler(3), requests) == ([2], [0, 3])
    mixed = MicroBatchScheduler(3, mixed_beam_widths=True)
    assert decide(mixed, requests) == ([2], [0, 1])
    # the budget is checked before the width: request 1 would be skipped, but ends the pass
    requests = [generation(0, 2), generation(1, 4), generation(2, 2)]
    assert decide(MicroBatchScheduler(3, 5), requests) == ([], [0])
    assert decide(MicroBatchScheduler(3, 6), requests) == ([], [0, 2])


def test_unchunked_context_beyond_the_limit_is_an_error() -> None:
    text = r"^The number of context tokens \(9\) exceeds the limit value \(8\): LlmRequest\(7, "
    with pytest.raises(SchedulerError, match=text):
        MicroBatchScheduler(4, max_context_length=8).schedule(
            [context(7, 7, num_draft_tokens=2)], frozenset()
        )
    # credited tokens are not computed
    cheaper = context(7, 9, estimated_reusable_tokens=1)
    assert decide(MicroBatchScheduler(4, max_context_length=8), [cheaper]) == ([7], [])


def test_a_subclass_may_schedule_encoders() -> None:
    class WithEncoder(MicroBatchScheduler):
        no_schedule_until_state = State.ENCODER_INIT

    encoder = LlmRequest(0, 3, 5, encoder_len=20, state=State.ENCODER_INIT)
    requests = [encoder, context(1, 5), generation(2)]
    assert decide(WithEncoder(4), requests) == ([0, 1], [2])
    assert decide(WithEncoder(4, 24), requests) == ([0], [])
    assert decide(WithEncoder(4, 24, context_chunking_policy=FCFS), requests) == ([1, 0], [2])
    assert sizes(requests) == [None, 3, None]
    with pytest.raises(SchedulerError, match=r"^The number of encoder tokens \(20\) exceeds"):
        WithEncoder(4, max_context_length=19).schedule(requests, frozenset())


def test_results_ascend_by_adapter_and_keep_the_order_otherwise() -> None:
    requests = [
        LlmRequest(i, 4, 5, state=state, lora_task_id=task)
        for i, (state, task) in enumerate(
            [
                (GENERATION, 7),
                (State.CONTEXT_INIT, 3),
                (GENERATION, None),
                (State.CONTEXT_INIT, None),
                (GENERATION, 0),
                (State.CONTEXT_INIT, 3),
                (GENERATION, 7),
            ]
        )
    ]
    assert decide(MicroBatchScheduler(9), requests) == ([3, 1, 5], [2, 4, 0, 6])


def test_unfinished_contexts_come_first_only_if_sizes_were_recomputed() -> None:
    requests = [
        context(0, 6, lora_task_id=0),
        context(1, 8, lora_task_id=2),
        context(2, 12, lora_task_id=1),
    ]
    scheduler = MicroBatchScheduler(4, 18, context_chunking_policy=FCFS, chunk_unit=4)
    assert decide(scheduler, requests) == ([2, 0, 1], [])
    assert sizes(requests) == [6, 8, 4]
    scheduler = MicroBatchScheduler(4, 17, context_chunking_policy=EQUAL_PROGRESS, chunk_unit=4)
    assert decide(scheduler, requests) == ([2, 1, 0], [])
    assert sizes(requests) == [6, 4, 4]
    scheduler = MicroBatchScheduler(4, 26, context_chunking_policy=FCFS, chunk_unit=4)
    assert decide(scheduler, requests) == ([0, 2, 1], [])
    assert sizes(requests) == [6, 8, 12]


def test_sizes_that_another_scheduler_wrote_do_not_reorder_whole_contexts() -> None:
    requests = [context(0, 10), context(1, 10, position=4, context_chunk_size=0)]
    assert decide(MicroBatchScheduler(4), requests) == ([0, 1], [])
    assert decide(MicroBatchScheduler(4, context_chunking_policy=FCFS), requests) == ([0, 1], [])


# Chunks ---------------------------------------------------------------------------------------


def chunked(
    policy: ContextChunkingPolicy,
    prompts: list[int],
    capacity: int | None,
    unit: int,
    max_context_length: int | None = None,
) -> list[int | None]:
    requests = [context(i, n) for i, n in enumerate(prompts)]
    MicroBatchScheduler(9).set_chunk_sizes(requests, policy, capacity, unit, max_context_length)
    return sizes(requests)


def test_first_come_first_served() -> None:
    # 25 does not hold all of 30: floor to 20; the 5 left over go on, 3 is whole, 7 is cut to 0
    assert chunked(FCFS, [30, 7, 3], 25, 10) == [20, 0, 3]
    assert chunked(FCFS, [10, 10, 10], 25, 10) == [10, 10, 0]
    assert chunked(FCFS, [30, 30], None, 10, 25) == [20, 20]
    assert chunked(FCFS, [30, 30], None, 10) == [30, 30]
    assert chunked(FCFS, [30], 9, 10) == [0]


def test_equal_progress() -> None:
    assert chunked(EQUAL_PROGRESS, [30, 30], 40, 10) == [20, 20]
    # the first two grow in the second round, then the third has no room
    assert chunked(EQUAL_PROGRESS, [30, 30, 30], 50, 10) == [20, 20, 10]
    # a small remainder still fits where a unit does not
    assert chunked(EQUAL_PROGRESS, [30, 13, 30], 35, 10) == [10, 13, 10]
    # the limit of one context stops only that context
    assert chunked(EQUAL_PROGRESS, [50, 30], 60, 10, 25) == [20, 20]
    assert chunked(EQUAL_PROGRESS, [25, 24], None, 10, 24) == [20, 24]
    assert chunked(EQUAL_PROGRESS, [8, 8, 8], 15, 10) == [8, 0, 0]


def test_force_chunk_always_applies() -> None:
    assert chunked(FORCE_CHUNK, [30, 7, 30], 25, 10) == [10, 7, 0]
    requests = [context(0, 25, position=20), context(1, 12), context(2, 9)]
    scheduler = MicroBatchScheduler(4, context_chunking_policy=FORCE_CHUNK, chunk_unit=10)
    assert decide(scheduler, requests) == ([1, 0, 2], [])
    assert sizes(requests) == [5, 10, 9]


def test_contexts_get_what_generation_leaves_and_chunk_zero_takes_a_slot() -> None:
    requests = [context(0, 9), context(1, 9), generation(2), generation(3)]
    scheduler = MicroBatchScheduler(3, 12, context_chunking_policy=FCFS, chunk_unit=4)
    # 11 tokens for contexts: 9 and 2, floored to 0; request 1 still fills the batch
    assert decide(scheduler, requests) == ([0], [2])
    assert sizes(requests) == [9, 0, None, None]


@pytest.mark.parametrize(
    ("policy", "reserved"), [(FCFS, 3 + 35), (EQUAL_PROGRESS, 3 + 30), (FORCE_CHUNK, 3 + 30)]
)
def test_a_context_without_a_chunk_waits_for_tokens_that_others_take(
    policy: ContextChunkingPolicy, reserved: int
) -> None:
    scheduler = MicroBatchScheduler(9, 40, context_chunking_policy=policy, chunk_unit=10)
    lengths = {1: 35, 2: 60, 3: 60, 4: 60}
    requests = [generation(0, 3), *(context(it, length) for it, length in lengths.items())]
    assert 4 not in decide(scheduler, requests)[0]
    waits = scheduler.why_waiting(requests, frozenset())
    assert waits is not None
    assert (waits[4].reason, waits[4].needed, waits[4].free) == (WaitReason.TOKEN_BUDGET, 10, 40)
    assert waits[4].reserved == reserved


def test_a_wait_counts_no_reused_tokens_of_others() -> None:
    scheduler = MicroBatchScheduler(9, 40, context_chunking_policy=FCFS, chunk_unit=10)
    reusing = context(1, 60, estimated_reusable_tokens=30)
    waits = scheduler.why_waiting([generation(0, 3), reusing, context(2, 60)], frozenset())
    assert waits is not None
    assert (waits[2].needed, waits[2].free, waits[2].reserved) == (10, 40, 3 + 30)


def test_whole_contexts_are_not_charged_during_the_pass() -> None:
    requests = [context(0, 100), generation(1), generation(2)]
    scheduler = MicroBatchScheduler(9, 10, context_chunking_policy=FCFS, chunk_unit=4)
    assert decide(scheduler, requests) == ([0], [1, 2])
    assert sizes(requests)[0] == 8


def test_a_chunk_goes_on_where_the_last_one_ended() -> None:
    request = context(0, 25)
    scheduler = MicroBatchScheduler(1, 12, context_chunking_policy=FCFS, chunk_unit=4)
    seen = []
    while request.state is State.CONTEXT_INIT:
        assert decide(scheduler, [request]) == ([0], [])
        seen.append((request.context_current_position, request.context_chunk_size))
        request.move_to_next_context_chunk()
    assert seen == [(0, 12), (12, 12), (24, 1)]


# Drafts ---------------------------------------------------------------------------------------


def drafts_kept(
    prompts: list[tuple[int, int]],
    capacity: int | None,
    unit: int = 10,
    longest: int | None = None,
    rule: str = "reserve",
) -> list[int]:
    requests = [context(i, n, num_draft_tokens=k) for i, (n, k) in enumerate(prompts)]
    scheduler = MicroBatchScheduler(9, draft_rule=rule)  # type: ignore[arg-type]
    scheduler.set_chunk_sizes(requests, FCFS, capacity, unit, longest)
    return [request.num_draft_tokens for request in requests]


def test_drafts_fill_the_last_unit_and_no_more() -> None:
    assert drafts_kept([(7, 5), (10, 5), (18, 1)], None) == [3, 0, 1]


def test_drafts_respect_the_limits() -> None:
    assert drafts_kept([(7, 5)], None, longest=9) == [2]
    assert drafts_kept([(7, 5)], 8) == [1]
    # an unfinished context keeps its drafts for its end
    assert drafts_kept([(17, 5)], 15) == [5]


def test_draft_rules_charge_differently() -> None:
    # 9 tokens are left; the first could take 8 in its unit, and uses 1
    assert drafts_kept([(2, 1), (10, 0), (3, 9)], 24, rule="reserve") == [1, 0, 1]
    assert drafts_kept([(2, 1), (10, 0), (3, 9)], 24, rule="kept") == [1, 0, 7]


def test_reused_tokens_leave_room_for_drafts() -> None:
    request = context(0, 17, num_draft_tokens=5, estimated_reusable_tokens=10)
    MicroBatchScheduler(9).set_chunk_sizes([request], FCFS, 9, 10, None)
    # 7 of 17 tokens are computed: of 3 places in the last unit, 2 are left in the budget
    assert (request.context_chunk_size, request.num_draft_tokens) == (17, 2)


def test_nothing_is_trimmed_when_everything_fits() -> None:
    request = context(0, 7, num_draft_tokens=5)
    scheduler = MicroBatchScheduler(9, 12, context_chunking_policy=FCFS, chunk_unit=8)
    assert decide(scheduler, [request]) == ([0], [])
    assert (request.context_chunk_size, request.num_draft_tokens) == (7, 5)
    scheduler = MicroBatchScheduler(9, 11, context_chunking_policy=FCFS, chunk_unit=8)
    assert decide(scheduler, [request]) == ([0], [])
    assert (request.context_chunk_size, request.num_draft_tokens) == (7, 1)


# Reuse credit ---------------------------------------------------------------------------------


def test_credit_makes_a_whole_context_cheaper_but_not_free() -> None:
    requests = [context(0, 30, estimated_reusable_tokens=20), generation(1)]
    assert decide(MicroBatchScheduler(9, 11), requests) == ([0], [1])
    requests[0].estimated_reusable_tokens = 40
    assert decide(MicroBatchScheduler(9, 1), requests) == ([0], [])


def test_credit_counts_on_the_first_chunk_only() -> None:
    scheduler = MicroBatchScheduler(9, 10, context_chunking_policy=FCFS, chunk_unit=4)
    first = context(0, 30, estimated_reusable_tokens=20)
    later = context(1, 30, 5, context_chunk_size=0, estimated_reusable_tokens=20)
    assert decide(scheduler, [first]) == ([0], [])
    assert decide(scheduler, [later]) == ([1], [])
    assert sizes([first, later]) == [30, 8]
    later.context_chunk_size = 25
    assert decide(MicroBatchScheduler(9, 20), [later]) == ([], [])


@pytest.mark.parametrize(
    ("rule", "policy", "expected"),
    [
        # rounds of request 0 are free, those of request 1 fill the budget of 10
        ("prefix", EQUAL_PROGRESS, [10, 10]),
        # rounds of both are paid
        ("shift", EQUAL_PROGRESS, [5, 5]),
        # what must be computed exceeds 10: then the chunk itself is bounded
        ("prefix", FCFS, [10, 0]),
        ("shift", FCFS, [10, 0]),
    ],
)
def test_reuse_credit_rules(rule: str, policy: ContextChunkingPolicy, expected: list[int]) -> None:
    requests = [context(0, 40, estimated_reusable_tokens=20), context(1, 40)]
    scheduler = MicroBatchScheduler(9, reuse_credit_rule=rule)  # type: ignore[arg-type]
    scheduler.set_chunk_sizes(requests, policy, 10, 5, None)
    assert sizes(requests) == expected


@pytest.mark.parametrize("policy", [FCFS, EQUAL_PROGRESS])
def test_contexts_are_cut_if_the_rest_after_their_credit_exceeds_the_budget(
    policy: ContextChunkingPolicy,
) -> None:
    """The credit itself costs nothing."""
    scheduler = MicroBatchScheduler(9, 11, context_chunking_policy=policy, chunk_unit=5)
    longer, shorter = (context(i, 16 + i, estimated_reusable_tokens=5) for i in (1, 0))
    assert decide(scheduler, [longer]) == ([1], [])
    assert sizes([longer]) == [15 if policy is EQUAL_PROGRESS else 10]
    assert decide(scheduler, [shorter]) == ([0], []) and sizes([shorter]) == [16]


@pytest.mark.parametrize(("rule", "expected"), [("prefix", 30), ("shift", 10)])
def test_credit_and_the_limit_of_one_context(rule: str, expected: int) -> None:
    request = context(0, 40, estimated_reusable_tokens=20)
    scheduler = MicroBatchScheduler(9, reuse_credit_rule=rule)  # type: ignore[arg-type]
    scheduler.set_chunk_sizes([request], FCFS, None, 10, 19)
    # 30 = 20 free and 10 computed; 20 + 19 is no multiple of the unit
    assert request.context_chunk_size == expected
    # what must be computed is within the limit, though the context is not
    scheduler.set_chunk_sizes([request], FCFS, None, 10, 20)
    assert request.context_chunk_size == 40


def test_shift_charges_the_end_of_a_context_less() -> None:
    request = context(0, 40, estimated_reusable_tokens=20)
    scheduler = MicroBatchScheduler(9, reuse_credit_rule="shift")
    scheduler.set_chunk_sizes([request], EQUAL_PROGRESS, 21, 10, None)
    assert request.context_chunk_size == 40


# Constructor ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch_size": 0}, "max_batch_size = 0 "),
        ({"max_num_tokens": 0}, "max_num_tokens = 0 "),
        ({"max_context_length": -1}, "max_context_length = -1 "),
        ({"context_chunking_policy": FCFS, "chunk_unit": 0}, "chunk_unit = 0 "),
        (
            {"context_chunking_policy": 0},
            "context_chunking_policy must be a ContextChunkingPolicy, got 0",
        ),
        ({"max_batch_size": 2.0}, "max_batch_size = 2.0 must be an integer of at least 1"),
        ({"max_num_tokens": 2.5}, "max_num_tokens = 2.5 must be an integer of at least 1"),
        ({"max_context_length": True}, "max_context_length = True must be an integer of"),
        ({"context_chunking_policy": 1}, "must be a ContextChunkingPolicy, got 1"),
        ({"mixed_beam_widths": "yes"}, "mixed_beam_widths = 'yes' must be True or False"),
        ({"draft_rule": "drop"}, "draft_rule = 'drop'"),
        ({"reuse_credit_rule": "none"}, "reuse_credit_rule = 'none'"),
        (
            {"context_chunking_policy": FORCE_CHUNK, "chunk_unit": 9, "max_context_length": 8},
            "chunk_unit = 9 must be at most max_context_length = 8",
        ),
    ],
)
def test_options_are_checked(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MicroBatchScheduler(**{"max_batch_size": 1, **options})  # type: ignore[arg-type]


def test_a_unit_of_no_tokens_is_refused_by_a_call_too() -> None:
    with pytest.raises(ConfigError, match="chunk_unit = 0 "):
        MicroBatchScheduler(1).set_chunk_sizes([context(0, 5)], FCFS, 8, 0, None)


# Against a model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    max_batch_size: int
    max_num_tokens: int | None
    max_context_length: int | None
    policy: ContextChunkingPolicy | None
    unit: int
    draft_rule: str
    credit_rule: str
    mixed: bool

    def scheduler(self) -> MicroBatchScheduler:
        return MicroBatchScheduler(
            self.max_batch_size,
            self.max_num_tokens,
            max_context_length=self.max_context_length,
            context_chunking_policy=self.policy,
            chunk_unit=self.unit,
            draft_rule=self.draft_rule,  # type: ignore[arg-type]
            reuse_credit_rule=self.credit_rule,  # type: ignore[arg-type]
            mixed_beam_widths=self.mixed,
        )


class Model:
    """What the contract says, stated as conditions to search for instead of steps to take."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def within(self, tokens: int, limit: int | None) -> bool:
        return limit is None or tokens <= limit

    def left(self, request: LlmRequest) -> int:
        return request.prompt_len - request.context_current_position

    def credit(self, request: LlmRequest) -> int:
        first = request.context_current_position == 0
        return min(request.estimated_reusable_tokens, self.left(request)) if first else 0

    def computed(self, request: LlmRequest, size: int) -> int:
        """Tokens that a chunk makes the model compute, if reused ones move the chunk on."""
        return min(size, self.left(request) - self.credit(request))

    def accepted(self, requests: RequestList) -> tuple[RequestList, int]:
        """Return the requests that the pass accepts, and the tokens that it charges.

        Both are computed again for every prefix.
        """
        taken: RequestList = []
        charged = 0
        for request in requests:
            if len(taken) == self.options.max_batch_size:
                break
            if request.state is State.CONTEXT_INIT:
                cost = 0
                if self.options.policy is None:
                    drafts = request.num_draft_tokens
                    credit = request.estimated_reusable_tokens
                    cost = max(1, self.left(request) + drafts - credit)
                    if not self.within(cost, self.options.max_context_length):
                        raise SchedulerError
            elif request.state in (GENERATION, State.GENERATION_TO_COMPLETE):
                cost = request.beam_width + request.num_draft_tokens
            else:
                continue
            if not self.within(charged + cost, self.options.max_num_tokens):
                break
            widths = {r.beam_width for r in taken if r.state is not State.CONTEXT_INIT}
            in_generation = request.state is not State.CONTEXT_INIT
            if in_generation and not self.options.mixed and widths - {request.beam_width}:
                continue
            taken.append(request)
            charged += cost
        return taken, charged

    def serve_in_order(self, contexts: RequestList, capacity: int | None) -> list[int]:
        """The largest of all permitted sizes that the limits allow, one context after another."""
        longest, result = self.options.max_context_length, []
        spent = 0
        for request in contexts:
            left, credit = self.left(request), self.credit(request)
            permitted = {left, *range(0, left, self.options.unit)}
            prefix = self.options.credit_rule == "prefix"
            result.append(
                max(
                    size
                    for size in permitted
                    if size == 0
                    or self.within(spent + self.computed(request, size), capacity)
                    and self.within(
                        size - credit if prefix else self.computed(request, size), longest
                    )
                )
            )
            spent += self.computed(request, result[-1])
        return result

    def share_equally(self, contexts: RequestList, capacity: int | None) -> list[int]:
        """Rounds over everyone, costs summed anew at each step."""
        result = [0] * len(contexts)

        def cost(candidate: list[int]) -> int:
            if self.options.credit_rule == "shift":
                return sum(map(self.computed, contexts, candidate))
            pairs = zip(contexts, candidate, strict=True)
            return sum(max(0, size - self.credit(request)) for request, size in pairs)

        before: list[int] | None = None
        while before != result and (capacity is None or cost(result) < capacity):
            before = list(result)
            for i, request in enumerate(contexts):
                candidate = list(result)
                candidate[i] = min(result[i] + self.options.unit, self.left(request))
                if self.within(cost(candidate), capacity) and self.within(
                    candidate[i], self.options.max_context_length
                ):
                    result = candidate
        return result

    def force(self, contexts: RequestList, capacity: int | None) -> list[int]:
        result: list[int] = []
        for request in contexts:
            size = min(self.left(request), self.options.unit)
            result.append(size if self.within(sum(result) + size, capacity) else 0)
        return result

    def drafts(self, contexts: RequestList, chunks: list[int], capacity: int | None) -> list[int]:
        """The most drafts for which nothing is passed: unit, context limit, budget."""
        spent = sum(map(self.computed, contexts, chunks))
        result = []
        for request, size in zip(contexts, chunks, strict=True):
            if size < self.left(request) or not request.num_draft_tokens:
                result.append(request.num_draft_tokens)
                continue
            units = -(-size // self.options.unit)
            space = max(
                extra
                for extra in range(self.options.unit)
                if extra == 0
                or size + extra <= units * self.options.unit
                and self.within(size + extra, self.options.max_context_length)
                and self.within(spent + extra, capacity)
            )
            result.append(min(space, request.num_draft_tokens))
            spent += space if self.options.draft_rule == "reserve" else result[-1]
        return result

    def decide(self, requests: RequestList) -> tuple[list[int], list[int], dict[int, tuple]]:
        """Ids of contexts and generations in order, and (chunk, drafts) of each chunked context."""
        taken, charged = self.accepted(requests)
        contexts = [r for r in taken if r.state is State.CONTEXT_INIT]
        generations = [r for r in taken if r.state is not State.CONTEXT_INIT]
        capacity = self.options.max_num_tokens
        capacity = None if capacity is None else capacity - charged
        cut = False
        plan: dict[int, tuple] = {}
        if self.options.policy is not None:
            costs = [self.left(r) - self.credit(r) + r.num_draft_tokens for r in contexts]
            cut = self.options.policy is FORCE_CHUNK or not (
                self.within(sum(costs), capacity)
                and self.within(max(costs, default=0), self.options.max_context_length)
            )
            chunks = [self.left(r) for r in contexts]
            kept = [r.num_draft_tokens for r in contexts]
            if cut:
                share = {
                    FCFS: self.serve_in_order,
                    EQUAL_PROGRESS: self.share_equally,
                    FORCE_CHUNK: self.force,
                }[self.options.policy]
                chunks = share(contexts, capacity)
                kept = self.drafts(contexts, chunks, capacity)
            pairs = zip(chunks, kept, strict=True)
            plan = {r.request_id: pair for r, pair in zip(contexts, pairs, strict=True)}
            contexts = [r for r in contexts if plan[r.request_id][0]]

        def task_order(request: LlmRequest) -> tuple[bool, int]:
            return request.lora_task_id is not None, request.lora_task_id or 0

        def ends(request: LlmRequest) -> bool:
            return not cut or plan[request.request_id][0] == self.left(request)

        contexts.sort(key=lambda request: (ends(request), task_order(request)))
        generations.sort(key=task_order)
        return ids(contexts), ids(generations), plan


@st.composite
def request_lists(draw: st.DrawFn, credit: bool) -> RequestList:
    requests = []
    for request_id in range(draw(st.integers(0, 8))):
        prompt_len = draw(st.integers(1, 40))
        state = draw(st.sampled_from([State.CONTEXT_INIT] * 3 + [GENERATION] * 3 + list(State)))
        position = draw(st.sampled_from([0, 0, prompt_len // 2])) if prompt_len > 1 else 0
        requests.append(
            LlmRequest(
                request_id,
                prompt_len,
                10,
                state=state,
                beam_width=draw(st.sampled_from([1, 1, 1, 2])),
                num_draft_tokens=draw(st.sampled_from([0, 0, 1, 5, 12])),
                lora_task_id=draw(st.sampled_from([None, None, 0, 3])),
                context_current_position=position,
                context_chunk_size=0 if position else None,
                estimated_reusable_tokens=draw(st.integers(0, prompt_len - 1)) if credit else 0,
            )
        )
    return requests


option_values = st.builds(
    Options,
    max_batch_size=st.integers(1, 8),
    max_num_tokens=st.none() | st.integers(1, 100),
    max_context_length=st.none() | st.integers(8, 60),
    policy=st.none() | st.sampled_from(ContextChunkingPolicy),
    unit=st.integers(1, 8),
    draft_rule=st.sampled_from(["reserve", "kept"]),
    credit_rule=st.sampled_from(["prefix", "shift"]),
    mixed=st.booleans(),
)


@pytest.mark.parametrize("credit", [False, True])
@settings(max_examples=120 * FUZZ, deadline=None)
@given(data=st.data(), options=option_values)
@pytest.mark.every(2)
def test_agrees_with_the_model(credit: bool, data: st.DataObject, options: Options) -> None:
    requests = data.draw(request_lists(credit))
    inflight = frozenset(data.draw(st.sets(st.integers(0, 8), max_size=2)))
    model = Model(options)
    present = [request for request in requests if request.request_id not in inflight]
    if options.policy is None:
        for request in requests:
            if request.state is State.CONTEXT_INIT and request.context_current_position:
                request.estimated_reusable_tokens = 0
    try:
        expected = model.decide(present)
    except SchedulerError:
        with pytest.raises(SchedulerError, match="^The number of context tokens"):
            options.scheduler().schedule(requests, inflight)
        return
    decided = decide(options.scheduler(), requests, inflight)
    assert decided == expected[:2]
    by_id = {request.request_id: request for request in requests}
    written = {i: (by_id[i].context_chunk_size, by_id[i].num_draft_tokens) for i in expected[2]}
    assert written == expected[2]
    # sizes that a decision left behind do not change the next one; trimmed drafts may
    if not any(request.num_draft_tokens for request in requests):
        assert decide(options.scheduler(), requests, inflight) == decided
