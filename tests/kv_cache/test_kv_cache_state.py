"""The state of a KV cache as data: what is restored is the same, and what cannot be is refused."""

from __future__ import annotations

import pytest

from gptmanager.kv_cache import KvCacheManager, LedgerError
from gptmanager.kv_cache.state import KvCacheState, kv_cache_state, restore_kv_cache
from gptmanager.request.llm_request import LlmRequest

SIZE = 4


def empty(num_host_blocks: int = 3, **options) -> KvCacheManager:
    options = {"enable_block_reuse": True, "num_host_blocks": num_host_blocks, **options}
    return KvCacheManager(8, SIZE, **options)


def in_use() -> tuple[KvCacheManager, dict[int, LlmRequest]]:
    """A cache with two sequences that share blocks, and cached blocks in both tiers."""
    kv, live = empty(), {}
    prompts = {1: range(20), 2: range(100, 120), 3: [*range(100, 116), 7], 4: [*range(100, 112), 8]}
    for request_id, prompt in prompts.items():
        request = LlmRequest(request_id, list(prompt), 5, retention_priority=90)
        kv.add_sequence(request)
        request.move_to_next_context_chunk()
        kv.store_context(request)
        request.add_token(9)
        if request_id < 3:
            kv.remove(request_id)
        else:
            live[request_id] = request
    kv.check()
    assert kv.host_counts.free_blocks < 3 and kv.reuse_counts.cached_blocks > 3
    return kv, live


def test_a_restored_cache_has_the_same_state():
    kv, live = in_use()
    copy = empty()
    restore_kv_cache(copy, kv_cache_state(kv), live)
    assert kv_cache_state(copy) == kv_cache_state(kv)
    assert [copy.block_ids(i) for i in live] == [kv.block_ids(i) for i in live]


def of_first_sequence(state: KvCacheState, **changed) -> KvCacheState:
    first, *others = state.sequences
    return state._replace(sequences=(first._replace(**changed), *others))


def of_reuse(state: KvCacheState, **changed) -> KvCacheState:
    return state._replace(reuse=state.reuse._replace(**changed))


def of_last_node(state: KvCacheState, **changed) -> KvCacheState:
    *others, last = state.reuse.nodes
    return of_reuse(state, nodes=(*others, last._replace(**changed)))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda it: of_first_sequence(it, request_id=9), "request 9 cannot hold blocks"),
        (lambda it: it._replace(sequences=it.sequences * 2), "request 3 cannot hold blocks"),
        (lambda it: of_first_sequence(it, tables=()), "request 3 has no block table"),
        (lambda it: of_first_sequence(it, tables=((0, 8),)), "0 to 8 are not within 0..7"),
        (lambda it: of_first_sequence(it, tables=((-1, 7),)), "-1 to 7 are not within 0..7"),
        (lambda it: of_first_sequence(it, tables=((0, 0),)), "a block occurs twice"),
        (lambda it: it._replace(free=it.free * 2), "a block occurs twice"),
        (lambda it: it._replace(free=it.free[1:]), "is not free, but is held by no request"),
        (lambda it: it._replace(reuse=None), "must both have block reuse, or neither"),
        (lambda it: of_reuse(it, host=None), "must both have a host tier, or neither"),
        (lambda it: of_reuse(it, storing=(9,)), "request 9 cannot store blocks"),
        (
            lambda it: of_reuse(it, host=it.reuse.host._replace(free=(11,))),
            "to 11 are not within 8..10",
        ),
        (lambda it: of_last_node(it, block=11), "to 11 are not within 0..10"),
        (lambda it: of_last_node(it, parent=len(it.reuse.nodes) - 1), "has no parent"),
        (lambda it: of_last_node(it, parent=~len(it.reuse.roots)), "has no parent"),
        (lambda it: of_last_node(it, tokens=()), "cannot be cached with its tokens"),
        (lambda it: of_last_node(it, tokens=(1, 2, 3, 4, 5)), "cannot be cached with its tokens"),
        (lambda it: of_last_node(it, priority=101), "cannot be cached with its tokens or priority"),
        (lambda it: of_last_node(it, priority=-1), "cannot be cached with its tokens or priority"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(spoil, text):
    kv, live = in_use()
    with pytest.raises(LedgerError, match=text):
        restore_kv_cache(empty(), spoil(kv_cache_state(kv)), live)


def test_a_cache_that_differs_or_is_not_empty_is_refused():
    kv, live = in_use()
    state = kv_cache_state(kv)
    with pytest.raises(LedgerError, match="must both have block reuse, or neither"):
        restore_kv_cache(empty(0, enable_block_reuse=False), state, live)
    with pytest.raises(LedgerError, match="must both have a host tier, or neither"):
        restore_kv_cache(empty(0), of_reuse(state, nodes=()), live)
    used = empty()
    used.add_sequence(LlmRequest(4, 3, 3))
    with pytest.raises(LedgerError, match="request 4 cannot hold blocks"):
        restore_kv_cache(used, state, live)
