"""`PeftCacheManager`: which LoRA adapters are cached, in which pages, and for which requests.

It decides what is evicted and what must be copied. It knows nothing of tensors, threads or time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gptmanager.errors import AdapterError
from gptmanager.kv_cache.block import LedgerError
from gptmanager.peft_cache.layout import AdapterRow, CacheSizes, pack
from gptmanager.peft_cache.page_eviction import AdapterPages, CachedAdapter


class PageCopy(NamedTuple):
    """A copy of the first `num_elements` elements of a host page to a device page."""

    host_page: int
    device_page: int
    num_elements: int


class Put(Enum):
    """The outcome of a `put`."""

    NEW = "the rows must be written to the adapter's host pages, and then `loaded` called"
    KNOWN = "this content is cached under this id already"
    WAIT = "other requests need all host pages: try again later"


class PeftCacheCounts(NamedTuple):
    """The numbers of host and device pages now, and counts of events since the start.

    Each start of a request, and each resumption after a pause, is a hit if the request's adapter
    is on the device, and a miss if the adapter must be copied there. `copied_bytes` is the total
    size of these copies. Evictions count adapters.
    """

    host_total_pages: int = 0
    host_used_pages: int = 0
    host_free_pages: int = 0
    device_total_pages: int = 0
    device_used_pages: int = 0
    device_free_pages: int = 0
    hits: int = 0
    misses: int = 0
    host_evictions: int = 0
    device_evictions: int = 0
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PeftCacheReport:
    """The owners of pages at one moment: used page -> task id of the adapter in the page.

    `problem` is the first contradiction in the cache's data, or None if they are consistent.
    """

    counts: PeftCacheCounts
    host_owners: Mapping[int, int]
    device_owners: Mapping[int, int]
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None


class PeftCacheManager:
    """Adapters by task id, on two levels of pages. An adapter on the device is also on the host.

    For a request with an adapter, call `put` or `use` when it is accepted, `ensure` before each of
    its steps, `pause` when it is paused, and `release` at its end. The adapter stays on the host
    until `release`, and on the device from `ensure` to `pause` or `release`. If there are
    too few free pages, the least recently used adapters that need not stay are evicted.
    """

    def __init__(self, sizes: CacheSizes) -> None:
        self.sizes = sizes
        self._host = AdapterPages(sizes.num_host_pages)
        self._device = AdapterPages(sizes.num_device_pages)
        self._by_task: dict[int, CachedAdapter] = {}
        self._by_request: dict[int, CachedAdapter] = {}
        self._replaced: set[CachedAdapter] = set()
        self._freed: list[int] = []
        self._hits = self._misses = self._copied_bytes = 0
        self._host_evictions = self._device_evictions = 0

    def __contains__(self, task_id: int) -> bool:
        """Return whether a request may pass this id without weights."""
        return task_id in self._by_task

    def get_max_device_pages(self) -> int:
        """Return the number of device pages, in which all adapters of a step must fit."""
        return self._device.total

    def determine_num_pages(self, lora_task_id: int) -> int:
        """Return how many pages the adapter takes on each level.

        Forgotten adapters of this id are counted, too, while requests still use them.
        Raise AdapterError if no adapter of this id is cached.
        """
        replaced = [a.num_pages for a in self._replaced if a.task_id == lora_task_id]
        if replaced and lora_task_id not in self._by_task:
            return sum(replaced)
        return self._cached(lora_task_id).num_pages + sum(replaced)

    def put(self, request_id: int, task_id: int, digest: str, rows: Sequence[AdapterRow]) -> Put:
        """Cache an adapter and assign it to a request, unless the result is WAIT.

        `digest` identifies the content: the rows and the numbers in them. Raise AdapterError if
        other content is cached under the id, or if the adapter is too large for the cache.
        """
        self._check_has_none(request_id)
        known = self._by_task.get(task_id)
        if known is not None:
            if known.digest != digest:
                raise AdapterError(
                    f"lora_weights or lora_config of lora_task_id {task_id} differ from those "
                    "cached under it: forget the adapter first, or use another id"
                )
            self._assign(request_id, known)
            return Put.KNOWN
        adapter = self._checked(task_id, digest, rows)
        evicted = self._host.to_evict(adapter.num_pages, lambda a: a.stays_on_host)
        if evicted is None:
            return Put.WAIT
        for other in evicted:
            self._host_evictions += 1
            self._device_evictions += other in self._device.adapters
            self._drop(other)
        self._host.take(adapter)
        self._by_task[task_id] = adapter
        self._assign(request_id, adapter)
        return Put.NEW

    def use(self, request_id: int, task_id: int) -> None:
        """Assign a cached adapter to a request. Raise AdapterError if it is not cached."""
        self._check_has_none(request_id)
        self._assign(request_id, self._cached(task_id))

    def loaded(self, adapter: CachedAdapter) -> None:
        """Record that an adapter's rows are in its host pages.

        If writing them has failed, call `forget` first, then this method.
        """
        adapter.is_loading = False
        self._drop_if_unused(adapter)

    def ensure(self, request_id: int) -> tuple[PageCopy, ...] | None:
        """Return the copies that put a request's adapter on the device. Call it before each step.

        Return None if the request must wait, because the adapter is still loading or because other
        requests need the pages. Otherwise the adapter stays on the device until `pause` or
        `release`, and no copies are returned if the adapter was on the device already. If copies
        are returned, call `copied` when they are done.
        """
        adapter = self.adapter_of(request_id)
        self._touch(adapter)
        if request_id in adapter.running:
            return ()
        if adapter.is_loading:
            return None
        copies: tuple[PageCopy, ...] = ()
        if adapter in self._device.adapters:
            self._hits += 1
        else:
            evicted = self._device.to_evict(adapter.num_pages, lambda a: a.stays_on_device)
            if evicted is None:
                return None
            self._device_evictions += len(evicted)
            for other in evicted:
                self._device.drop(other)
            copies = self._copy(adapter)
        adapter.running.add(request_id)
        return copies

    def copied(self, adapter: CachedAdapter) -> None:
        """Record that the copies returned by `ensure` are done."""
        adapter.is_copying = False
        self._drop_if_unused(adapter)

    def pause(self, request_id: int) -> None:
        """Record that the request is paused. Its adapter may leave the device, but not the host."""
        adapter = self.adapter_of(request_id)
        adapter.running.discard(request_id)
        self._touch(adapter)

    def release(self, request_id: int) -> None:
        """Record that a request has ended. Nothing happens if the request has no adapter."""
        adapter = self._by_request.pop(request_id, None)
        if adapter is not None:
            adapter.running.discard(request_id)
            adapter.requests.discard(request_id)
            self._touch(adapter)
            self._drop_if_unused(adapter)

    def forget(self, task_id: int) -> bool:
        """Drop the adapter of this id, and return whether one was cached.

        Requests that have the adapter continue with it. The adapter is removed when the last
        of these requests ends.
        """
        adapter = self._by_task.pop(task_id, None)
        if adapter is None:
            return False
        adapter.is_replaced = True
        self._replaced.add(adapter)
        self._drop_if_unused(adapter)
        return True

    def adapter_of(self, request_id: int) -> CachedAdapter:
        """Return the adapter of a request. Raise LedgerError if it has none."""
        if request_id not in self._by_request:
            raise LedgerError(f"request {request_id} has no adapter")
        return self._by_request[request_id]

    @property
    def adapters(self) -> tuple[CachedAdapter, ...]:
        """All adapters on the host, the least recently used first."""
        return tuple(self._host.adapters)

    def find(self, request_id: int) -> CachedAdapter | None:
        """Return the adapter of a request, or None if it has none."""
        return self._by_request.get(request_id)

    def host_pages(self, adapter: CachedAdapter) -> tuple[int, ...]:
        return self._host.adapters[adapter]

    def device_pages(self, adapter: CachedAdapter) -> tuple[int, ...] | None:
        """Return the adapter's device pages, or None if it is not on the device."""
        return self._device.adapters.get(adapter)

    def take_freed(self) -> tuple[int, ...]:
        """Return the host pages that were freed since the last call and are still free."""
        freed, self._freed = self._freed_pages(), []
        return freed

    def counts(self) -> PeftCacheCounts:
        host, device = self._host, self._device
        num_free, num_free_device = host.num_free, device.num_free
        return PeftCacheCounts(
            host.total,
            host.total - num_free,
            num_free,
            device.total,
            device.total - num_free_device,
            num_free_device,
            self._hits,
            self._misses,
            self._host_evictions,
            self._device_evictions,
            self._copied_bytes,
        )

    def audit(self) -> PeftCacheReport:
        """Return the owner of each used page, and the first contradiction in the cache's data."""
        problem = self._host.problem() or self._device.problem()
        problem = problem or self._request_problem() or self._adapter_problem()
        return PeftCacheReport(self.counts(), self._host.owners(), self._device.owners(), problem)

    def check(self) -> None:
        """Raise LedgerError unless the cache's data are consistent."""
        problem = self.audit().problem
        if problem is not None:
            raise LedgerError(problem)

    def _cached(self, task_id: int) -> CachedAdapter:
        adapter = self._by_task.get(task_id)
        if adapter is None:
            # other ids are not listed, because the client must not learn which ones are cached
            raise AdapterError(
                f"lora_task_id {task_id} is not cached: pass lora_weights and lora_config with it"
            )
        return adapter

    def _checked(self, task_id: int, digest: str, rows: Sequence[AdapterRow]) -> CachedAdapter:
        """Return a new adapter. Raise AdapterError if its rank or its size is too large."""
        sizes = self.sizes
        highest = max((row.rank for row in rows), default=0)
        if highest > sizes.max_adapter_size:
            raise AdapterError(
                f"lora_task_id {task_id} has adapter_size {highest}, expected at most "
                f"max_adapter_size = {sizes.max_adapter_size}"
            )
        adapter = CachedAdapter(
            task_id, digest, tuple(rows), pack(rows, sizes.page_size, sizes.first_layers)
        )
        for level, total in (("host", self._host.total), ("device", self._device.total)):
            if adapter.num_pages > total:
                num_elements = sum(row.num_elements for row in rows)
                raise AdapterError(
                    f"lora_task_id {task_id} has {num_elements} elements and takes "
                    f"{adapter.num_pages} pages of {sizes.page_size}, and the {level} cache has "
                    f"{total}: see PeftCacheManagerConfig"
                )
        return adapter

    def _check_has_none(self, request_id: int) -> None:
        if request_id in self._by_request:
            raise LedgerError(f"request {request_id} has an adapter already")

    def _assign(self, request_id: int, adapter: CachedAdapter) -> None:
        self._by_request[request_id] = adapter
        adapter.requests.add(request_id)
        self._touch(adapter)

    def _copy(self, adapter: CachedAdapter) -> tuple[PageCopy, ...]:
        """Give free device pages to an adapter, and return its copies. Enough must be free."""
        self._device.take(adapter)
        adapter.is_copying = True
        lengths = adapter.packing.lengths
        self._misses += 1
        self._copied_bytes += sum(lengths) * self.sizes.itemsize
        pages = self._host.adapters[adapter], self._device.adapters[adapter]
        return tuple(map(PageCopy, *pages, lengths))

    def _freed_pages(self) -> tuple[int, ...]:
        held = {page for pages in self._host.adapters.values() for page in pages}
        return tuple(sorted({*self._freed} - held))

    def _touch(self, adapter: CachedAdapter) -> None:
        self._host.touch(adapter)
        self._device.touch(adapter)

    def _drop_if_unused(self, adapter: CachedAdapter) -> None:
        if adapter.is_replaced and not adapter.stays_on_host:
            self._drop(adapter)

    def _drop(self, adapter: CachedAdapter) -> None:
        """Remove an adapter from both levels."""
        if adapter in self._device.adapters:
            self._device.drop(adapter)
        self._freed += self._host.drop(adapter)
        if adapter.is_replaced:
            self._replaced.discard(adapter)
        else:
            del self._by_task[adapter.task_id]

    def _request_problem(self) -> str | None:
        for request_id, adapter in self._by_request.items():
            if adapter not in self._host.adapters:
                return f"request {request_id} has adapter {adapter.task_id}, which is not cached"
            if request_id not in adapter.requests:
                return f"adapter {adapter.task_id} does not list its request {request_id}"
        for adapter in self._host.adapters:
            for request_id in adapter.requests:
                if self._by_request.get(request_id) is not adapter:
                    return (
                        f"adapter {adapter.task_id} lists request {request_id} of another adapter"
                    )
            if not adapter.running <= adapter.requests:
                ended = sorted(adapter.running - adapter.requests)
                return f"requests {ended} run with adapter {adapter.task_id}, but do not have it"
        return None

    def _adapter_problem(self) -> str | None:
        host, device = self._host.adapters, self._device.adapters
        for adapter in (*device, *self._replaced):
            if adapter not in host:
                return (
                    f"adapter {adapter.task_id} is on the device or replaced, but not on the host"
                )
        for task_id, adapter in self._by_task.items():
            if adapter not in host or adapter.task_id != task_id or adapter.is_replaced:
                return f"lora_task_id {task_id} leads to a wrong adapter"
        for adapter in host:
            where = f"adapter {adapter.task_id}"
            if adapter.stays_on_device and adapter not in device:
                return f"{where} is needed on the device, but is not there"
            if adapter.is_loading and adapter in device:
                return f"{where} is on the device before it is loaded"
            if adapter.is_replaced != (adapter in self._replaced):
                return f"{where} is not consistently marked as replaced"
            if adapter.is_replaced and not adapter.stays_on_host:
                return f"{where} was replaced and no request needs it, but it is still cached"
            if not adapter.is_replaced and self._by_task.get(adapter.task_id) is not adapter:
                return f"{where} cannot be found by its id"
        return None
