"""The host tier: what has to leave the pool comes back, and every copy stands in its order."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from tree_paths import path_to

from gptmanager.errors import CapacityError, ConfigError
from gptmanager.kv_cache import BlockCopy, HostCounts, KvCacheManager, LedgerError
from gptmanager.memory import KvPool, PageShape
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


def cache(num_blocks=4, size=10, num_host_blocks=4, **options):
    return KvCacheManager(
        num_blocks, size, enable_block_reuse=True, num_host_blocks=num_host_blocks, **options
    )


def run(kv, request, new_tokens=1):
    """Its context and some tokens; the copies that it took."""
    copies = [*kv.add_sequence(request)]
    request.context_chunk_size = None
    request.move_to_next_context_chunk()
    kv.store_context(request)
    for _ in range(new_tokens - 1):
        request.add_token(5)
        kv.add_token(request.request_id)
        copies += kv.take_moves()
    request.add_token(5)
    kv.check()
    return copies


def test_what_leaves_the_pool_is_found_on_the_host_and_comes_back():
    kv = cache()
    run(kv, LlmRequest(1, list(range(30)), 2))
    kv.remove(1)
    assert run(kv, LlmRequest(2, [7] * 25, 2)) == [BlockCopy(2, 4, 10), BlockCopy(1, 5, 10)]
    report = kv.audit()
    assert (report.host_total, report.host_free, report.host_used) == (4, 2, 2)
    kv.remove(2)
    again = LlmRequest(3, list(range(30)), 2)
    assert kv.get_reusable_tokens(again) == 20
    copies = run(kv, again)
    # the beginning of the third block is copied out first; a copy into a block frees it before
    assert [copy for copy in copies if copy.source >= 4] == [
        BlockCopy(4, 1, 9),
        BlockCopy(5, 2, 10),
    ]
    assert again.request_id in kv and kv.num_cached_tokens(3) == 29
    assert kv.host_counts.onboarded_blocks == 2
    kv.remove(3)
    kv.check()


def test_without_onboarding_nothing_is_found_there_and_what_is_computed_takes_its_place():
    kv = cache(onboard_blocks=False)
    run(kv, LlmRequest(1, list(range(30)), 2))
    kv.remove(1)
    run(kv, LlmRequest(2, [7] * 25, 2))
    kv.remove(2)
    again = LlmRequest(3, list(range(30)), 2)
    assert kv.get_reusable_tokens(again) == 10
    run(kv, again)
    assert kv.num_cached_tokens(3) == 10 and kv.host_counts.onboarded_blocks == 0
    assert kv.get_reusable_tokens(LlmRequest(4, list(range(31)), 2)) == 30


@pytest.mark.parametrize("onboards", [False, True])
def test_held_blocks_may_follow_one_on_the_host(onboards):
    kv = cache(num_blocks=6, onboard_blocks=onboards)
    first, second = LlmRequest(1, list(range(15)), 30), LlmRequest(2, list(range(25)), 30)
    for request in (first, second):  # each computes the block that they have in common
        kv.add_sequence(request)
    for request in (first, second):  # only that of the first is cached
        kv.store_context(request)
    kv.remove(1)
    assert kv.add_sequence(LlmRequest(3, [7] * 25, 10)) == (BlockCopy(0, 6, 10),)
    assert kv.host_counts.offloaded_blocks == 1
    kv.check()


def test_blocks_with_too_few_tokens_are_lost():
    kv = cache(min_offload_tokens=6)
    run(kv, LlmRequest(1, list(range(25)), 2))
    kv.remove(1)
    run(kv, LlmRequest(2, [7] * 35, 2))
    assert kv.host_counts.offloaded_blocks == 2


def test_held_blocks_stay():
    kv = cache(num_blocks=3)
    run(kv, LlmRequest(1, list(range(20)), 2))
    run(kv, LlmRequest(2, [*range(10), 9], 2))
    assert kv.host_counts == HostCounts(4, 4, 0, 0)


def test_a_full_host_tier_loses_the_leaf_used_least_recently():
    kv = cache(num_blocks=2, num_host_blocks=2)
    for i in range(3):
        run(kv, LlmRequest(i, [i] * 10, 2), 2)
        kv.remove(i)
    run(kv, LlmRequest(3, [3] * 20, 2))
    kv.remove(3)
    kv.check()
    found = [kv.get_reusable_tokens(LlmRequest(9, [i] * 11, 2)) for i in range(4)]
    assert found == [0, 0, 10, 10]


def test_add_token_hands_its_copies_over():
    kv = cache(num_blocks=2, size=2)
    run(kv, LlmRequest(1, [1, 2, 3], 2))
    kv.remove(1)
    grows = LlmRequest(2, [8], 9)
    assert kv.add_sequence(grows) == (BlockCopy(1, 2, 1),)
    grows.move_to_next_context_chunk()
    kv.add_token(2)
    assert kv.add_token(2) == (0,)
    assert kv.take_moves() == (BlockCopy(0, 3, 2),)
    assert kv.take_moves() == ()


def test_needs_of_a_waiting_request_follow_blocks_to_the_host():
    kv = cache(num_blocks=5)
    run(kv, LlmRequest(1, list(range(30)), 2))
    kv.remove(1)
    waiting = LlmRequest(2, list(range(30)), 2)
    run(kv, LlmRequest(3, list(range(11)), 2))
    kv.start_scheduling()
    assert kv.get_needed_blocks_one_step(waiting) == 2
    run(kv, LlmRequest(4, [7] * 25, 2))  # in block 1, whose content is on the host
    kv.start_scheduling()
    assert kv.get_needed_blocks_one_step(waiting) == 2
    assert kv.get_reusable_tokens(waiting) == 20


def test_the_cache_can_be_cleared():
    kv = cache()
    run(kv, LlmRequest(1, list(range(30)), 2))
    kv.remove(1)
    run(kv, LlmRequest(2, [7] * 25, 2))
    kv.clear_cached()
    kv.check()
    assert kv.host_counts.free_blocks == 4


def test_a_host_block_that_is_lost_is_found_by_the_audit():
    kv = cache()
    kv._pool.host.free.popitem()
    with pytest.raises(LedgerError, match="3 free and 0 used host blocks are not 4"):
        kv.check()


def test_a_host_tier_needs_block_reuse():
    with pytest.raises(ConfigError, match="num_host_blocks = 3 needs enable_block_reuse"):
        KvCacheManager(3, num_host_blocks=3)


def test_a_pool_copies_between_its_tiers_in_order():
    pool = KvPool([PageShape(1, 2)] * 2, 3, 4, num_host_blocks=2)
    pool.keys.copy_(torch.arange(pool.keys.numel()).reshape(pool.keys.shape))
    pool.values.copy_(-torch.arange(pool.values.numel()).reshape(pool.values.shape))
    keys, values = pool.keys.clone(), pool.values.clone()
    pool.copy([BlockCopy(1, 4, 4), BlockCopy(0, 1, 3), BlockCopy(4, 2, 4)])
    assert torch.equal(pool.keys[:, 2], keys[:, 1])
    assert torch.equal(pool.values[:, 2], values[:, 1])
    assert torch.equal(pool.keys[:, 1, ..., :3], keys[:, 0, ..., :3])
    assert torch.equal(pool.values[:, 1, :, 3:], values[:, 1, :, 3:])
    assert pool.nbytes + pool.host_nbytes == 5 * KvPool.bytes_per_block([PageShape(1, 2)] * 2, 4)


class Lives:
    """Random lives over few tokens. `memory`: which history each place of both tiers holds."""

    def __init__(self, seed):
        self.chance = chance = random.Random(seed)
        self.size = chance.randint(1, 4)
        self.num_blocks = chance.randint(3, 12)
        partial = chance.choice(["off", "take over", "copy"])
        self.kv = KvCacheManager(
            self.num_blocks,
            self.size,
            enable_block_reuse=True,
            enable_partial_reuse=partial != "off",
            copy_on_partial_reuse=partial == "copy",
            num_host_blocks=chance.randint(1, 10),
            onboard_blocks=chance.random() < 0.8,
            min_offload_tokens=chance.randint(1, 2),
            secondary_offload_min_priority=chance.choice([None, None, 36]),
        )
        self.memory = {}
        self.live = {}
        self.stored = {}
        self.counts = Counter()

    def copy(self, copies):
        for source, destination, num_tokens in copies:
            for offset in range(num_tokens):
                self.memory[destination, offset] = self.memory.get((source, offset))

    def root(self, request):
        return request.cache_salt

    def write(self, request, end):
        table = self.kv.block_ids(request.request_id)[0]  # in which a context is computed
        for position in range(self.stored[request.request_id], end):
            place = table[position // self.size], position % self.size
            self.memory[place] = self.root(request), tuple(request.tokens[: position + 1])
        self.stored[request.request_id] = end

    def start(self, requests):
        """Together, as an allocator does: what the others are promised stays."""
        kv = self.kv
        told = [kv.get_reusable_tokens(request) for request in requests]
        added = []
        with kv.holding_cached(requests):
            for request, tokens in zip(requests, told, strict=True):
                kv.start_scheduling()
                if kv.get_needed_blocks_one_step(request) > kv.get_num_free_blocks():
                    break
                try:
                    copies = kv.add_sequence(request)
                except CapacityError:  # blocks that are held for the others
                    break
                self.copy(copies)
                cached = kv.num_cached_tokens(request.request_id)
                assert cached >= tokens
                self.live[request.request_id] = request
                self.stored[request.request_id] = cached
                added.append(request)
        for request in added:
            self.context(request)

    def context(self, request):
        request.context_chunk_size = self.chance.choice([None, 1, 3])
        request.move_to_next_context_chunk()
        self.write(request, request.context_current_position)
        if request.state is not CONTEXT_INIT:
            self.kv.store_context(request)
            request.add_token(self.chance.choice([1, 1, 2]))

    def step(self):
        request = self.live[self.chance.choice(sorted(self.live))]
        if request.state is CONTEXT_INIT:
            self.context(request)
        elif request.num_generated >= request.max_new_tokens:
            self.remove(request)
        elif self.kv.get_needed_blocks_one_step(request) <= self.kv.get_num_free_blocks():
            self.kv.add_token(request.request_id)
            self.copy(self.kv.take_moves())
            self.write(request, request.num_tokens)
            request.add_token(self.chance.choice([1, 1, 2]))
        else:
            self.remove(request)

    def remove(self, request):
        del self.live[request.request_id], self.stored[request.request_id]
        self.kv.remove(request.request_id, self.chance.random() < 0.8)
        if self.chance.random() < 0.5 and request.num_generated < request.max_new_tokens:
            request.pause(10**6)
            self.start([request])

    def operate(self, number):
        act = self.chance.random()
        if act < 0.3 or not self.live:
            self.start(
                [
                    LlmRequest(
                        10 * number + i,
                        self.chance.choices([1, 2], [6, 1], k=self.chance.randint(1, 14)),
                        self.chance.randint(1, 8),
                        cache_salt=self.chance.choice([None, None, "a"]),
                        retention_priority=self.chance.choice([None, None, 0, 90]),
                        beam_width=self.chance.choice([1, 1, 1, 2]),
                    )
                    for i in range(self.chance.randint(1, 3))
                ]
            )
        elif act < 0.9:
            self.step()
        elif act < 0.99:
            self.remove(self.live[self.chance.choice(sorted(self.live))])
        elif self.chance.random() < 0.2:
            self.kv.clear_cached()

    def prove(self):
        kv, tree = self.kv, self.kv._reuse.tree
        kv.check()
        report = kv.audit()
        assert report.free + report.used == report.total
        assert report.host_free + report.host_used == report.host_total
        for request_id, request in self.live.items():
            table = kv.block_ids(request_id)[0]
            assert max(table) < self.num_blocks
            for position in range(self.stored[request_id]):
                place = table[position // self.size], position % self.size
                assert self.memory[place] == (
                    self.root(request),
                    tuple(request.tokens[: position + 1]),
                )
        for block in tree._nodes:
            (_, _, salt), tokens = path_to(tree, block)
            first = (len(tokens) - 1) // self.size * self.size
            for position in range(first, len(tokens)):
                held = self.memory[block, position - first]
                assert held == (salt, tuple(tokens[: position + 1])), block


def test_every_block_of_both_tiers_holds_what_is_found_there():
    total = Counter()
    for seed in range(50):
        lives = Lives(seed)
        for number in range(150):
            lives.operate(number)
            lives.prove()
        counts = lives.kv.host_counts
        total += Counter(offloaded=counts.offloaded_blocks, onboarded=counts.onboarded_blocks)
    assert total["offloaded"] > 800 and total["onboarded"] > 160, total
