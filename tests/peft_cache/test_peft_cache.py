"""What a LoRA cache does, case by case; random operations stand in test_peft_cache_trial."""

from __future__ import annotations

import pytest

from gptmanager.config import PeftCacheManagerConfig
from gptmanager.errors import AdapterError
from gptmanager.kv_cache import LedgerError
from gptmanager.peft_cache import (
    AdapterRow,
    CacheSizes,
    PageCopy,
    PeftCacheManager,
    Put,
    cache_sizes,
)
from gptmanager.peft_cache.layout import pack
from gptmanager.peft_cache.state import peft_cache_state, restore_peft_cache
from gptmanager.scheduler.adapter_pages import AdapterPages

# Two layers; attn_q and attn_dense of 16 in and out, mlp_h_to_4h of 16 and 64.
WIDTHS = {1: 32, 4: 32, 5: 80}


def rows(num_pages, rank=2):
    """An adapter of so many pages of 64 elements."""
    return tuple(AdapterRow(layer, 1, rank, 64) for layer in range(num_pages))


def cache(host=4, device=2):
    return PeftCacheManager(CacheSizes(64, host, device, 2, 8))


def put(it, request, task, num_pages=1):
    assert it.put(request, task, f"content {task}", rows(num_pages)) is Put.NEW
    it.loaded(it.adapter_of(request))


def run(it, request):
    copies = it.ensure(request)
    if copies:
        it.copied(it.adapter_of(request))
    return copies


def test_a_page_holds_an_adapter_of_optimal_size():
    config = PeftCacheManagerConfig(optimal_adapter_size=8, max_adapter_size=8)
    sizes = cache_sizes(config, WIDTHS, 2, 2, 10**6)
    assert sizes.page_size == 2 * 8 * (32 + 32 + 80)
    whole = [AdapterRow(layer, m, 8, 8 * w) for layer in range(2) for m, w in WIDTHS.items()]
    assert pack(whole, sizes.page_size).lengths == (sizes.page_size,)


def test_attn_qkv_and_its_parts_are_not_in_one_adapter():
    config = PeftCacheManagerConfig(optimal_adapter_size=8, max_adapter_size=8)
    parts = {1: 32, 2: 24, 3: 24}
    assert cache_sizes(config, {0: 48, **parts}, 1, 2, 0).page_size == 8 * (32 + 24 + 24)
    assert cache_sizes(config, {0: 48}, 1, 2, 0).page_size == 8 * 48
    assert cache_sizes(config, parts, 1, 2, 0).page_size == 8 * (32 + 24 + 24)


def test_a_page_holds_the_largest_row():
    config = PeftCacheManagerConfig(optimal_adapter_size=1, max_adapter_size=64)
    assert cache_sizes(config, WIDTHS, 2, 2, 0).page_size == 64 * 80


def test_sizes_in_bytes_are_limits_and_module_layers_override_them():
    config = PeftCacheManagerConfig(host_cache_size=30_720 * 3 - 1, device_cache_percent=0.5)
    sizes = cache_sizes(config, WIDTHS, 24, 2, 4 * 55_296)
    page = 24 * 8 * 144
    assert sizes == CacheSizes(page, 92_159 // (2 * page), 2, 2, 64)
    config.num_host_module_layer, config.num_device_module_layer = 1, 346
    sizes = cache_sizes(config, WIDTHS, 24, 2, 4 * 55_296)
    assert (sizes.num_host_pages, sizes.num_device_pages) == (1, 2)  # 346 * 80 > a page
    config.num_device_module_layer = 345
    assert cache_sizes(config, WIDTHS, 24, 2, 0).num_device_pages == 1


def test_rows_are_whole_in_pages_and_aligned():
    packing = pack([AdapterRow(0, 1, 1, size) for size in (20, 50, 30, 9)], 64)
    assert packing.places == ((1, 32), (0, 0), (1, 0), (2, 0))
    assert packing.lengths == (56, 56, 16)
    with pytest.raises(AdapterError, match="row 1 .*layer 3, module 5.* 65 elements.* at most 64"):
        pack([AdapterRow(0, 1, 1, 8), AdapterRow(3, 5, 1, 65)], 64)


def test_stages_have_pages_for_their_own_layers():
    """All count alike: for the stage that has, or needs, the most."""
    config = PeftCacheManagerConfig(optimal_adapter_size=8, max_adapter_size=8)
    sizes = cache_sizes(config, WIDTHS, 5, 2, 10**6, (2, 4))  # stages of 2, 2 and 1 layers
    assert sizes.page_size == 2 * 8 * (32 + 32 + 80)
    config.num_host_module_layer = 346
    one, three = (cache_sizes(config, WIDTHS, 6, 2, 0, it) for it in ((), (2, 4)))
    assert (one.num_host_pages, three.num_host_pages) == (
        -(-346 * 80 // 6912),
        -(-116 * 80 // 2304),
    )
    rows = [AdapterRow(layer, 1, 1, size) for layer, size in enumerate((20, 50, 30, 9, 64))]
    packing = pack(rows, 64, (2, 4))
    assert packing.places == ((1, 0), (0, 0), (0, 0), (0, 32), (0, 0))
    assert packing.lengths == (64, 24)


def test_stages_are_restored_with_their_pages():
    def new():
        return PeftCacheManager(CacheSizes(64, 4, 2, 2, 8, (1,)))

    it, other = new(), new()
    it.put(1, 7, "a", rows(2))
    assert len(it.host_pages(it.adapter_of(1))) == 1
    restore_peft_cache(other, peft_cache_state(it))
    assert peft_cache_state(other) == peft_cache_state(it)


def test_a_request_that_comes_runs_and_ends():
    it = cache()
    assert it.put(1, 7, "a", rows(2)) is Put.NEW
    assert it.ensure(1) is None  # loading
    adapter = it.adapter_of(1)
    it.loaded(adapter)
    assert it.ensure(1) == (PageCopy(0, 0, 64), PageCopy(1, 1, 64))
    assert it.ensure(1) == ()
    assert it.device_pages(adapter) == (0, 1)
    it.copied(adapter)
    it.use(2, 7)
    assert it.ensure(2) == ()
    counts = it.counts()
    assert (counts.hits, counts.misses, counts.copied_bytes) == (1, 1, 2 * 64 * 2)
    for request in (1, 2, 2):
        it.release(request)
    assert 7 in it and it.counts().device_used_pages == 2
    report = it.audit()
    assert report.ok and report.host_owners == report.device_owners == {0: 7, 1: 7}


def test_the_error_for_a_task_that_is_not_cached_names_no_other_task():
    it = cache(host=14, device=14)
    for task in range(12):
        put(it, task, task + 20)
    with pytest.raises(AdapterError, match=r"^lora_task_id 9 is not cached: [^0-9]*$"):
        it.use(100, 9)
    with pytest.raises(AdapterError):
        it.determine_num_pages(9)
    it.check()


def test_other_content_under_a_known_id_is_refused():
    it = cache()
    put(it, 1, 7)
    assert it.put(2, 7, "content 7", rows(1)) is Put.KNOWN
    with pytest.raises(AdapterError, match="lora_task_id 7 differ"):
        it.put(3, 7, "other", rows(1))
    with pytest.raises(LedgerError):
        it.adapter_of(3)
    it.check()


def test_what_can_never_be_on_the_device_is_refused():
    it = cache(host=4, device=2)
    with pytest.raises(AdapterError, match="192 elements and takes 3 pages of 64.* device .* 2"):
        it.put(1, 7, "a", rows(3))
    with pytest.raises(AdapterError, match="takes 5 pages of 64, and the host cache has 4"):
        it.put(1, 7, "a", rows(5))
    with pytest.raises(AdapterError, match="adapter_size 9, expected at most max_adapter_size = 8"):
        it.put(1, 7, "a", rows(1) + rows(1, rank=9))
    assert it.counts().host_used_pages == 0 and 7 not in it


def test_the_least_recently_used_go_on_both_levels():
    it = cache(host=3, device=2)
    for task in (1, 2, 3):
        put(it, task, task)
        assert run(it, task)
        it.release(task)
    assert set(it.audit().device_owners.values()) == {2, 3}
    it.use(9, 1)
    it.release(9)  # 2 is the oldest now
    put(it, 4, 4)
    assert [task in it for task in (1, 2, 3, 4)] == [True, False, True, True]
    counts = it.counts()
    assert (counts.host_evictions, counts.device_evictions) == (1, 2)
    assert counts.device_free_pages == 1


def test_what_others_need_is_waited_for():
    it = cache(host=3, device=1)
    put(it, 1, 1)
    put(it, 2, 2)
    assert run(it, 1) and it.ensure(2) is None
    put(it, 3, 3)
    assert it.put(4, 4, "content 4", rows(1)) is Put.WAIT
    assert 4 not in it
    it.release(1)
    assert run(it, 2) == (PageCopy(1, 0, 64),)
    assert it.put(4, 4, "content 4", rows(1)) is Put.NEW
    assert 1 not in it


def test_a_paused_request_keeps_its_adapter_on_the_host():
    it = cache(host=2, device=1)
    put(it, 1, 1)
    put(it, 2, 2)
    assert run(it, 1)
    it.pause(1)
    assert run(it, 2)  # it took the page
    it.release(2)
    put(it, 3, 3)  # and this the host page of 2
    assert 1 in it and 2 not in it
    assert run(it, 1) == (PageCopy(0, 0, 64),)


def test_nothing_takes_pages_that_are_read_or_written():
    it = cache(host=1, device=1)
    assert it.put(1, 1, "a", rows(1)) is Put.NEW
    adapter = it.adapter_of(1)
    it.release(1)
    assert it.put(2, 2, "b", rows(1)) is Put.WAIT  # still loading
    it.loaded(adapter)
    it.use(1, 1)
    assert it.ensure(1)
    it.release(1)
    assert it.put(2, 2, "b", rows(1)) is Put.WAIT  # still copying
    it.copied(adapter)
    assert it.put(2, 2, "b", rows(1)) is Put.NEW


def test_a_forgotten_adapter_goes_with_its_last_request():
    it = cache()
    assert not it.forget(7)
    put(it, 1, 7)
    old = it.adapter_of(1)
    assert run(it, 1)
    assert it.forget(7) and not it.forget(7)
    with pytest.raises(AdapterError, match="not cached"):
        it.use(2, 7)
    assert it.determine_num_pages(7) == 1
    assert it.put(2, 7, "new", rows(1)) is Put.NEW
    assert it.adapter_of(1) is old and it.adapter_of(2) is not old
    assert it.determine_num_pages(7) == 2  # both, as long as both are in use
    it.pause(1)
    it.release(1)
    assert it.determine_num_pages(7) == 1 and it.take_freed() == (0,)
    it.release(2)
    assert it.forget(7)
    assert it.counts().host_used_pages == 1  # still loading
    with pytest.raises(LedgerError):
        it.adapter_of(2)


def test_a_load_that_fails_leaves_nothing():
    it = cache()
    assert it.put(1, 7, "a", rows(1)) is Put.NEW
    adapter = it.adapter_of(1)
    it.forget(7)
    it.loaded(adapter)
    it.release(1)
    assert it.counts().host_used_pages == 0
    it.check()


def test_a_request_has_one_adapter():
    it = cache()
    put(it, 1, 7)
    for again in (lambda: it.use(1, 7), lambda: it.put(1, 8, "b", rows(1))):
        with pytest.raises(LedgerError, match="request 1 has an adapter already"):
            again()
    for call in (it.ensure, it.pause):
        with pytest.raises(LedgerError, match="request 2 has no adapter"):
            call(2)


def test_freed_pages_are_reported_once_and_only_while_free():
    it = cache(host=2, device=2)
    put(it, 1, 1, num_pages=2)
    it.release(1)
    put(it, 2, 2)  # evicts it, and takes one of its pages
    assert it.take_freed() == (1,)
    assert it.take_freed() == ()


def test_schedulers_count_its_pages():
    it = cache(host=8, device=3)
    put(it, 1, 1, num_pages=2)
    put(it, 2, 2, num_pages=2)
    pages = AdapterPages(it)
    assert pages.take(1) and pages.take(1) and not pages.take(2)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda it: it._host.free.append(0),
            "the free pages have page 0, which also has another owner",
        ),
        (lambda it: setattr(it._host, "fresh", 2), "page 1 is neither free nor"),
        (lambda it: setattr(it._host, "fresh", 9), "page 8 is not within"),
        (lambda it: it._device.free.append(2), "page 2, which was never handed out"),
        (lambda it: it._host.adapters.popitem(), "neither free"),
        (lambda it: it._by_task.clear(), "cannot be found by its id"),
        (lambda it: it.adapter_of(1).requests.clear(), "does not list its request 1"),
        (lambda it: it._by_request.clear(), "lists request 1 of another"),
        (lambda it: it.adapter_of(1).running.add(9), r"requests \[9\] run"),
        (lambda it: it._device.drop(it.adapter_of(1)), "is needed on the device, but is not"),
        (lambda it: setattr(it.adapter_of(1), "is_loading", True), "before it is loaded"),
        (lambda it: setattr(it.adapter_of(1), "is_replaced", True), "leads to a wrong adapter"),
        (lambda it: it._replaced.add(it.adapter_of(1)), "is not consistently marked as replaced"),
    ],
)
def test_the_audit_finds_what_contradicts(spoil, problem):
    it = cache()
    put(it, 1, 7)
    run(it, 1)
    assert it.audit().ok
    spoil(it)
    with pytest.raises(LedgerError, match=problem):
        it.check()
    assert not it.audit().ok


def test_a_state_that_contradicts_itself_is_refused():
    it = cache()
    put(it, 1, 7)
    run(it, 1)
    state = peft_cache_state(it)
    restore_peft_cache(cache(), state)
    (adapter,) = state.adapters
    for wrong in (
        {"host_pages": (4,)},
        {"host_pages": (0, 1)},
        {"device_pages": None},
        {"running": (2,)},
        {"requests": ()},
        {"rows": (AdapterRow(0, 1, 1, 65),)},
    ):
        with pytest.raises(LedgerError):
            restore_peft_cache(cache(), state._replace(adapters=(adapter._replace(**wrong),)))
    with pytest.raises(LedgerError):
        restore_peft_cache(cache(), state._replace(adapters=(adapter, adapter)))
