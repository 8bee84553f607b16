"""The KV cache's accounts: worked examples of the contract. `kv_cache_trial` has the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gptmanager.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequestIdError,
    GptManagerError,
)
from gptmanager.kv_cache import BlockCopy, KvCacheManager, LedgerError
from gptmanager.kv_cache.block import BlockPool, BlockTables, WhatIf
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

GENERATING = {LlmRequestState.GENERATION_IN_PROGRESS, LlmRequestState.GENERATION_TO_COMPLETE}


def started(kv: KvCacheManager, request: LlmRequest) -> LlmRequest:
    """`request` after its context step: the prompt is stored, one token is generated."""
    kv.add_sequence(request)
    request.move_to_next_context_chunk()
    request.add_token()
    return request


def stepped(kv: KvCacheManager, request: LlmRequest, count: int = 1) -> LlmRequest:
    for _ in range(count):
        kv.add_token(request.request_id)
        request.add_token()
    return request


def snapshot(kv: KvCacheManager, *request_ids: int) -> object:
    held = [(kv.block_ids(i), kv.num_tokens(i)) for i in request_ids]
    return kv.audit(), kv.get_num_free_blocks(), held


# Counts of many requests ------------------------------------------------------------------------


def requests_in_all_states(chance: random.Random, count: int) -> list[LlmRequest]:
    found = []
    for number in range(count):
        request = LlmRequest(
            *(number, chance.randint(1, 20), chance.randint(1, 30)),
            beam_width=chance.choice([1, 1, 3]),
            num_draft_tokens=chance.choice([0, 0, 1, 5]),
            encoder_len=chance.randint(1, 20),
            context_current_position=chance.choice([0, 0, 1]),
            state=chance.choice([*LlmRequestState]),
        )
        for _ in range(chance.randrange(request.max_new_tokens)):
            request.add_token()
        found.append(request)
    return found


WINDOW = {"max_attention_window": 9, "sink_token_length": 3}


@pytest.mark.parametrize("tokens_per_block", [1, 4, 7])
@pytest.mark.parametrize("options", [{}, WINDOW, {"cross": True}], ids=["plain", "window", "cross"])
@pytest.mark.parametrize("lookahead", [False, True])
def test_counts_of_many_requests_are_sums_or_bounds_of_single_ones(
    tokens_per_block: int, options: dict[str, Any], lookahead: bool
) -> None:
    kv, chance = KvCacheManager(100, tokens_per_block, **options), random.Random(1)
    for _ in range(300):
        requests = requests_in_all_states(chance, chance.randint(0, 3))
        one_step = sum(kv.get_needed_blocks_one_step(it, lookahead) for it in requests)
        rest = sum(kv.get_remaining_blocks_to_completion(it) for it in requests)
        assert kv.most_blocks_one_step(requests, lookahead) >= one_step
        assert kv.most_blocks_to_completion(requests) >= rest
        assert kv.sum_remaining_blocks_to_completion(requests) == rest
        generating = [it for it in requests if it.state in GENERATING]
        one_step = sum(kv.get_needed_blocks_one_step(it, lookahead) for it in generating)
        assert kv.sum_needed_blocks_one_step(generating, lookahead) == one_step


@pytest.mark.parametrize("lookahead", [False, True])
def test_the_bound_of_a_step_is_close(lookahead: bool) -> None:
    """A bound far above would make schedulers slow: they would never take all requests at once."""
    kv, chance = KvCacheManager(100, 4), random.Random(2)
    for request in requests_in_all_states(chance, 300):
        left = request.max_new_tokens - request.num_generated
        generates_on = request.state in GENERATING and left > 12
        starts = request.state not in GENERATING and request.is_first_context_chunk
        if generates_on or (starts and request.state is not LlmRequestState.GENERATION_COMPLETE):
            needed = kv.get_needed_blocks_one_step(request, lookahead)
            bound = kv.most_blocks_one_step([request], lookahead)
            assert needed <= bound <= needed + request.beam_width, request


def test_without_block_reuse_nothing_is_cleared_or_withdrawn() -> None:
    kv = KvCacheManager(10, 10)
    kv.add_sequence(LlmRequest(1, 25, 10))
    kv.clear_cached()
    kv.withdraw(1)
    kv.check()
    assert kv.get_num_free_blocks() == 7


def test_counts_look_one_step_ahead_by_default() -> None:
    kv = KvCacheManager(100, 4)
    request = LlmRequest(1, 8, 20, num_draft_tokens=3, state=LlmRequestState.GENERATION_IN_PROGRESS)
    request.add_token()
    for count, asked in (
        (kv.get_needed_blocks_one_step, request),
        (kv.sum_needed_blocks_one_step, [request]),
        (kv.most_blocks_one_step, [request]),
    ):
        assert count(asked) == count(asked, False) == count(asked, True) - 1


# The contract's worked example: 20 blocks of 10 tokens, four requests of 10 + 80 ---------------


def run_to_completion(
    kv: KvCacheManager, requests: list[LlmRequest], admits: Callable[[list[LlmRequest]], bool]
) -> list[int]:
    """Used blocks after each iteration; a waiting request starts when `admits(running + it)`."""
    waiting, running = list(requests), list[LlmRequest]()
    used: list[int] = []
    while waiting or running:
        while waiting and admits([*running, waiting[0]]):
            running.append(waiting.pop(0))
        for request in list(running):
            if request.state is LlmRequestState.CONTEXT_INIT:
                started(kv, request)
            else:
                stepped(kv, request)
            if request.num_generated == request.max_new_tokens:
                kv.remove(request.request_id)
                running.remove(request)
        kv.check()
        used.append(kv.num_blocks - kv.get_num_free_blocks())
    return used


def four_requests() -> list[LlmRequest]:
    return [LlmRequest(i, 10, 80) for i in range(4)]


def test_each_of_the_four_requests_needs_nine_blocks_in_its_life() -> None:
    kv = KvCacheManager(20, 10)
    request = four_requests()[0]
    assert kv.get_max_resource_count() == kv.get_num_free_blocks() == kv.num_blocks == 20
    assert kv.get_needed_resource_to_completion(request) == 9
    assert kv.get_remaining_blocks_to_completion(request) == 9

    started(kv, request)
    assert kv.get_num_free_blocks() == kv.num_free_blocks == 19
    assert kv.get_needed_resource_to_completion(request) == 9
    assert kv.get_remaining_blocks_to_completion(request) == 8

    stepped(kv, request, 79)
    assert (kv.num_tokens(0), len(kv.block_ids(0)[0])) == (89, 9)
    assert kv.get_needed_resource_to_completion(request) == 9
    assert kv.get_remaining_blocks_to_completion(request) == 0


def test_remaining_against_free_and_needed_against_total_both_run_two_at_a_time() -> None:
    kv = KvCacheManager(20, 10)
    by_free = run_to_completion(
        kv,
        four_requests(),
        lambda rs: kv.sum_remaining_blocks_to_completion(rs) <= kv.get_num_free_blocks(),
    )
    by_total = run_to_completion(
        kv,
        four_requests(),
        lambda rs: sum(map(kv.get_needed_resource_to_completion, rs)) <= kv.num_blocks,
    )
    assert by_free == by_total
    assert (len(by_free), max(by_free), by_free[-1]) == (160, 18, 0)


def test_needs_without_what_is_held_against_the_total_overcommit_at_iteration_53() -> None:
    kv = KvCacheManager(40, 10)  # room to see how many of 20 blocks would have been used
    used = run_to_completion(
        kv,
        four_requests(),
        lambda rs: kv.sum_remaining_blocks_to_completion(rs) <= 20,
    )
    assert (max(used[:53]), used[53]) == (20, 21)


# Needs, by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_len", "max_new", "beams", "at_start", "whole_life"),
    [
        (25, 20, 1, 3, 5),
        (25, 20, 3, 2 + 3, 2 + 3 * 3),  # two full blocks shared; the third and on, per beam
        (20, 20, 3, 2, 2 + 2 * 3),  # on a boundary: nothing partial, the next block is per beam
        (5, 1, 4, 4, 4),
        (10, 0, 4, 1, 1),
        (1, 100, 1, 1, 11),
    ],
)
def test_needs_of_a_life(
    prompt_len: int, max_new: int, beams: int, at_start: int, whole_life: int
) -> None:
    kv = KvCacheManager(100, 10)
    request = LlmRequest(7, prompt_len, max_new, beam_width=beams)
    assert kv.get_needed_resource_to_completion(request) == whole_life
    assert kv.get_remaining_blocks_to_completion(request) == whole_life
    assert kv.get_needed_blocks_one_step(request) == at_start

    kv.add_sequence(request)
    assert kv.get_num_free_blocks() == 100 - at_start
    assert kv.get_needed_resource_to_completion(request) == whole_life
    assert kv.get_remaining_blocks_to_completion(request) == whole_life - at_start
    kv.check()


def test_held_blocks_count_per_beam_once_past_the_context() -> None:
    kv = KvCacheManager(100, 10)
    request = started(kv, LlmRequest(1, 25, 20, beam_width=3))  # context 2, total 5
    assert kv.get_remaining_blocks_to_completion(request) == (5 - 3) * 3
    stepped(kv, request, 5)
    assert kv.get_remaining_blocks_to_completion(request) == (5 - 3) * 3
    stepped(kv, request)
    assert kv.get_remaining_blocks_to_completion(request) == (5 - 4) * 3
    kv.check()


def test_a_first_chunk_takes_the_whole_prompt_and_later_chunks_nothing() -> None:
    kv = KvCacheManager(10, 10)
    request = LlmRequest(1, 45, 10, context_chunk_size=20)
    assert kv.get_needed_blocks_one_step(request) == 5
    kv.add_sequence(request)
    assert kv.get_num_free_blocks() == 5
    request.move_to_next_context_chunk()
    request.context_chunk_size = 20
    assert kv.get_needed_blocks_one_step(request) == 0
    assert kv.get_remaining_blocks_to_completion(request) == 1


def test_the_sampled_token_is_not_stored_before_the_next_step() -> None:
    kv = KvCacheManager(10, 10)
    request = LlmRequest(1, 10, 5)
    assert kv.get_needed_blocks_one_step(request) == 1
    started(kv, request)
    assert (request.num_tokens, kv.num_tokens(1)) == (11, 10)
    assert kv.get_needed_blocks_one_step(request) == 1
    assert kv.add_token(1) == (1,)


def test_lookahead_and_drafts_widen_a_step() -> None:
    kv = KvCacheManager(100, 10)
    request = stepped(kv, started(kv, LlmRequest(1, 10, 50, beam_width=2)), 9)  # 19 stored
    assert kv.num_tokens(1) == 19
    assert kv.get_needed_blocks_one_step(request) == 0
    assert kv.get_needed_blocks_one_step(request, two_step_lookahead=True) == 2
    request.num_draft_tokens = 11
    assert kv.get_needed_blocks_one_step(request) == 2 * 2  # 12 more: 31
    assert kv.get_needed_blocks_one_step(request, two_step_lookahead=True) == 3 * 2  # 24: 43


def test_a_step_never_needs_more_than_the_tokens_that_are_left() -> None:
    kv = KvCacheManager(100, 10)
    request = stepped(kv, started(kv, LlmRequest(1, 10, 12, num_draft_tokens=30)), 9)
    assert kv.num_tokens(1) == 19  # 9 beyond the prompt, 3 are left: 22
    assert kv.get_needed_blocks_one_step(request, two_step_lookahead=True) == 1
    first = LlmRequest(2, 10, 12, num_draft_tokens=30)
    assert kv.get_needed_blocks_one_step(first) == 3  # 10 + min(30, 12)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_request_stored_beyond_its_end_needs_nothing(beams: int) -> None:
    kv = KvCacheManager(100, 10)
    request = stepped(kv, started(kv, LlmRequest(1, 10, 3, beam_width=beams)), 2)
    for _ in range(20):
        kv.add_token(1)
    assert kv.get_remaining_blocks_to_completion(request) == 0
    request.max_new_tokens = 1
    assert kv.get_needed_blocks_one_step(request) == 0


def test_a_complete_request_needs_no_step() -> None:
    kv = KvCacheManager(100, 10)
    request = stepped(kv, started(kv, LlmRequest(1, 10, 11)), 10)
    assert kv.num_tokens(1) == 20
    assert kv.get_needed_blocks_one_step(request) == 1
    request.finish()
    assert kv.get_needed_blocks_one_step(request) == 0


def test_a_request_in_generation_without_a_token_has_stored_its_prompt() -> None:
    kv = KvCacheManager(100, 10)
    request = LlmRequest(1, 20, 10, state=LlmRequestState.GENERATION_IN_PROGRESS)
    assert kv.get_needed_blocks_one_step(request) == 1
    kv.add_sequence(request)
    assert len(kv.add_token(1)) == 1


def test_needs_follow_a_request_whose_lengths_change() -> None:
    kv = KvCacheManager(100, 10)
    request = stepped(kv, started(kv, LlmRequest(1, 10, 80)), 15)  # 25 stored in 3 blocks
    assert kv.get_remaining_blocks_to_completion(request) == 6
    for shorter in (20, 5):
        request.max_new_tokens = shorter
        assert kv.get_remaining_blocks_to_completion(request) == 0
        assert kv.sum_remaining_blocks_to_completion([request]) == 0
    request.max_new_tokens = 95
    assert kv.get_remaining_blocks_to_completion(request) == 8
    assert kv.sum_remaining_blocks_to_completion([request, LlmRequest(2, 15, 15)]) == 8 + 3


def test_a_pause_keeps_the_need_of_the_whole_life() -> None:
    kv = KvCacheManager(100, 10)
    request = stepped(kv, started(kv, LlmRequest(1, 10, 80)), 14)
    kv.remove(1)
    request.pause(max_input_len=1000)
    assert (request.prompt_len, request.max_new_tokens) == (25, 65)
    assert kv.get_remaining_blocks_to_completion(request) == 9
    started(kv, request)
    assert kv.get_remaining_blocks_to_completion(request) == 6


# Attention window and sink tokens ------------------------------------------------------------


def test_nothing_grows_past_the_attention_window() -> None:
    kv = KvCacheManager(10, 10, max_attention_window=25)
    request = LlmRequest(1, 18, 100)
    assert kv.get_needed_resource_to_completion(request) == 3
    assert kv.get_needed_blocks_one_step(request) == 2
    started(kv, request)
    taken = []
    for _ in range(90):
        expected = kv.get_needed_blocks_one_step(request)
        taken.append(len(kv.add_token(1)))
        request.add_token()
        assert taken[-1] == expected
        kv.check()
    assert (sum(taken), taken.index(1)) == (1, 2)
    assert kv.get_remaining_blocks_to_completion(request) == 0
    assert kv.num_tokens(1) == 108


def test_a_lookahead_across_the_window_counts_the_growth_up_to_it() -> None:
    kv = KvCacheManager(10, 10, max_attention_window=21)
    request = stepped(kv, started(kv, LlmRequest(1, 10, 100)), 10)
    assert kv.num_tokens(1) == 20
    assert kv.get_needed_blocks_one_step(request, two_step_lookahead=True) == 1


def test_a_prompt_longer_than_the_window_takes_the_windows_blocks() -> None:
    kv = KvCacheManager(10, 10, max_attention_window=25)
    request = LlmRequest(1, 70, 10, beam_width=2)
    assert kv.get_needed_resource_to_completion(request) == 2 + 2
    assert kv.get_needed_blocks_one_step(request) == 2 + 2
    started(kv, request)
    assert kv.get_num_free_blocks() == 6
    assert kv.add_token(1) == ()
    assert kv.get_needed_blocks_one_step(request) == 0
    kv.check()


def test_sink_tokens_are_padded_to_a_whole_block() -> None:
    kv = KvCacheManager(10, 10, max_attention_window=24, sink_token_length=4)  # padding of 6
    request = LlmRequest(1, 4, 100)
    assert kv.get_needed_resource_to_completion(request) == 3  # (24 + 6) / 10
    assert kv.get_needed_blocks_one_step(request) == 1
    started(kv, request)
    assert kv.num_tokens(1) == 4
    assert kv.get_needed_blocks_one_step(request) == 1
    assert kv.add_token(1) == (1,)
    for _ in range(50):
        kv.add_token(1)
        kv.check()
    assert len(kv.block_ids(1)[0]) == 3


def test_past_the_window_one_token_can_be_rewound_and_beams_cannot_be_reordered() -> None:
    kv = KvCacheManager(10, 10, max_attention_window=20)
    stepped(kv, started(kv, LlmRequest(1, 20, 100)), 5)
    before = snapshot(kv, 1)
    with pytest.raises(ValueError, match="request 1 is past its attention window"):
        kv.rewind(1, 2)
    assert snapshot(kv, 1) == before
    kv.rewind(1, 1)
    assert (kv.num_tokens(1), len(kv.block_ids(1)[0])) == (24, 2)
    with pytest.raises(ValueError, match="request 1 is past its attention window"):
        kv.rewind(1, 1)  # two in all are as bad as two at once
    kv.rewind(1, 0)
    kv.add_token(1)
    kv.rewind(1, 1)
    assert kv.num_tokens(1) == 24

    stepped(kv, started(kv, LlmRequest(2, 5, 100, beam_width=2)), 16)
    with pytest.raises(ValueError, match="request 2 is past its attention window"):
        kv.fork(2, (0, 0))


# Blocks: order, sharing, failure ------------------------------------------------------------


def test_the_least_recently_freed_block_is_handed_out_first_and_ends_before_prefixes() -> None:
    kv = KvCacheManager(6, 10)
    for request_id in (1, 2, 3):
        kv.add_sequence(LlmRequest(request_id, 20, 10))
    assert [kv.block_ids(i) for i in (1, 2, 3)] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    kv.remove(2)
    kv.remove(1)
    kv.add_sequence(LlmRequest(4, 40, 10))
    assert kv.block_ids(4) == [[3, 2, 1, 0]]


def test_beams_share_full_blocks_of_the_prompt() -> None:
    kv = KvCacheManager(10, 10)
    kv.add_sequence(LlmRequest(1, 25, 10, beam_width=3))
    assert kv.block_ids(1) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    kv.add_sequence(LlmRequest(2, 20, 10, beam_width=2))
    assert kv.block_ids(2) == [[5, 6], [5, 6]]
    assert kv.add_token(2) == (7, 8)
    assert kv.block_ids(2) == [[5, 6, 7], [5, 6, 8]]
    report = kv.audit()
    assert (report.total, report.free, report.used, report.ok) == (10, 1, 9, True)
    assert report.owners == {block: (1,) if block < 5 else (2,) for block in range(9)}
    kv.remove(1)
    kv.remove(2)
    assert kv.audit().owners == {}
    assert kv.get_num_free_blocks() == 10
    kv.check()


def test_block_ids_are_the_callers_own() -> None:
    kv = KvCacheManager(10, 10)
    kv.add_sequence(LlmRequest(1, 25, 10))
    kv.block_ids(1)[0].clear()
    assert kv.block_ids(1) == [[0, 1, 2]]


def test_a_duplicate_id_is_refused_and_changes_nothing() -> None:
    kv = KvCacheManager(10, 10)
    kv.add_sequence(LlmRequest(1, 25, 10))
    before = snapshot(kv, 1)
    with pytest.raises(DuplicateRequestIdError, match="request 1 already holds"):
        kv.add_sequence(LlmRequest(1, 5, 10))
    assert snapshot(kv, 1) == before
    kv.remove(1)
    kv.add_sequence(LlmRequest(1, 5, 10))


def test_no_free_block_is_an_error_that_changes_nothing() -> None:
    kv = KvCacheManager(5, 10)
    request = started(kv, LlmRequest(1, 20, 10, beam_width=2))
    before = snapshot(kv, 1)
    with pytest.raises(CapacityError, match="request 2 needs 4 more KV cache blocks, 3 of 5 are"):
        kv.add_sequence(LlmRequest(2, 31, 10))
    assert snapshot(kv, 1) == before
    assert 2 not in kv

    kv.add_sequence(LlmRequest(3, 20, 10))
    before = snapshot(kv, 1, 3)
    with pytest.raises(CapacityError, match="request 1 needs 2 more KV cache blocks, 1 of 5 are"):
        kv.add_token(request.request_id)
    assert snapshot(kv, 1, 3) == before
    kv.remove(3)
    assert len(kv.add_token(1)) == 2
    kv.check()


@pytest.mark.parametrize(
    "use",
    [
        lambda kv: kv.add_token(9),
        lambda kv: kv.rewind(9, 1),
        lambda kv: kv.fork(9, (0,)),
        lambda kv: kv.remove(9),
        lambda kv: kv.remove(9, store=False),
        lambda kv: kv.block_ids(9),
        lambda kv: kv.num_tokens(9),
    ],
)
def test_an_unknown_id_is_a_value_error_that_names_it(
    use: Callable[[KvCacheManager], object],
) -> None:
    kv = KvCacheManager(5, 10)
    with pytest.raises(ValueError, match="request 9 holds no KV cache blocks"):
        use(kv)


def test_rewind_frees_trailing_blocks() -> None:
    kv = KvCacheManager(10, 10)
    request = LlmRequest(1, 45, 30)
    kv.add_sequence(request)
    kv.rewind(1, 5)
    assert (kv.num_tokens(1), kv.block_ids(1)) == (40, [[0, 1, 2, 3]])
    assert kv.get_remaining_blocks_to_completion(request) == 4
    kv.rewind(1, 21)
    assert (kv.num_tokens(1), kv.block_ids(1)) == (19, [[0, 1]])
    assert kv.get_remaining_blocks_to_completion(request) == 6
    assert kv.add_token(1) == ()
    assert kv.add_token(1) == (5,)
    kv.add_sequence(LlmRequest(2, 70, 10))
    assert kv.block_ids(2) == [[6, 7, 8, 9, 4, 3, 2]]  # the last blocks were freed first
    kv.remove(2)
    kv.rewind(1, 21)
    assert (kv.block_ids(1), kv.get_num_free_blocks()) == ([[]], 10)
    kv.check()
    for wrong in (-1, 1):
        with pytest.raises(ValueError, match=f"request 1: cannot rewind {wrong} of 0 tokens"):
            kv.rewind(1, wrong)


def test_beams_cannot_be_rewound() -> None:
    kv = KvCacheManager(10, 10)
    kv.add_sequence(LlmRequest(1, 45, 30, beam_width=2))
    with pytest.raises(ValueError, match="request 1: beams"):
        kv.rewind(1, 1)


def test_store_context_does_nothing_without_reuse() -> None:
    kv = KvCacheManager(10, 10)
    request = started(kv, LlmRequest(1, 45, 30))
    before = snapshot(kv, 1)
    kv.store_context(request)
    assert snapshot(kv, 1) == before


# Fork ----------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_partial_ones() -> None:
    kv = KvCacheManager(20, 10)
    request = started(kv, LlmRequest(1, 15, 40, beam_width=3))
    stepped(kv, request, 12)  # 27 stored: [0], then a full and a partial block for each beam
    assert kv.block_ids(1) == [[0, 1, 4], [0, 2, 5], [0, 3, 6]]
    assert kv.fork(1, (0, 0, 2)) == (BlockCopy(source=4, destination=5, num_tokens=7),)
    assert kv.block_ids(1) == [[0, 1, 4], [0, 1, 5], [0, 3, 6]]
    assert kv.get_num_free_blocks() == 20 - 6  # block 2 is free
    assert kv.audit().owners[1] == (1,)
    kv.check()


def test_beams_that_change_places_exchange_their_blocks_without_a_copy() -> None:
    kv = KvCacheManager(20, 10)
    stepped(kv, started(kv, LlmRequest(1, 15, 40, beam_width=3)), 12)
    assert kv.fork(1, (1, 2, 0)) == ()
    assert kv.block_ids(1) == [[0, 2, 5], [0, 3, 6], [0, 1, 4]]
    assert kv.fork(1, (0, 1, 2)) == ()
    kv.check()


def test_a_beam_that_is_its_own_parent_keeps_its_table() -> None:
    kv = KvCacheManager(20, 10)
    stepped(kv, started(kv, LlmRequest(1, 15, 40, beam_width=3)), 12)
    tables = kv.block_ids(1)
    assert kv.fork(1, (2, 2, 2)) == (BlockCopy(6, 4, 7), BlockCopy(6, 5, 7))
    assert kv.block_ids(1) == [[0, 3, 4], [0, 3, 5], tables[2]]


def test_no_block_is_both_read_and_written_by_the_copies_of_a_fork() -> None:
    kv = KvCacheManager(40, 10)
    stepped(kv, started(kv, LlmRequest(1, 15, 40, beam_width=4)), 3)
    copies = kv.fork(1, (1, 3, 1, 1))
    assert len(copies) == 2
    assert {c.source for c in copies}.isdisjoint(c.destination for c in copies)
    kv.check()


def test_a_fork_on_a_block_boundary_copies_nothing_and_the_next_blocks_are_private() -> None:
    kv = KvCacheManager(20, 10)
    request = started(kv, LlmRequest(1, 20, 40, beam_width=2))
    stepped(kv, request, 10)
    assert kv.block_ids(1) == [[0, 1, 2], [0, 1, 3]]
    assert kv.fork(1, [1, 1]) == ()
    assert kv.block_ids(1) == [[0, 1, 3], [0, 1, 3]]
    assert kv.add_token(1) == (4, 5)
    kv.check()


def test_a_fork_works_in_a_full_pool() -> None:
    kv = KvCacheManager(5, 10)
    stepped(kv, started(kv, LlmRequest(1, 15, 40, beam_width=2)), 6)
    assert kv.get_num_free_blocks() == 0
    assert len(kv.fork(1, (1, 1))) == 1
    assert kv.get_num_free_blocks() == 1


@pytest.mark.parametrize("parents", [(0,), (0, 1, 1), (0, 2), (-1, 0)])
def test_a_fork_with_impossible_parents_changes_nothing(parents: Sequence[int]) -> None:
    kv = KvCacheManager(20, 10)
    started(kv, LlmRequest(1, 15, 40, beam_width=2))
    before = snapshot(kv, 1)
    with pytest.raises(ValueError, match="request 1 has 2 beams, not parents"):
        kv.fork(1, parents)
    assert snapshot(kv, 1) == before


# What if --------------------------------------------------------------------------------------


def test_a_what_if_frees_what_only_the_removed_held_and_touches_nothing() -> None:
    kv = KvCacheManager(10, 10)
    kv.add_sequence(LlmRequest(1, 25, 10, beam_width=3))  # 5 blocks
    kv.add_sequence(LlmRequest(2, 20, 10))  # 2 blocks
    before = snapshot(kv, 1, 2)
    kv.start_scheduling()
    assert kv.scheduling_has_free_blocks()
    assert kv.scheduling_has_free_blocks(3)
    assert not kv.scheduling_has_free_blocks(4)
    kv.scheduling_remove_sequence(1)
    kv.scheduling_remove_sequence(1)
    kv.scheduling_remove_sequence(77)
    assert kv.scheduling_has_free_blocks(8)
    assert not kv.scheduling_has_free_blocks(9)
    assert snapshot(kv, 1, 2) == before
    full = KvCacheManager(1, 10)
    full.add_sequence(LlmRequest(1, 5, 5))
    full.start_scheduling()
    assert not full.scheduling_has_free_blocks()
    kv.start_scheduling()
    assert not kv.scheduling_has_free_blocks(4)


def test_a_what_if_counts_a_block_that_two_sequences_hold_for_both() -> None:
    pool = BlockPool(3)
    first, second = (BlockTables(i, 10, [[0]]) for i in (1, 2))
    pool.take(1, references=2)
    what_if = WhatIf(pool)
    what_if.remove(first)
    what_if.remove(first)
    assert what_if.num_free == 2
    what_if.remove(second)
    assert what_if.num_free == 3


# Cross attention --------------------------------------------------------------------------------


def test_a_cross_cache_counts_the_encoders_positions_once() -> None:
    kv = KvCacheManager(10, 10, cross=True)
    request = LlmRequest(1, 70, 80, encoder_len=25, beam_width=4, context_chunk_size=40)
    assert kv.get_needed_resource_to_completion(request) == 3
    assert kv.get_remaining_blocks_to_completion(request) == 3
    assert kv.get_needed_blocks_one_step(request) == 3
    begun = LlmRequest(2, 70, 80, encoder_len=25, context_current_position=40)
    assert kv.get_remaining_blocks_to_completion(begun) == 0
    generating = LlmRequest(3, 70, 80, encoder_len=25)
    generating.move_to_next_context_chunk()
    assert kv.get_needed_blocks_one_step(generating) == 0
    kv.add_sequence(request)
    assert kv.block_ids(1) == [[0, 1, 2]] * 4 and kv.num_tokens(1) == 25
    assert kv.get_remaining_blocks_to_completion(request) == 0
    kv.check()
    request.move_to_next_context_chunk()
    assert kv.get_needed_blocks_one_step(request) == 0
    request.context_chunk_size = 30
    request.move_to_next_context_chunk()
    request.add_token()
    assert kv.get_needed_blocks_one_step(request) == 0
    assert kv.sum_remaining_blocks_to_completion([request]) == 0
    assert kv.fork(1, (3, 3, 0, 1)) == ()
    with pytest.raises(ValueError, match="request 1: a cross KV cache"):
        kv.add_token(1)
    with pytest.raises(ValueError, match="request 1: beams and cross"):
        kv.rewind(1, 1)
    kv.remove(1)
    assert kv.get_num_free_blocks() == 10


# Options, and the proof that finds what is wrong ------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_blocks": 0}, "num_blocks = 0 must be an integer of at least 1"),
        ({"num_blocks": -3}, "num_blocks = -3 must be an integer of at least 1"),
        ({"num_blocks": 1.5}, "num_blocks = 1.5 must be an integer of at least 1"),
        ({"num_blocks": True}, "num_blocks = True must be an integer of at least 1"),
        ({"num_blocks": None}, "num_blocks = None must be an integer of at least 1"),
        ({"tokens_per_block": 0}, "tokens_per_block = 0 must be an integer of at least 1"),
        ({"tokens_per_block": 8.0}, "tokens_per_block = 8.0 must be an integer of at least 1"),
        ({"max_attention_window": 0}, "max_attention_window = 0 must be an integer of at least 1"),
        ({"max_attention_window": "8"}, "max_attention_window = '8' must be an integer of"),
        ({"sink_token_length": -1}, "sink_token_length = -1 must be an integer of at least 0"),
        ({"sink_token_length": None}, "sink_token_length = None must be an integer of at least 0"),
        (
            {"sink_token_length": 8, "max_attention_window": 8},
            "sink_token_length = 8 must be less than max_attention_window = 8",
        ),
        ({"enable_block_reuse": 1}, "enable_block_reuse = 1 must be True or False"),
        ({"enable_partial_reuse": None}, "enable_partial_reuse = None must be True or False"),
        ({"copy_on_partial_reuse": "no"}, "copy_on_partial_reuse = 'no' must be True or False"),
        ({"cross": 0}, "cross = 0 must be True or False"),
        ({"onboard_blocks": 0}, "onboard_blocks = 0 must be True or False"),
        ({"num_host_blocks": 3}, "num_host_blocks = 3 needs enable_block_reuse"),
        ({"num_host_blocks": -1}, "num_host_blocks = -1 must be an integer of at least 0"),
        ({"num_host_blocks": 2.5}, "num_host_blocks = 2.5 must be an integer of at least 0"),
        (
            {"min_offload_tokens": -1},
            "min_offload_tokens = -1 must be an integer of at least 0",
        ),
        (
            {"secondary_offload_min_priority": 101},
            "secondary_offload_min_priority = 101 must be an integer from 0 to 100",
        ),
        (
            {"enable_block_reuse": True, "cross": True},
            "enable_block_reuse must be False with cross",
        ),
        (
            {"enable_block_reuse": True, "sink_token_length": 4, "max_attention_window": 40},
            "enable_block_reuse: sink_token_length = 4 must be a multiple",
        ),
        ({"cross": True, "sink_token_length": 4}, "cross=True"),
        ({"cross": True, "max_attention_window": 40}, "cross=True"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    good: dict[str, Any] = {"num_blocks": 10, "tokens_per_block": 8}
    with pytest.raises(ConfigError, match=named):
        KvCacheManager(**{**good, **options})


def test_a_block_has_64_tokens_by_default() -> None:
    kv = KvCacheManager(10)
    assert (kv.tokens_per_block, kv.get_needed_blocks_one_step(LlmRequest(1, 64, 1))) == (64, 1)


def test_whole_numbers_of_numpy_are_taken_as_ints() -> None:
    kv = KvCacheManager(np.int64(10), np.uint8(8), max_attention_window=np.int32(40))
    assert [type(n) for n in (kv.num_blocks, kv.tokens_per_block)] == [int, int]
    assert kv.get_max_resource_count() == 10


def test_a_subclass_may_count_when_its_first_scheduling_starts():
    class Counting(KvCacheManager):
        def start_scheduling(self):
            super().start_scheduling()
            self.num_free_positions = self.num_free_blocks * self.tokens_per_block

    assert Counting(6, 4).num_free_positions == 24


def spoiled(spoil: Callable[[KvCacheManager], object]) -> KvCacheManager:
    kv = KvCacheManager(10, 10)
    kv.add_sequence(LlmRequest(1, 25, 10))
    started(kv, LlmRequest(2, 15, 10, beam_width=2))
    kv.check()
    spoil(kv)
    return kv


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda kv: kv._pool.ref_counts.__setitem__(1, 2),
            r"block 1 counts 2 .*requests \[1\]",
        ),
        (
            lambda kv: kv._pool.ref_counts.__setitem__(9, 1),
            "block 9 counts 1 .*no request",
        ),
        (
            lambda kv: kv._pool.free.__setitem__(4, None),
            r"block 4 is free, but is held by requests \[2\]",
        ),
        (lambda kv: kv._pool.free.pop(9), "block 9 is not free, but is held by no req"),
        (
            lambda kv: kv._pool.free.__setitem__(77, None),
            "6 free and 6 used|5 free and 6 used",
        ),
        (lambda kv: kv._live[1].tables[0].pop(), "beam 0 of request 1 holds 2 .*block 1"),
        (lambda kv: kv._live[1].tables[0].clear(), "request 1 holds 0 .*has none"),
        (lambda kv: kv._live[1].tables[0].__setitem__(0, 1), "block 1 is twice .*1"),
        (
            lambda kv: (
                kv._live[2].tables[1].__setitem__(1, kv._live[2].tables[0][1]),
                kv._pool.ref_counts.__setitem__(kv._live[2].tables[0][1], 2),
            ),
            "block 4, which beam 0 of request 2 is writing to, is in 2 tables",
        ),
    ],
)
def test_check_names_the_block_and_its_owner(
    spoil: Callable[[KvCacheManager], object], problem: str
) -> None:
    kv = spoiled(spoil)
    with pytest.raises(LedgerError, match=problem) as raised:
        kv.check()
    assert isinstance(raised.value, GptManagerError)
    assert isinstance(raised.value, AssertionError)
    report = kv.audit()
    assert not report.ok
    assert report.problem == str(raised.value)
