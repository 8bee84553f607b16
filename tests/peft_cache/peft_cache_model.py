"""A plain model of a LoRA cache: a list of adapters, each with the time of its last use.

It counts pages and has no page numbers; `peft_cache_proof` follows what the pages hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gptmanager.errors import AdapterError
from gptmanager.peft_cache import AdapterRow, CacheSizes, Put


def pages_needed(rows: tuple[AdapterRow, ...], page_size: int) -> int:
    """The longest row first, into the first page where it leaves at least nothing."""
    room: list[int] = []
    for size in sorted((-(-row.num_elements // 8) * 8 for row in rows), reverse=True):
        if size > page_size:
            raise AdapterError("row")
        for page in range(len(room) + 1):
            if page == len(room):
                room.append(page_size)
            if room[page] >= size:
                room[page] -= size
                break
    return len(room)


@dataclass(eq=False)
class Plain:
    task: int
    content: str
    pages: int
    rows: tuple[AdapterRow, ...]
    used: int = 0
    on_device: bool = False
    loading: bool = True
    copying: bool = False
    replaced: bool = False
    requests: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)

    @property
    def in_use(self) -> bool:
        return self.loading or self.copying or len(self.requests) > 0


class PeftCacheModel:
    def __init__(self, sizes: CacheSizes) -> None:
        self.sizes = sizes
        self.all: list[Plain] = []
        self.now = 0
        self.hits = self.misses = self.copied = self.gone_host = self.gone_device = 0

    def of_task(self, task: int) -> Plain | None:
        return next((a for a in self.all if a.task == task and not a.replaced), None)

    def of_request(self, request: int) -> Plain | None:
        return next((a for a in self.all if request in a.requests), None)

    def touch(self, adapter: Plain) -> None:
        self.now += 1
        adapter.used = self.now

    def put(self, request: int, task: int, content: str, rows: tuple[AdapterRow, ...]) -> Put:
        known = self.of_task(task)
        if known:
            if known.content != content:
                raise AdapterError("differ")
            known.requests.add(request)
            self.touch(known)
            return Put.KNOWN
        if any(row.rank > self.sizes.max_adapter_size for row in rows):
            raise AdapterError("rank")
        pages = pages_needed(rows, self.sizes.page_size)
        if pages > min(self.sizes.num_host_pages, self.sizes.num_device_pages):
            raise AdapterError("large")
        going = self.oldest(pages, self.sizes.num_host_pages, self.all, [
            a for a in self.all if not a.in_use
        ])  # fmt: skip
        if going is None:
            return Put.WAIT
        for adapter in going:
            self.gone_host += 1
            self.gone_device += adapter.on_device
            self.all.remove(adapter)
        new = Plain(task, content, pages, rows, requests={request})
        self.all.append(new)
        self.touch(new)
        return Put.NEW

    def use(self, request: int, task: int) -> None:
        adapter = self.of_task(task)
        if adapter is None:
            raise AdapterError("not cached")
        adapter.requests.add(request)
        self.touch(adapter)

    def ensure(self, request: int, adapter: Plain) -> str:
        self.touch(adapter)
        if request in adapter.running:
            return "there"
        if adapter.loading:
            return "wait"
        if adapter.on_device:
            self.hits += 1
            adapter.running.add(request)
            return "there"
        there = [a for a in self.all if a.on_device]
        going = self.oldest(adapter.pages, self.sizes.num_device_pages, there, [
            a for a in there if not a.running and not a.copying
        ])  # fmt: skip
        if going is None:
            return "wait"
        for other in going:
            other.on_device = False
            self.gone_device += 1
        self.misses += 1
        adapter.on_device = adapter.copying = True
        adapter.running.add(request)
        return "copy"

    def forget(self, task: int) -> bool:
        adapter = self.of_task(task)
        if adapter is not None:
            adapter.replaced = True
            self.tidy()
        return adapter is not None

    def pause(self, request: int, adapter: Plain) -> None:
        adapter.running -= {request}
        self.touch(adapter)

    def release(self, request: int) -> None:
        adapter = self.of_request(request)
        if adapter is not None:
            self.pause(request, adapter)
            adapter.requests -= {request}
            self.tidy()

    def tidy(self) -> None:
        self.all = [a for a in self.all if a.in_use or not a.replaced]

    def needed(self, task: int) -> int | None:
        found = [a.pages for a in self.all if a.task == task]
        return sum(found) if found else None

    @staticmethod
    def oldest(
        pages: int, total: int, there: list[Plain], may_go: list[Plain]
    ) -> list[Plain] | None:
        """The fewest of the oldest that make room; None: all of them do not."""
        going: list[Plain] = []
        for adapter in [*sorted(may_go, key=lambda a: a.used), None]:
            if sum(a.pages for a in there if a not in going) + pages <= total:
                return going
            if adapter is not None:
                going.append(adapter)
        return None
