"""Saves the state of a LoRA cache as data, restores an empty cache from it, and copies caches.

Values that can be computed from the state are not saved. A restored cache is always checked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from gptmanager.errors import AdapterError
from gptmanager.kv_cache.block import LedgerError
from gptmanager.peft_cache.layout import AdapterRow, CacheSizes, pack
from gptmanager.peft_cache.manager import PeftCacheManager
from gptmanager.peft_cache.page_eviction import AdapterPages, CachedAdapter


class AdapterState(NamedTuple):
    """The state of a `CachedAdapter`. `device_pages` is None for an adapter on the host only."""

    task_id: int
    digest: str
    rows: tuple[AdapterRow, ...]
    host_pages: tuple[int, ...]
    device_pages: tuple[int, ...] | None
    requests: tuple[int, ...]
    running: tuple[int, ...]
    is_loading: bool
    is_copying: bool
    is_replaced: bool


class PeftCacheState(NamedTuple):
    """The state of a `PeftCacheManager`.

    `adapters` has the least recently used adapter first; the order is the same on the host and on
    the device. `freed` are the host pages that `take_freed` would return.
    """

    adapters: tuple[AdapterState, ...]
    freed: tuple[int, ...]
    hits: int
    misses: int
    host_evictions: int
    device_evictions: int
    copied_bytes: int


def peft_cache_state(cache: PeftCacheManager) -> PeftCacheState:
    return PeftCacheState(
        tuple(_adapter_state(cache, adapter) for adapter in cache._host.adapters),
        cache._freed_pages(),
        cache._hits,
        cache._misses,
        cache._host_evictions,
        cache._device_evictions,
        cache._copied_bytes,
    )


def restore_peft_cache(cache: PeftCacheManager, state: PeftCacheState) -> None:
    """Restore an empty cache to `state`.

    Raise LedgerError if the restored state is inconsistent.
    """
    adapters = [_adapter(it, cache.sizes) for it in state.adapters]
    both = [*zip(adapters, state.adapters, strict=True)]
    cache._host.set({adapter: it.host_pages for adapter, it in both})
    cache._device.set({a: it.device_pages for a, it in both if it.device_pages is not None})
    for adapter in adapters:
        if adapter.is_replaced:
            cache._replaced.add(adapter)
        else:
            cache._by_task[adapter.task_id] = adapter
        for request_id in adapter.requests:
            cache._by_request[request_id] = adapter
    cache._freed = [*state.freed]
    cache._hits, cache._misses = state.hits, state.misses
    cache._host_evictions = state.host_evictions
    cache._device_evictions = state.device_evictions
    cache._copied_bytes = state.copied_bytes
    cache.check()


def copied_peft_cache(
    cache: PeftCacheManager,
) -> tuple[PeftCacheManager, Mapping[CachedAdapter, CachedAdapter]]:
    """Return a cache with copies of the adapters and pages of `cache`, and a map adapter -> copy.

    The counts of hits, misses and evictions, and the pages that `take_freed` would return, are not
    copied.
    """
    copies = {
        adapter: replace(adapter, requests={*adapter.requests}, running={*adapter.running})
        for adapter in cache._host.adapters
    }
    found = PeftCacheManager(cache.sizes)
    found._host = _copied_pages(cache._host, copies)
    found._device = _copied_pages(cache._device, copies)
    found._by_task = {task_id: copies[it] for task_id, it in cache._by_task.items()}
    found._by_request = {request_id: copies[it] for request_id, it in cache._by_request.items()}
    found._replaced = {copies[adapter] for adapter in cache._replaced}
    return found, copies


def _copied_pages(
    pages: AdapterPages, copies: Mapping[CachedAdapter, CachedAdapter]
) -> AdapterPages:
    found = AdapterPages(pages.total)
    found.free, found.fresh = [*pages.free], pages.fresh
    found.adapters = OrderedDict((copies[it], held) for it, held in pages.adapters.items())
    return found


def _adapter_state(cache: PeftCacheManager, adapter: CachedAdapter) -> AdapterState:
    return AdapterState(
        adapter.task_id,
        adapter.digest,
        adapter.rows,
        cache.host_pages(adapter),
        cache.device_pages(adapter),
        tuple(sorted(adapter.requests)),
        tuple(sorted(adapter.running)),
        adapter.is_loading,
        adapter.is_copying,
        adapter.is_replaced,
    )


def _adapter(state: AdapterState, sizes: CacheSizes) -> CachedAdapter:
    try:
        packing = pack(state.rows, sizes.page_size, sizes.first_layers)
    except AdapterError as error:
        raise LedgerError(f"adapter {state.task_id} does not fit into a page: {error}") from None
    return CachedAdapter(
        state.task_id,
        state.digest,
        state.rows,
        packing,
        set(state.requests),
        set(state.running),
        state.is_loading,
        state.is_copying,
        state.is_replaced,
    )
