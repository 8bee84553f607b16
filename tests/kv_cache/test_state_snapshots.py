"""Snapshots of recurrent states: a sequence begins with exactly the state of the blocks it shares.

`Machine` has the memory of an executor: the state of each slot and of each snapshot is the text
that it was computed from. It makes the copies that a KV cache asks for, and steps as the loop does.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from fuzz import FUZZ

from gptmanager.errors import CapacityError, ConfigError
from gptmanager.kv_cache import NO_SNAPSHOT, KvCacheManager, LedgerError
from gptmanager.kv_cache.state import kv_cache_state, restore_kv_cache
from gptmanager.kv_cache.state_snapshots import SnapshotPlan
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

SIZE = 4
CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class Machine:
    """A KV cache with snapshots, the states that it accounts for, and the live requests."""

    def __init__(self, num_blocks: int = 40, num_snapshots: int = 4, *, cuts: bool = True) -> None:
        self.options = {
            **{"enable_block_reuse": True, "num_snapshots": num_snapshots, "cuts_contexts": cuts}
        }
        self.kv = KvCacheManager(num_blocks, SIZE, **self.options)
        self.states: dict[int, list[int]] = {}  # by request
        self.snapshots: dict[int, list[int]] = {}
        self.live: dict[int, LlmRequest] = {}

    def start(self, request: LlmRequest, token: int = 1) -> int:
        """Start a request and run its first chunk. Return how many of its tokens were found."""
        told = self.kv.get_reusable_tokens(request)
        self.kv.add_sequence(request)
        found = self.kv.num_cached_tokens(request.request_id)
        assert told == found == request.context_current_position
        source = self.kv.found_snapshot(request.request_id)
        assert (source != NO_SNAPSHOT) == (found > 0)
        state = self.snapshots[source] if found else []
        assert state == request.tokens[:found]
        self.states[request.request_id] = [*state]
        self.live[request.request_id] = request
        self.step(request, token)
        return found

    def step(self, request: LlmRequest, token: int = 1) -> None:
        """Run a chunk of the context, or compute the newest token; then choose `token`."""
        request_id = request.request_id
        if request.state is CONTEXT_INIT:
            position = request.context_current_position
            request.move_to_next_context_chunk(self.kv.next_stop(request_id, position))
            self.compute(request, position, request.context_current_position)
            if request.state is CONTEXT_INIT:
                return
            self.kv.store_context(request)
        else:
            self.kv.add_token(request_id)
            self.compute(request, request.num_tokens - 1, request.num_tokens)
        request.add_token(token)

    def compute(self, request: LlmRequest, position: int, end: int) -> None:
        state = self.states[request.request_id]
        assert len(state) == position < end
        state += request.tokens[position:end]
        if end % SIZE:
            return
        snapshot = self.kv.save_state(request.request_id, end)
        if snapshot != NO_SNAPSHOT:
            self.snapshots[snapshot] = [*state]

    def run(self, request: LlmRequest, *answer: int) -> int:
        """Run a request to its end. Return how many of its tokens were found."""
        found = self.start(request, *answer[:1])
        while request.state is CONTEXT_INIT:
            self.step(request, *answer[:1])
        for token in answer[1:]:
            self.step(request, token)
        self.end(request)
        return found

    def end(self, request: LlmRequest, store: bool = True) -> None:
        del self.live[request.request_id]
        self.kv.remove(request.request_id, store)
        self.kv.forget_waiting(request.request_id)
        self.kv.check()

    @property
    def num_used(self) -> int:
        return len(self.kv._reuse.snapshots.used)


def asked(request_id: int, prompt: Any, max_new_tokens: int = 30, **more: Any) -> LlmRequest:
    return LlmRequest(request_id, list(prompt), max_new_tokens, **more)


def test_a_prompt_is_found_up_to_its_last_block_boundary() -> None:
    machine = Machine()
    assert machine.run(asked(1, range(14)), 1) == 0
    assert machine.run(asked(2, range(14)), 1) == 12
    assert machine.run(asked(3, [*range(12), 50, 51]), 1) == 12
    # the boundary must be before the last token, which is always computed
    assert machine.run(asked(4, range(60, 72)), 1) == 0
    assert machine.run(asked(5, range(60, 72)), 1) == 8
    assert machine.kv.audit().cached == 6  # full blocks only


def test_an_answer_is_found_by_the_next_turn() -> None:
    machine = Machine()
    machine.run(asked(1, range(6)), *range(50, 60))  # 6 + 9 tokens are stored
    text = [*range(6), *range(50, 60)]
    assert machine.run(asked(2, [*text, 7, 7]), 1) == 12
    assert machine.num_used == 3  # after 4 and 12 tokens of the first, and 16 of the second
    # an answer that differs: the prompt
    assert machine.run(asked(3, [*range(6), 99, 98, 97]), 1) == 4


def test_a_beginning_that_a_second_request_shares_gets_a_snapshot() -> None:
    machine = Machine()
    system = list(range(9))
    assert machine.run(asked(1, [*system, *range(20, 31)]), 1) == 0
    assert machine.run(asked(2, [*system, *range(40, 51)]), 1) == 0
    assert machine.run(asked(3, [*system, *range(60, 71)]), 1) == 8


def test_a_later_request_waits_for_a_snapshot_that_an_earlier_one_takes() -> None:
    machine = Machine()
    system = list(range(9))
    machine.run(asked(1, [*system, *range(20, 31)]), 1)
    second, third = asked(2, [*system, *range(40, 51)]), asked(3, [*system, *range(60, 71)])
    keys = machine.kv.find_new_context_blocks([second, third])
    assert keys[0] == keys[1] is not None
    machine.start(second)  # ends at the end of the shared blocks
    assert second.context_current_position == 8
    assert machine.kv.get_reusable_tokens(third) == 8
    keys = machine.kv.find_new_context_blocks([second, third])
    assert keys[0] != keys[1]
    assert machine.start(third) == 8
    machine.kv.check()


def test_a_snapshot_is_dropped_with_its_block() -> None:
    machine = Machine(num_blocks=5)
    machine.run(asked(1, range(14)), 1)
    assert machine.num_used == 1
    machine.run(asked(2, range(100, 117)), 1)  # takes all blocks
    assert machine.num_used == 1
    assert machine.kv.get_reusable_tokens(asked(3, range(14))) == 0
    machine.kv.clear_cached()
    assert machine.num_used == 0
    machine.kv.check()


def test_the_least_recently_used_snapshot_is_replaced() -> None:
    machine = Machine(num_snapshots=2)
    for number, first in enumerate((0, 100)):
        machine.run(asked(number, range(first, first + 6)), 1)
    assert machine.run(asked(3, [*range(4), 7]), 1) == 4  # used: no longer the oldest
    machine.run(asked(4, range(200, 206)), 1)
    assert machine.kv.get_reusable_tokens(asked(5, range(6))) == 4
    assert machine.kv.get_reusable_tokens(asked(6, range(100, 106))) == 0


def test_a_live_sequence_has_one_snapshot_that_is_not_cached() -> None:
    machine = Machine(num_snapshots=9)
    request = asked(1, range(6))
    machine.start(request)
    machine.step(request)
    for _ in range(20):
        machine.step(request)
        machine.kv.check()
        assert machine.num_used <= 2
    machine.end(request, store=False)
    assert machine.num_used == 1  # that of its prompt


def test_equal_texts_share_a_snapshot() -> None:
    machine = Machine(num_snapshots=9)
    pair = [asked(number, range(4)) for number in range(2)]
    for request in pair:
        machine.start(request)
    for token in range(50, 60):
        for request in pair:
            machine.step(request, token)
    for request in pair:
        machine.end(request)
    assert machine.num_used == 2


def test_a_paused_request_finds_its_own_snapshot() -> None:
    machine = Machine()
    request = asked(1, range(6))
    machine.start(request)
    for token in range(50, 60):
        machine.step(request, token)
    machine.end(request)
    request.pause(100)
    assert machine.start(request) == 12


def test_a_context_that_ends_between_chunks_leaves_its_snapshots() -> None:
    machine = Machine()
    request = asked(1, range(30), context_chunk_size=8)
    machine.start(request)
    machine.end(request)
    assert machine.run(asked(2, range(30)), 1) == 8


def test_without_cuts_the_ends_of_chunks_and_answers_are_found() -> None:
    machine = Machine(cuts=False)
    machine.run(asked(1, range(14)), *range(50, 55))
    assert machine.kv.get_reusable_tokens(asked(2, range(14))) == 0
    text = [*range(14), *range(50, 55)]
    assert machine.kv.get_reusable_tokens(asked(3, text)) == 16
    # nobody waits for a snapshot that nobody takes
    others = [asked(number, [*range(6), number, 0, 0]) for number in range(90, 93)]
    assert len(set(machine.kv.find_new_context_blocks(others))) == 3


def test_invalid_values_are_withdrawn_with_their_snapshots() -> None:
    machine = Machine(num_snapshots=9)
    machine.run(asked(1, range(6)), 1)
    first, second = asked(2, [*range(6), 7, 8, 9]), asked(3, [*range(4), 30, 31, 32, 33, 34])
    for request in (first, second):
        assert machine.start(request) == 4
        for token in range(50, 60):
            machine.step(request, token)
    machine.kv.withdraw(2)
    machine.kv.check()
    assert machine.num_used == 0
    for request in (first, second):
        machine.step(request)
        machine.step(request)
        machine.end(request)
    assert machine.num_used == 0


def test_a_snapshot_of_a_withdrawn_sequence_is_dropped_from_the_block_of_another() -> None:
    machine = Machine(num_snapshots=1)
    machine.run(asked(1, range(6)), 1)
    machine.run(asked(2, range(50, 56)), 1)  # it takes the only snapshot
    again = asked(3, [*range(4), 7, 8])
    assert machine.start(again) == 0
    machine.kv.withdraw(3)
    machine.end(again)
    assert machine.start(asked(4, [*range(4), 9])) == 0


def test_other_salts_and_adapters_have_other_snapshots() -> None:
    machine = Machine()
    machine.run(asked(1, range(14)), 1)
    assert machine.run(asked(2, range(14), cache_salt="b"), 1) == 0
    assert machine.run(asked(3, range(14), lora_task_id=5), 1) == 0
    assert machine.run(asked(4, range(14), cache_salt="b"), 1) == 12


def test_what_contradicts_snapshots_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_snapshots = 3 needs enable_block_reuse"):
        KvCacheManager(8, SIZE, num_snapshots=3)
    with pytest.raises(ConfigError, match="num_snapshots = 3 needs enable_block_reuse and no host"):
        KvCacheManager(8, SIZE, enable_block_reuse=True, num_snapshots=3, num_host_blocks=2)
    machine = Machine()
    machine.start(asked(1, range(6)))
    with pytest.raises(ValueError, match="request 1: a recurrent state cannot be rewound"):
        machine.kv.rewind(1, 1)


def spoil_free(snapshots: Any) -> None:
    snapshots.free.append(snapshots.free[0])


def spoil_lost(snapshots: Any) -> None:
    snapshots.used.popitem()


def spoil_shared(snapshots: Any) -> None:
    first, second = list(snapshots.used)[:2]
    snapshots.used[first] = snapshots.used[second]


def spoil_block(snapshots: Any) -> None:
    snapshots.used[39] = snapshots.used.popitem()[1]


def spoil_plan(snapshots: Any) -> None:
    spoil_block(snapshots)
    snapshots.plans[7] = SnapshotPlan(NO_SNAPSHOT, (), 39)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_free, "are not each free, or of one block"),
        (spoil_lost, "are not each free, or of one block"),
        (spoil_shared, "are not each free, or of one block"),
        (spoil_block, "is of block 39, which is not cached"),
        (spoil_plan, "of block 39 is not only of request 7"),
    ],
)
def test_an_audit_finds_a_wrong_snapshot(spoil: Any, text: str) -> None:
    machine = Machine()
    for first in (0, 100):
        machine.run(asked(first, range(first, first + 6)), 1)
    spoil(machine.kv._reuse.snapshots)
    with pytest.raises(LedgerError, match=text):
        machine.kv.check()


def test_a_restored_cache_has_the_same_snapshots() -> None:
    machine = Machine()
    machine.run(asked(1, range(14)), 1)
    request = asked(2, [*range(14), *range(70, 90)], context_chunk_size=8)
    machine.start(request)
    state = kv_cache_state(machine.kv)
    copy = KvCacheManager(40, SIZE, **machine.options)
    restore_kv_cache(copy, state, {2: request})
    assert kv_cache_state(copy) == state
    assert copy.next_stop(2, 20) == machine.kv.next_stop(2, 20) == 32
    for spoiled, text in (
        (state.reuse._replace(snapshots=None), "must both have snapshots, or neither"),
        (
            state.reuse._replace(snapshots=state.reuse.snapshots._replace(plans=())),
            "request 2 has no plan for snapshots",
        ),
        (
            state.reuse._replace(snapshots=state.reuse.snapshots._replace(free=())),
            "are not each free",
        ),
    ):
        copy = KvCacheManager(40, SIZE, **machine.options)
        with pytest.raises(LedgerError, match=text):
            restore_kv_cache(copy, state._replace(reuse=spoiled), {2: request})


def random_run(seed: int, counts: Counter[str]) -> None:
    """Random texts with common beginnings, in a small pool, with pauses, ends and new weights."""
    chance = random.Random(seed)
    machine = Machine(
        chance.choice([12, 20, 40]), chance.choice([1, 2, 5, 20]), cuts=chance.random() < 0.8
    )
    texts: list[list[int]] = [[]]
    paused: list[LlmRequest] = []
    for number in range(60):
        action = chance.random()
        request = chance.choice([*machine.live.values(), None])
        if request is None or action < 0.3:
            text = chance.choice(texts)
            text = text[: chance.choice([len(text), chance.randint(0, len(text))])]
            text += [chance.randint(0, 1) for _ in range(chance.randint(1, 9))]
            request = paused.pop() if paused and action < 0.15 else asked(number, text, 40)
            size = request.prompt_len
            request.context_chunk_size = chance.choice([None, SIZE, 2 * SIZE, min(size, 7)])
            try:
                counts["found"] += machine.start(request) > 0
            except CapacityError:
                machine.kv.forget_waiting(request.request_id)
        elif action < 0.8:
            for _ in range(chance.randint(1, 9)):
                if request.num_generated >= request.max_new_tokens:
                    break
                if request.state is CONTEXT_INIT:
                    request.context_chunk_size = chance.choice([None, SIZE, 5])
                elif machine.kv.get_needed_blocks_one_step(request) > machine.kv.num_free_blocks:
                    break
                machine.step(request, chance.randint(0, 1))
        elif action < 0.985:
            texts.append([*request.tokens])
            machine.end(request, store=chance.random() < 0.9)
            if request.state is not CONTEXT_INIT and action < 0.9:
                if request.num_generated < request.max_new_tokens:
                    request.pause(100)
                    paused.append(request)
        elif action < 0.993:
            machine.kv.withdraw(request.request_id)
        else:
            machine.kv.clear_cached()
        machine.kv.check()
    copy = KvCacheManager(machine.kv.num_blocks, SIZE, **machine.options)
    restore_kv_cache(copy, kv_cache_state(machine.kv), machine.live)
    assert kv_cache_state(copy) == kv_cache_state(machine.kv)
    for request in list(machine.live.values()):
        machine.end(request)
    assert machine.kv.num_free_blocks == machine.kv.num_blocks


def test_random_runs_begin_with_the_right_states() -> None:
    counts: Counter[str] = Counter()
    for seed in range(25 * FUZZ):
        random_run(seed, counts)
    assert counts["found"] > 50
