"""Which block goes first: as a search of all would find it, and without that search."""

from __future__ import annotations

from collections import Counter

import pytest
from kv_cache_trial import run_trial

from gptmanager.kv_cache import KvCacheManager
from gptmanager.kv_cache.eviction import EvictionQueue
from gptmanager.kv_cache.prefix_tree import PrefixTree
from gptmanager.kv_cache.state import kv_cache_state, restore_kv_cache
from gptmanager.request.llm_request import LlmRequest

SIZE = 4


def run(kv, start, num_blocks=1, priority=None):
    """A request that leaves so many whole blocks to be found, of tokens from `start` on."""
    tokens = list(range(start, start + num_blocks * SIZE))
    request = LlmRequest(start, tokens, 1, retention_priority=priority)
    kv.add_sequence(request)
    request.move_to_next_context_chunk()
    kv.store_context(request)
    request.add_token(7)
    kv.remove(start)


def searched(queue, may_go):
    """All that may go, looked at one by one."""
    return min(filter(may_go, queue.blocks), key=queue._tree.priority, default=None)


def test_the_first_is_that_of_a_search_whatever_has_happened(monkeypatch):
    first, seen = EvictionQueue.first, Counter()

    def checked(queue, may_go):
        found, tree = first(queue, may_go), queue._tree
        if tree.num_prioritized:
            assert found == searched(queue, may_go)
            seen["none" if found is None else "host" if found >= tree.num_primary else "pool"] += 1
            seen["held back"] += found is not None and not all(map(may_go, queue.blocks))
        return found

    monkeypatch.setattr(EvictionQueue, "first", checked)
    run_trial(4_000, seed=4)
    assert all(seen[kind] > 10 for kind in ("pool", "host", "held back")), seen


def test_a_block_is_looked_at_seldom_however_many_stay(monkeypatch):
    """Prioritized ones are older than all others, and never go."""
    kv = KvCacheManager(1200, SIZE, enable_block_reuse=True)
    for i in range(500):
        run(kv, 1000 * i, priority=90)
    for i in range(500, 1300):
        run(kv, 1000 * i)
    counts = Counter()
    is_leaf = PrefixTree.is_leaf

    def counted(tree, block):
        counts["looks"] += 1
        return is_leaf(tree, block)

    monkeypatch.setattr(PrefixTree, "is_leaf", counted)
    for i in range(2000, 2300):
        run(kv, 1000 * i)
    assert counts["looks"] < 3 * 300
    kv.check()


def test_what_is_found_again_and_again_does_not_pile_up():
    kv = KvCacheManager(20, SIZE, enable_block_reuse=True)
    run(kv, 500, priority=10)
    for _ in range(300):
        run(kv, 0, num_blocks=4, priority=90)
    queue, is_leaf = kv._pool.queue, kv._pool.tree.is_leaf
    assert len(queue._heap) <= 2 * len(queue.blocks) + 65
    for start in range(1000, 1020):  # each takes the place of the first, until all are replaced
        assert queue.first(is_leaf) == searched(queue, is_leaf)
        run(kv, SIZE * start, priority=100)
    assert kv.get_reusable_tokens(LlmRequest(9999, list(range(4 * SIZE)), 1)) == 0


@pytest.mark.parametrize("hosts", [0, 3])
def test_a_copy_by_its_state_decides_the_same(hosts):
    kv = KvCacheManager(8, SIZE, enable_block_reuse=True, num_host_blocks=hosts)
    for i in range(20):
        run(kv, 100 * i, 1 + i % 3, priority=[None, 90, 10][i % 3])
    waiting = LlmRequest(9999, list(range(1900, 1920)), 5, beam_width=2)
    assert kv.find_new_context_block(waiting) is not None
    copy = KvCacheManager(8, SIZE, enable_block_reuse=True, num_host_blocks=hosts)
    restore_kv_cache(copy, kv_cache_state(kv), {})
    assert copy.get_reusable_tokens(waiting) == kv.get_reusable_tokens(waiting)
    for i in range(20, 40):
        for each in (kv, copy):
            run(each, 100 * i, 1 + i % 3, priority=[None, 40, 60][i % 3])
            each.check()
        assert list(copy._pool.free) == list(kv._pool.free)
        assert copy.reuse_counts == kv.reuse_counts


def test_priorities_that_end_and_begin_again_are_those_of_now():
    kv = KvCacheManager(3, SIZE, enable_block_reuse=True)
    run(kv, 0, priority=90)
    run(kv, 100)
    run(kv, 200)
    run(kv, 300)  # takes the place of 100
    kv.clear_cached()
    assert kv._pool.tree.num_prioritized == 0
    for start in (0, 100, 200):
        run(kv, start)
    run(kv, 100, priority=0)
    run(kv, 300)
    found = [
        kv.get_reusable_tokens(LlmRequest(9999, [*range(start, start + SIZE), 7], 1)) // SIZE
        for start in (0, 100, 200, 300)
    ]
    assert found == [1, 0, 1, 1]
