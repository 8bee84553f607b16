"""`AdapterPages`: the pages of one cache level, and the choice of adapters to evict from it.

Among the adapters that the caller permits to evict, the least recently used are evicted first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gptmanager.peft_cache.layout import AdapterRow, Packing


@dataclass(slots=True, eq=False)
class CachedAdapter:
    """An adapter in the cache. Other content under the same task id is another adapter.

    `requests` has the ids of the requests that use the adapter, and `running` the ids of the
    requests that need the adapter on the device. While `is_loading`, a job writes the adapter's
    rows to host pages. While `is_copying`, a job copies the rows to the device. If `is_replaced`,
    the adapter is not assigned to further requests.
    """

    task_id: int
    digest: str
    rows: tuple[AdapterRow, ...]
    packing: Packing
    requests: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    is_loading: bool = True
    is_copying: bool = False
    is_replaced: bool = False

    @property
    def num_pages(self) -> int:
        return len(self.packing.lengths)

    @property
    def stays_on_host(self) -> bool:
        """Whether a request needs the adapter, or a job reads or writes its host pages."""
        return bool(self.requests) or self.is_loading or self.is_copying

    @property
    def stays_on_device(self) -> bool:
        return bool(self.running) or self.is_copying


class AdapterPages:
    """The pages `0..total - 1` of one cache level. The lowest free numbers are handed out first.

    `free` is a heap of returned pages. Pages from `fresh` on have never been handed out. `adapters`
    has the pages of each adapter, the least recently used first.
    """

    __slots__ = ("adapters", "free", "fresh", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free: list[int] = []
        self.fresh = 0
        self.adapters: OrderedDict[CachedAdapter, tuple[int, ...]] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.free) + self.total - self.fresh

    def to_evict(
        self, num_pages: int, stays: Callable[[CachedAdapter], bool]
    ) -> list[CachedAdapter] | None:
        """Return the adapters to evict so that `num_pages` are free.

        `stays` returns whether an adapter must not be evicted. The result is None if evicting all
        other adapters does not free enough pages.
        """
        found, num_free = [], self.num_free
        for adapter, pages in self.adapters.items():
            if num_free >= num_pages:
                break
            if not stays(adapter):
                found.append(adapter)
                num_free += len(pages)
        return found if num_free >= num_pages else None

    def take(self, adapter: CachedAdapter) -> None:
        """Give pages to an adapter. Enough pages must be free."""
        num_again = min(adapter.num_pages, len(self.free))
        pages = [heapq.heappop(self.free) for _ in range(num_again)]
        num_new = adapter.num_pages - num_again
        self.adapters[adapter] = (*pages, *range(self.fresh, self.fresh + num_new))
        self.fresh += num_new

    def drop(self, adapter: CachedAdapter) -> tuple[int, ...]:
        """Free the adapter's pages and return them."""
        pages = self.adapters.pop(adapter)
        for page in pages:
            heapq.heappush(self.free, page)
        return pages

    def touch(self, adapter: CachedAdapter) -> None:
        """Mark the adapter as the most recently used one, if the adapter is on this level."""
        if adapter in self.adapters:
            self.adapters.move_to_end(adapter)

    def set(self, adapters: Mapping[CachedAdapter, tuple[int, ...]]) -> None:
        """Restore these adapters, in this order, with their pages. All other pages become free."""
        self.adapters = OrderedDict(adapters)
        taken = {page for pages in adapters.values() for page in pages}
        self.fresh = min(max(taken, default=-1) + 1, self.total)
        self.free = [page for page in range(self.fresh) if page not in taken]

    def owners(self) -> dict[int, int]:
        """Return the task id of the adapter in each used page."""
        return {page: adapter.task_id for adapter, pages in self.adapters.items() for page in pages}

    def problem(self) -> str | None:
        """Return the first contradiction, or None. Each page is free or belongs to one adapter."""
        if self.fresh > self.total:
            return f"page {self.fresh - 1} is not within 0..{self.total - 1}"
        holders: dict[int, int] = dict.fromkeys(range(self.fresh), 0)
        for adapter, pages in self.adapters.items():
            if len(pages) != adapter.num_pages:
                return f"adapter {adapter.task_id} has {len(pages)} pages, not {adapter.num_pages}"
            if problem := _count(holders, pages, f"adapter {adapter.task_id} has"):
                return problem
        if problem := _count(holders, self.free, "the free pages have"):
            return problem
        for page, count in holders.items():
            if not count:
                return f"page {page} is neither free nor an adapter's"
        return None


def _count(holders: dict[int, int], pages: Iterable[int], owner: str) -> str | None:
    for page in pages:
        if page not in holders:
            return f"{owner} page {page}, which was never handed out"
        if holders[page]:
            return f"{owner} page {page}, which also has another owner"
        holders[page] = 1
    return None
