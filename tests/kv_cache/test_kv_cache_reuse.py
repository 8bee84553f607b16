"""Block reuse in the KV cache manager: examples of the contract, and a machine against a model."""

from __future__ import annotations

import random

import pytest
from fuzz import FUZZ
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tree_paths import path_to

from gptmanager.errors import CapacityError
from gptmanager.kv_cache import BlockCopy, KvCacheManager, LedgerError, ReuseCounts
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


def caching(num_blocks: int = 20, size: int = 10, **options) -> KvCacheManager:
    return KvCacheManager(num_blocks, size, enable_block_reuse=True, **options)


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def run_context(kv: KvCacheManager, request: LlmRequest) -> tuple[BlockCopy, ...]:
    """The whole life of a context: added, computed, findable, one token generated."""
    copies = kv.add_sequence(request)
    request.move_to_next_context_chunk()
    kv.store_context(request)
    request.add_token(7)
    kv.check()
    return copies


def generate(kv: KvCacheManager, request: LlmRequest, generated: list[int]) -> None:
    for token in generated:
        kv.add_token(request.request_id)
        request.add_token(token)


def left_behind(kv: KvCacheManager, prompt: list[int], **more) -> LlmRequest:
    """A request that has come and gone, and what it held is cached."""
    request = LlmRequest(1000, prompt, 50, **more)
    run_context(kv, request)
    kv.remove(1000)
    kv.check()
    return request


def test_blocks_that_others_hold_are_not_subtracted_from_the_growth_of_a_generating_request():
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(30), 10))
    state = LlmRequestState.GENERATION_IN_PROGRESS
    assert kv.get_needed_blocks_one_step(LlmRequest(2, tokens(30), 10, state=state)) == 1


# What is withdrawn ------------------------------------------------------------------------------


def test_what_a_withdrawn_sequence_holds_is_not_found_nor_stored():
    kv = caching()
    for request_id in (1, 2):  # the second shares what the first has computed
        run_context(kv, LlmRequest(request_id, tokens(35), 10))
    run_context(kv, LlmRequest(3, tokens(25, 50), 10))
    kv.withdraw(2)
    kv.check()
    for request_id in (2, 1, 3):
        kv.remove(request_id)
        kv.check()
    assert kv.get_reusable_tokens(LlmRequest(4, tokens(35), 10)) == 0
    assert kv.get_reusable_tokens(LlmRequest(5, tokens(25, 50), 10)) == 20
    assert kv.reuse_counts.cached_blocks == 3


def test_blocks_after_withdrawn_ones_are_not_found_either():
    kv = caching()
    left_behind(kv, tokens(45))
    run_context(kv, LlmRequest(1, tokens(25), 10))
    kv.withdraw(1)
    kv.check()
    kv.remove(1)
    kv.check()
    assert kv.reuse_counts.cached_blocks == 0 and kv.get_num_free_blocks() == 20
    plain = KvCacheManager(9, 10)
    plain.add_sequence(LlmRequest(1, tokens(25), 10))
    plain.withdraw(1)


# What is found ----------------------------------------------------------------------------------


def test_full_blocks_are_shared_and_the_context_begins_after_them():
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(35), 10))
    request = LlmRequest(2, [*tokens(30), 99, 98], 10)
    assert kv.get_reusable_tokens(request) == 30
    assert kv.add_sequence(request) == ()
    assert kv.block_ids(1) == [[0, 1, 2, 3]]
    assert kv.block_ids(2) == [[0, 1, 2, 4]]
    assert (kv.num_cached_tokens(2), request.context_current_position) == (30, 30)
    assert kv.get_num_free_blocks() == 15
    assert kv.audit().owners[1] == (1, 2)
    kv.remove(1)
    assert kv.get_num_free_blocks() == 16
    kv.remove(2)
    assert kv.get_num_free_blocks() == 20
    kv.check()


def test_blocks_are_found_when_the_context_finishes_not_before():
    kv = caching()
    first = LlmRequest(1, tokens(35), 10)
    kv.add_sequence(first)
    assert kv.get_reusable_tokens(LlmRequest(2, tokens(35), 10)) == 0
    kv.store_context(first)
    assert kv.get_reusable_tokens(LlmRequest(2, tokens(35), 10)) == 30
    assert kv.audit().cached == 3


def test_the_last_token_of_a_prompt_is_always_computed():
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(20), 10))
    request = LlmRequest(2, tokens(20), 10)
    assert kv.get_reusable_tokens(request) == 10
    assert kv.get_all_reusable_tokens([request, LlmRequest(3, tokens(21), 10)]) == [10, 20]
    assert kv.add_sequence(request) == (BlockCopy(1, 2, 9),)
    assert request.context_current_position == 19


def test_without_partial_reuse_only_full_blocks_are_found():
    kv = caching(enable_partial_reuse=False)
    left_behind(kv, tokens(28))
    request = LlmRequest(2, tokens(28), 10)
    assert kv.add_sequence(request) == ()
    assert request.context_current_position == 20


@pytest.mark.parametrize("more", [[], [60], [60] * 9])
def test_without_partial_reuse_a_partial_block_is_found_if_all_of_it_is_wanted(more):
    kv = caching(enable_partial_reuse=False)
    request = LlmRequest(1, tokens(18), 50)
    run_context(kv, request)
    generate(kv, request, [50, 51, 52, 53])  # stored: 18 + 7, 50, 51, 52
    kv.remove(1)
    other = LlmRequest(2, [*tokens(18), 7, 50, 51, 99, 99], 10)
    kv.add_sequence(other)
    assert kv.num_cached_tokens(2) == 20  # the beginning of a block
    again = LlmRequest(3, [*tokens(18), 7, 50, 51, 52, 53, *more], 10)
    assert kv.get_reusable_tokens(again) == 20
    assert kv.add_sequence(again) == ()
    assert kv.num_cached_tokens(3) == again.context_current_position == 22


def test_without_partial_reuse_a_partial_block_is_kept_next_to_a_longer_one():
    kv = caching(enable_partial_reuse=False)
    for count in (28, 24):
        left_behind(kv, tokens(count))
    for request_id, (wanted, cached) in enumerate([(28, 24), (29, 28)], start=1):
        request = LlmRequest(request_id, tokens(wanted), 10)
        assert kv.get_reusable_tokens(request) == 20
        kv.add_sequence(request)
        assert kv.num_cached_tokens(request_id) == cached


def test_a_removed_sequence_leaves_all_but_its_newest_token():
    kv = caching()
    request = LlmRequest(1, tokens(18), 50)
    run_context(kv, request)
    generate(kv, request, [50, 51, 52, 53])  # stored: 18 + 7, 50, 51, 52
    kv.remove(1)
    again = LlmRequest(2, [*tokens(18), 7, 50, 51, 52, 53, 60], 10)
    assert kv.add_sequence(again) == ()
    assert kv.block_ids(2) == [[0, 1, 2]]
    assert kv.num_cached_tokens(2) == 22  # 53 was never stored


def test_a_removal_without_storing_leaves_what_was_found_before():
    kv = caching()
    request = LlmRequest(1, tokens(18), 50)
    run_context(kv, request)
    generate(kv, request, [50, 51, 52, 53])
    kv.remove(1, store=False)
    assert kv.audit().cached == 1


def test_a_sequence_that_ends_between_chunks_leaves_what_is_computed():
    kv = caching()
    request = LlmRequest(1, tokens(50), 10, context_chunk_size=25)
    kv.add_sequence(request)
    request.move_to_next_context_chunk()
    kv.remove(1)
    again = LlmRequest(2, tokens(50), 10)
    kv.add_sequence(again)
    assert again.context_current_position == 25
    kv.check()


def test_a_pause_and_a_resume_find_everything_but_the_last_token():
    kv = caching()
    request = LlmRequest(1, tokens(18), 50)
    run_context(kv, request)
    generate(kv, request, [50, 51, 52])
    kv.remove(1)
    request.pause(1000)
    kv.add_sequence(request)
    assert request.context_remaining_length == 1
    kv.check()


@pytest.mark.parametrize("more", [{"cache_salt": "a"}, {"cache_salt": 1}, {"lora_task_id": 1}])
def test_another_salt_or_adapter_finds_nothing(more):
    kv = caching()
    left_behind(kv, tokens(35))
    request = LlmRequest(2, tokens(35), 10, **more)
    assert kv.get_reusable_tokens(request) == 0
    kv.add_sequence(request)
    assert (kv.num_cached_tokens(2), request.context_current_position) == (0, 0)
    kv.store_context(request)
    kv.check()
    kv.remove(2)
    kv.add_sequence(LlmRequest(3, tokens(35), 10, **more))
    assert kv.num_cached_tokens(3) == 34


def test_salts_of_different_types_are_different():
    kv = caching()
    left_behind(kv, tokens(35), cache_salt=1)
    assert kv.get_reusable_tokens(LlmRequest(2, tokens(35), 10, cache_salt=True)) == 0
    assert kv.get_reusable_tokens(LlmRequest(2, tokens(35), 10, cache_salt=1)) == 30


def test_equal_contexts_that_run_together_keep_their_own_blocks():
    kv = caching()
    first, second = (LlmRequest(i, tokens(35), 10) for i in (1, 2))
    kv.add_sequence(first)
    kv.add_sequence(second)
    kv.store_context(first)
    kv.store_context(second)
    kv.check()
    assert kv.audit().cached == 3
    kv.remove(1)
    kv.remove(2)
    kv.check()
    assert kv.get_num_free_blocks() == 20
    assert kv.get_reusable_tokens(first) == 30


# Partial blocks ---------------------------------------------------------------------------------


def test_a_partial_block_that_no_request_holds_is_taken_over():
    kv = caching()
    left_behind(kv, tokens(28))  # blocks 0, 1 full, 8 tokens in 2
    request = LlmRequest(2, [*tokens(25), 77, 78, 79], 10)
    assert kv.add_sequence(request) == ()
    assert kv.block_ids(2) == [[0, 1, 2]]
    assert request.context_current_position == 25
    assert kv.audit().cached == 2  # block 2 is private now
    kv.check()


def test_the_beginning_of_a_held_block_is_copied():
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(35), 10))
    request = LlmRequest(2, [*tokens(13), 77, 78], 10)
    assert kv.add_sequence(request) == (BlockCopy(1, 4, 3),)
    assert kv.block_ids(2) == [[0, 4]]
    kv.check()


def test_the_beginning_of_a_block_that_others_follow_is_copied():
    kv = caching()
    left_behind(kv, tokens(35))
    request = LlmRequest(2, [*tokens(13), 77, 78], 10)
    assert [copy[0::2] for copy in kv.add_sequence(request)] == [(1, 3)]
    assert kv.get_reusable_tokens(LlmRequest(3, tokens(35), 10)) == 30
    kv.check()


def test_without_copies_only_a_block_that_can_be_taken_over_is_reused():
    kv = caching(copy_on_partial_reuse=False)
    left_behind(kv, tokens(35))
    request = LlmRequest(2, [*tokens(13), 77, 78], 10)
    assert kv.add_sequence(request) == ()
    assert request.context_current_position == 10
    other = LlmRequest(3, [*tokens(33), 77, 78], 10)
    assert kv.add_sequence(other) == ()
    assert other.context_current_position == 33


def test_the_chunk_moves_on_and_ends_on_a_block_unless_it_ends_the_context():
    for prompt_len, chunk, cached, expected in [
        (100, 30, 10, 30),  # 10..40
        (100, 30, 25, 25),  # 25..50
        (100, 80, 25, 75),  # to the end
        (100, 90, 25, 75),
        (100, 4, 25, 4),  # a smaller unit than a block: go on all the same
        (100, 6, 25, 5),
        (100, None, 25, None),
    ]:
        request = LlmRequest(1, prompt_len, 10, context_chunk_size=chunk)
        request.skip_cached_context(cached, 10)
        assert (request.context_current_position, request.context_chunk_size) == (cached, expected)
        request.move_to_next_context_chunk()
        assert request.context_current_position == cached + (expected or prompt_len - cached)


# What is evicted --------------------------------------------------------------------------------


def test_what_holds_nothing_goes_first_then_the_least_recently_freed_leaves_before_parents():
    kv = caching(num_blocks=8)
    left_behind(kv, tokens(30))  # 29 tokens are left
    left_behind(kv, tokens(30, 100))
    assert kv.audit().cached == 6
    kv.add_sequence(LlmRequest(1, tokens(20, 500), 10))
    assert kv.audit().cached == 6
    kv.add_sequence(LlmRequest(2, tokens(20, 600), 10))
    assert kv.audit().cached == 4
    assert kv.get_reusable_tokens(LlmRequest(3, tokens(30), 10)) == 10
    assert kv.get_reusable_tokens(LlmRequest(3, tokens(30, 100), 10)) == 20
    kv.check()


def test_a_block_that_held_ones_follow_is_evicted_last():
    kv = caching(num_blocks=6)
    first, second = LlmRequest(1, tokens(15), 30), LlmRequest(2, tokens(25), 30)
    kv.add_sequence(first)
    kv.add_sequence(second)
    kv.store_context(first)  # block 0 of request 1 is cached,
    kv.store_context(second)  # and behind it the second one of request 2
    kv.remove(1)  # 0 is free, and 1, whose tokens are cached in that one too
    kv.check()
    kv.add_sequence(LlmRequest(3, tokens(15, 500), 10))
    assert kv.block_ids(3) == [[1, 5]]
    kv.add_sequence(LlmRequest(4, tokens(5, 600), 10))
    assert kv.block_ids(4) == [[0]]
    assert kv.audit().cached == 0
    kv.check()
    kv.remove(2)  # its own blocks are stored now
    assert kv.get_reusable_tokens(second) == 20
    kv.check()


def test_everything_that_is_free_can_be_had_and_no_more():
    kv = caching(num_blocks=4)
    left_behind(kv, tokens(40))
    with pytest.raises(CapacityError, match="request 2 needs 5 more"):
        kv.add_sequence(LlmRequest(2, tokens(50), 10))
    assert (kv.get_num_free_blocks(), kv.audit().cached) == (4, 4)
    kv.add_sequence(LlmRequest(3, tokens(40, 100), 10))
    assert (kv.get_num_free_blocks(), kv.audit().cached) == (0, 0)


def test_cleared_blocks_are_never_found_nor_what_was_computed_with_them():
    kv = caching()
    left_behind(kv, tokens(20, 100))
    running = LlmRequest(1, tokens(35), 50)
    run_context(kv, running)
    kv.clear_cached()
    kv.check()
    kv.store_context(running)
    kv.remove(1)
    assert kv.audit().cached == 0
    assert kv.get_reusable_tokens(LlmRequest(2, tokens(35), 10)) == 0
    run_context(kv, LlmRequest(3, tokens(35), 10))
    assert kv.get_reusable_tokens(LlmRequest(2, tokens(35), 10)) == 30


# Windows, rewinds --------------------------------------------------------------------------------


def test_a_request_that_may_pass_its_window_neither_reuses_nor_is_reused():
    kv = caching(max_attention_window=40)
    run_context(kv, LlmRequest(1, tokens(35), 6))
    assert kv.audit().cached == 0
    run_context(kv, LlmRequest(2, tokens(35), 5))
    assert kv.audit().cached == 3
    long = LlmRequest(3, tokens(35), 6)
    assert kv.get_reusable_tokens(long) == 0
    short = LlmRequest(4, tokens(35, 100), 5)
    block = kv.find_new_context_block(short)
    assert block is not None and kv.find_new_context_blocks([long, short]) == [None, block]
    kv.add_sequence(long)
    assert kv.num_cached_tokens(3) == 0
    kv.check()


def test_one_that_passes_its_window_unannounced_must_not_write_over_shared_blocks():
    kv = caching(max_attention_window=20)
    request = LlmRequest(1, tokens(15), 5)
    run_context(kv, request)
    run_context(kv, LlmRequest(2, tokens(12), 5))
    generate(kv, request, [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="request 1 shares block 0 .* pass its attention window"):
        kv.add_token(1)
    kv.remove(2)
    for _ in range(30):
        assert kv.add_token(1) == ()
        kv.check()
    assert kv.audit().cached == 0
    kv.remove(1)
    assert kv.audit().cached == 0


def test_a_rewind_into_a_cached_block_takes_it_out_of_the_cache():
    kv = caching()
    request = LlmRequest(1, tokens(35), 10)
    run_context(kv, request)
    kv.rewind(1, 10)
    kv.check()
    assert kv.audit().cached == 2
    run_context(kv, LlmRequest(2, tokens(25), 10))
    with pytest.raises(ValueError, match="request 1 shares block 1 .* be rewound into it"):
        kv.rewind(1, 10)
    kv.rewind(1, 5)
    kv.check()


@pytest.mark.parametrize("priority", [None, 0, 90])
def test_what_a_rewind_makes_impossible_to_find_goes_first(priority):
    kv = caching(num_blocks=4)
    left_behind(kv, tokens(10, 500), retention_priority=priority)
    request = LlmRequest(1, tokens(11), 10)
    run_context(kv, request)
    left_behind(kv, [*tokens(10), *tokens(10, 50)])  # a block behind the first of request 1
    assert kv.audit().cached == 3
    kv.rewind(1, 5)
    kv.check()
    assert kv.audit().cached == 1
    kv.add_sequence(LlmRequest(2, tokens(20, 700), 10))
    assert kv.audit().cached == 1  # not the one that can be found, though it is older
    kv.check()


# What schedulers ask ----------------------------------------------------------------------------


def test_held_blocks_are_not_needed_again_and_cached_free_ones_are():
    kv = caching()
    first = LlmRequest(1, tokens(35), 10)
    run_context(kv, first)
    request = LlmRequest(2, [*tokens(30), 99, 98], 20)
    assert kv.get_needed_resource_to_completion(request) == 6
    assert kv.get_needed_blocks_one_step(request) == 4 - 3
    assert kv.get_remaining_blocks_to_completion(request) == 6 - 3
    assert kv.sum_remaining_blocks_to_completion([request]) == 6 - 3
    kv.remove(1)
    assert kv.get_needed_blocks_one_step(request) == 4
    assert kv.get_remaining_blocks_to_completion(request) == 6
    kv.add_sequence(request)
    assert kv.get_remaining_blocks_to_completion(request) == 2


def test_a_victim_does_not_free_what_a_scheduled_request_will_share():
    kv = caching(num_blocks=10)
    first = LlmRequest(1, tokens(35), 10)
    run_context(kv, first)  # holds 4
    request = LlmRequest(2, [*tokens(30), 99, 98], 20)
    kv.start_scheduling()
    assert kv.get_needed_blocks_one_step(request) == 1
    kv.scheduling_add_sequence(request)
    kv.scheduling_remove_sequence(1)
    assert kv.scheduling_has_free_blocks(7) and not kv.scheduling_has_free_blocks(8)

    kv.start_scheduling()
    kv.scheduling_remove_sequence(1)
    assert kv.scheduling_has_free_blocks(10)
    assert kv.get_needed_blocks_one_step(request) == 4  # the victim holds it no more
    kv.start_scheduling()
    assert kv.get_needed_blocks_one_step(request) == 1


def test_several_scheduled_requests_share_what_is_held():
    kv = caching(num_blocks=10)
    for request_id in (1, 2):
        run_context(kv, LlmRequest(request_id, tokens(35), 10))  # 3 blocks in common, 1 of its own
    third, fourth = (LlmRequest(i, [*tokens(30), i], 20) for i in (3, 4))
    kv.start_scheduling()
    kv.scheduling_add_sequence(third)
    assert kv.get_needed_blocks_one_step(fourth) == 1
    kv.scheduling_remove_sequence(1)  # the others go on with the blocks in common
    assert kv.scheduling_num_free_blocks == 6
    assert kv.get_needed_blocks_one_step(fourth) == 1


def test_blocks_promised_to_other_starts_are_not_evicted():
    kv = caching(num_blocks=7)
    left_behind(kv, tokens(30))
    small, large = LlmRequest(1, tokens(25), 10), LlmRequest(2, tokens(40, 100), 10)
    other = LlmRequest(3, tokens(60, 500), 10)
    assert kv.get_reusable_tokens(small) == 20
    with kv.holding_cached([large, small]):
        with pytest.raises(CapacityError):
            kv.add_sequence(LlmRequest(4, tokens(60, 100), 10))
        kv.add_sequence(large)
        kv.add_sequence(small)
    assert (kv.num_cached_tokens(1), kv.get_num_free_blocks()) == (24, 0)
    kv.check()
    kv.remove(2)
    kv.remove(1)
    assert kv.get_reusable_tokens(small) == 20
    kv.add_sequence(other)  # without it the last comer takes what it can
    assert kv.get_reusable_tokens(small) < 20


def test_a_prefix_to_come_is_equal_for_two_requests_if_its_tokens_are():
    kv = caching()
    left_behind(kv, tokens(25))

    def key(prompt, **more):
        return kv.find_new_context_block(LlmRequest(1, prompt, 10, **more))

    assert key(tokens(25)) is None and key(tokens(9, 50)) is None
    assert key(tokens(30)) == key(tokens(45)) != None  # noqa: E711
    assert key(tokens(30)) != key([*tokens(29), 77])
    assert key(tokens(10, 50)) == key(tokens(12, 50)) != key(tokens(10, 51))
    assert key(tokens(10, 50)) != key(tokens(10, 50), cache_salt="a")
    assert key(tokens(10, 50)) != key(tokens(10, 50), lora_task_id=0)


def test_an_answer_follows_what_is_stored_and_evicted_while_a_request_waits():
    kv = caching(num_blocks=6)
    waiting = LlmRequest(9, tokens(45), 10)
    assert kv.get_reusable_tokens(waiting) == 0
    left_behind(kv, tokens(22))
    assert kv.get_reusable_tokens(waiting) == 20
    left_behind(kv, tokens(41))
    assert kv.get_reusable_tokens(waiting) == 40
    kv.add_sequence(LlmRequest(1, tokens(45, 500), 5))
    assert kv.get_reusable_tokens(waiting) == 10
    kv.clear_cached()
    assert kv.get_reusable_tokens(waiting) == 0


def test_nothing_is_remembered_of_requests_that_no_longer_wait():
    kv = caching()
    waiting = [LlmRequest(i, [*tokens(20), i // 2, *tokens(15)], 10) for i in range(4)]
    keys = kv.find_new_context_blocks(waiting)
    assert keys[0] == keys[1] == keys[2]  # all lack the first block
    run_context(kv, waiting.pop(0))
    keys = kv.find_new_context_blocks(waiting)
    assert keys[0] is None and keys[1] == keys[2] is not None
    for request in waiting:
        kv.forget_waiting(request.request_id)
    assert not kv._lookups._numbers and not kv._lookups._users


def test_counts_say_what_was_found():
    kv = caching()
    assert kv.reuse_counts == ReuseCounts(0, 0, 0, 0)
    run_context(kv, LlmRequest(1, tokens(35), 10))
    assert kv.reuse_counts == ReuseCounts(0, 4, 0, 3)
    run_context(kv, LlmRequest(2, tokens(35), 10))
    assert kv.reuse_counts == ReuseCounts(3, 5, 30, 3)
    kv.remove(1)
    assert kv.reuse_counts.cached_blocks == 4
    run_context(kv, LlmRequest(3, tokens(35), 10))
    assert kv.reuse_counts == ReuseCounts(7, 5, 64, 3)
    off = KvCacheManager(10, 10)
    assert (off.enable_block_reuse, kv.enable_block_reuse) == (False, True)
    assert set(off.reuse_counts) == {0}
    assert kv.reuse_counts.cached_host_blocks == kv.reuse_counts.host_blocks == 0
    assert off.get_reusable_tokens(LlmRequest(1, 5, 5)) == 0
    assert off.find_new_context_block(LlmRequest(1, 50, 5)) is None


def test_check_finds_a_block_that_is_cached_for_other_tokens():
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(35), 10))
    kv._live[1].tables[0][:2] = [1, 0]
    with pytest.raises(LedgerError, match="block 1 is cached with other tokens than request 1"):
        kv.check()


# A machine against a plain model ------------------------------------------------------------------


class ReuseMachine(RuleBasedStateMachine):
    """Random lives over few tokens. The model is told only what the contract says.

    `content` is what each findable block holds, from the first token on; `free` the free blocks,
    in the order in which they go. `memory` is what was written where: each place says which tokens
    it was computed from, all before it included.
    """

    @initialize(
        num_blocks=st.integers(2, 16),
        size=st.integers(1, 4),
        partial=st.sampled_from(["off", "take over", "copy"]),
        seed=st.randoms(use_true_random=False),
    )
    def build(self, num_blocks: int, size: int, partial: str, seed: random.Random) -> None:
        self.kv = KvCacheManager(
            num_blocks,
            size,
            enable_block_reuse=True,
            enable_partial_reuse=partial != "off",
            copy_on_partial_reuse=partial == "copy",
        )
        self.size, self.partial, self.random = size, partial, seed
        self.num_blocks = num_blocks
        self.requests: dict[int, LlmRequest] = {}
        self.stored: dict[int, int] = {}  # positions whose content is computed
        self.stale: set[int] = set()
        self.free = list(range(num_blocks))
        self.content: dict[int, tuple[object, tuple[int, ...]]] = {}
        self.memory: dict[tuple[int, int], tuple[object, ...]] = {}
        self.priority: dict[int, int] = {}  # priorities of the blocks in `content`
        self.weights = 0

    # The model

    def root(self, request: LlmRequest) -> object:
        return request.lora_task_id, request.cache_salt

    def behind(self, root: object, prefix: tuple[int, ...]) -> list[int]:
        return [
            block
            for block, (key, held) in self.content.items()
            if key == root and len(held) > len(prefix) and held[: len(prefix)] == prefix
        ]

    def is_leaf(self, block: int) -> bool:
        if block not in self.content or len(self.content[block][1]) % self.size:
            return True
        return not self.behind(*self.content[block])

    def forget(self, block: int) -> None:
        if block in self.content:
            root, prefix = self.content.pop(block)
            if not len(prefix) % self.size:
                for other in sorted(self.behind(root, prefix)):
                    del self.content[other]
                    if other in self.free:  # the first to go: it holds nothing to be found
                        self.free.remove(other)
                        self.free.insert(0, other)

    def hand_out(self) -> int:
        def rank(block: int) -> int:
            return self.priority[block] if block in self.content else -1

        leaves = [block for block in self.free if self.is_leaf(block)]
        block = min(leaves or self.free, key=rank)  # the first of equals
        self.free.remove(block)
        self.forget(block)
        return block

    def full_match(self, request: LlmRequest) -> list[int]:
        found: list[int] = []
        while (end := (len(found) + 1) * self.size) < request.prompt_len:
            wanted = self.root(request), tuple(request.tokens[:end])
            holders = [b for b, held in self.content.items() if held == wanted]
            if not holders:
                break
            found += holders
        return found

    def partial_match(self, request: LlmRequest, start: int) -> tuple[int, set[int]]:
        best, blocks = 0, set[int]()
        prompt = tuple(request.tokens[: request.prompt_len - 1])
        for block, (root, held) in self.content.items():
            if root != self.root(request) or held[:start] != prompt[:start]:
                continue
            if not start < len(held) <= start + self.size:
                continue
            can_take_over = block in self.free and self.is_leaf(block)
            if self.partial != "copy" and not can_take_over:
                continue
            if self.partial == "off" and prompt[: len(held)] != held:
                continue
            common = 0
            while start + common < min(len(held), len(prompt)) and (
                held[start + common] == prompt[start + common]
            ):
                common += 1
            if common > best:
                best, blocks = common, set()
            if common == best and best:
                blocks.add(block)
        return best, blocks

    def put(self, request: LlmRequest, end: int, table: list[int]) -> None:
        root = self.root(request)
        for index, block in enumerate(table):
            if index * self.size >= end:
                break
            prefix = tuple(request.tokens[: min(end, (index + 1) * self.size)])
            held = [b for b, c in self.content.items() if c == (root, prefix)]
            if not held:
                covered = self.partial != "off" and len(prefix) % self.size
                if covered and self.behind(root, prefix):
                    break
                assert block not in self.content
                self.content[block] = (root, prefix)
                self.priority[block] = 35
            if request.retention_priority is not None:
                self.priority[held[0] if held else block] = request.retention_priority

    def write(self, request_id: int, start: int, end: int) -> None:
        request, table = self.requests[request_id], self.kv.block_ids(request_id)[0]
        for position in range(start, end):
            place = table[position // self.size], position % self.size
            assert place[0] not in self.content, "a findable block is written to"
            self.memory[place] = self.value(request, position)
        self.stored[request_id] = end

    def value(self, request: LlmRequest, position: int) -> tuple[object, ...]:
        return self.root(request), tuple(request.tokens[: position + 1])

    # What happens

    def some_id(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.requests)))

    @rule(
        request_id=st.integers(0, 4),
        prompt=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=14),
        max_new=st.integers(1, 8),
        salt=st.sampled_from([None, None, "a"]),
        lora=st.sampled_from([None, None, None, 3]),
        beams=st.sampled_from([1, 1, 1, 1, 2]),
        chunk=st.none() | st.integers(1, 9),
        priority=st.sampled_from([None, None, None, 0, 90]),
    )
    def add(self, request_id, prompt, max_new, salt, lora, beams, chunk, priority) -> None:
        if request_id not in self.requests:
            request = LlmRequest(
                *(request_id, prompt, max_new),
                cache_salt=salt,
                lora_task_id=lora,
                beam_width=beams,
                context_chunk_size=chunk,
                retention_priority=priority,
            )
            self.start(request)

    def start(self, request: LlmRequest) -> None:
        kv, request_id, size = self.kv, request.request_id, self.size
        beams = request.beam_width
        length = -(-request.prompt_len // size)
        full = self.full_match(request)
        assert kv.get_reusable_tokens(request) == len(full) * size
        shared = [block for block in full if block not in self.free]
        leading = next((i for i, b in enumerate(full) if b in self.free), len(full))
        need = request.prompt_len // size
        need += (length - need) * beams
        kv.start_scheduling()
        assert kv.get_needed_blocks_one_step(request) == need - leading
        if need - len(shared) > len(self.free):
            before = kv.audit()
            with pytest.raises(CapacityError):
                kv.add_sequence(request)
            assert kv.audit() == before and request.context_current_position == 0
            return
        num_partial, candidates = self.partial_match(request, len(full) * size)
        copies = kv.add_sequence(request)
        tables = kv.block_ids(request_id)
        num_cached = len(full) * size + num_partial
        assert tables[0][: len(full)] == full
        assert kv.num_cached_tokens(request_id) == num_cached == request.context_current_position
        self.free = [block for block in self.free if block not in full]
        assert all(table[: len(full)] == full for table in tables)
        new = [*dict.fromkeys(block for table in tables for block in table[len(full) :])]
        if num_partial:
            if copies:
                ((source, destination, count),) = copies
                assert (destination, count) == (new[0], num_partial) and source in candidates
                assert source not in self.free or not self.is_leaf(source)
                assert new.pop(0) == self.hand_out()
            else:
                assert new[0] in candidates
                self.free.remove(new[0])
                self.forget(new.pop(0))
        else:
            assert not copies
        assert new == [self.hand_out() for _ in new]
        for source, destination, count in copies:
            for offset in range(count):
                self.memory[destination, offset] = self.memory[source, offset]
        self.requests[request_id], self.stored[request_id] = request, num_cached
        self.stale.discard(request_id)
        self.step_context(request)

    def step_context(self, request: LlmRequest) -> None:
        start = request.context_current_position
        request.move_to_next_context_chunk()
        self.write(request.request_id, start, request.context_current_position)
        if request.state is not CONTEXT_INIT:
            self.kv.store_context(request)
            full = request.prompt_len - request.prompt_len % self.size
            if request.request_id not in self.stale:
                self.put(request, full, self.kv.block_ids(request.request_id)[0])
            request.add_token(self.random.choice([1, 1, 2]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 6))
    def step(self, data, count) -> None:
        request = self.requests[self.some_id(data)]
        for _ in range(count):
            if request.state is CONTEXT_INIT:
                request.context_chunk_size = self.random.randint(1, 5)
                self.step_context(request)
                continue
            if request.num_generated >= request.max_new_tokens:
                return
            need = self.kv.get_needed_blocks_one_step(request)
            if need > len(self.free):
                return
            new = self.kv.add_token(request.request_id)
            assert list(new) == [self.hand_out() for _ in range(need)]
            self.write(request.request_id, request.num_tokens - 1, request.num_tokens)
            request.add_token(self.random.choice([1, 1, 2]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), store=st.booleans(), resume=st.booleans())
    def remove(self, data, store, resume) -> None:
        request_id = self.some_id(data)
        request, tables = self.requests.pop(request_id), self.kv.block_ids(request_id)
        end = min(self.stored.pop(request_id), len(request.tokens) - 1)
        if len(tables) > 1:  # what is common to all
            end = min(end, request.prompt_len)
        self.kv.remove(request_id, store)
        if store and request_id not in self.stale:
            self.put(request, end, tables[0])
        held = {b for i in self.requests for t in self.kv.block_ids(i) for b in t}
        blocks = [b for table in tables for b in reversed(table)]
        for block in reversed(dict.fromkeys(blocks[::-1])):  # free with the last that has it
            if block in held:
                continue
            if block in self.content:
                self.free.append(block)
            else:
                self.free.insert(0, block)
        if resume and request.num_generated < request.max_new_tokens:
            request.pause(10**6)
            self.start(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def hold(self, data) -> None:
        """What is held for others leaves everything as it was, but for the order of the freed."""
        waiting = [
            LlmRequest(99, data.draw(st.lists(st.sampled_from([1, 1, 2]), min_size=1)), 3)
            for _ in range(3)
        ]
        told = [self.kv.get_reusable_tokens(request) for request in waiting]
        with self.kv.holding_cached(waiting):
            assert told == [self.kv.get_reusable_tokens(request) for request in waiting]
        self.kv.check()
        assert sorted(self.free) == sorted(self.kv._pool.free)
        self.free = list(self.kv._pool.free)

    @rule(now=st.integers(0, 9))
    def replace_weights(self, now) -> None:
        if now == 0:
            self.kv.clear_cached()
            self.content.clear()
            self.stale |= set(self.requests)

    # What always holds

    @invariant()
    def the_accounts_are_the_models(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        tree = self.kv._reuse.tree
        assert {b: path_to(tree, b) for b in self.content} == {
            block: ((root[0], type(root[1]).__name__, root[1]), list(prefix))
            for block, (root, prefix) in self.content.items()
        }
        assert len(tree) == len(self.content) == self.kv.audit().cached
        assert list(self.kv._pool.free) == self.free
        held = {b for i in self.requests for t in self.kv.block_ids(i) for b in t}
        assert held | set(self.free) == set(range(self.num_blocks))

    @invariant()
    def every_sequence_reads_its_own_history(self) -> None:
        for request_id, request in getattr(self, "requests", {}).items():
            table = self.kv.block_ids(request_id)[0]  # in which a context is computed
            for position in range(self.stored[request_id]):
                place = table[position // self.size], position % self.size
                assert self.memory[place] == self.value(request, position)

    @invariant()
    def what_is_findable_is_there(self) -> None:
        for block, (root, prefix) in getattr(self, "content", {}).items():
            first = (len(prefix) - 1) // self.size * self.size
            for position in range(first, len(prefix)):
                assert self.memory[block, position - first] == (root, prefix[: position + 1])


ReuseMachine.TestCase.settings = settings(
    max_examples=50 * FUZZ, stateful_step_count=40, deadline=None, derandomize=True
)
TestReuseMachine = ReuseMachine.TestCase
