"""A `PeftCacheManager` and a plain model of it, kept side by side and proved after each operation.

It also follows what each page holds, as if the copies were made.
"""

from __future__ import annotations

import random
from collections import Counter

from peft_cache_model import PeftCacheModel, Plain

from gptmanager.errors import AdapterError
from gptmanager.peft_cache import AdapterRow, CachedAdapter, CacheSizes, PeftCacheManager, Put
from gptmanager.peft_cache.state import peft_cache_state, restore_peft_cache

PAGE_SIZE, MAX_RANK = 64, 8


class Divergence(AssertionError):
    """The cache does not do what its model does."""


def require(right: bool, *what: object) -> None:
    if not right:
        raise Divergence(*what)


def rows_of(content: str) -> tuple[AdapterRow, ...]:
    """The rows that a content has: now and then a row or a rank that cannot be."""
    chance = random.Random(content)
    rank = chance.choice([1, 2, 4, 8, 8, 8, 16] if chance.random() < 0.1 else [1, 2, 4, 8])
    highest = 70 if chance.random() < 0.03 else 64
    return tuple(
        AdapterRow(index // 2, index % 2, rank, chance.randint(1, highest))
        for index in range(chance.randint(1, 7))
    )


class PeftCacheProof:
    """`operations` counts what was done and proved, by kind."""

    def __init__(self, num_host_pages: int, num_device_pages: int) -> None:
        sizes = CacheSizes(PAGE_SIZE, num_host_pages, num_device_pages, 2, MAX_RANK)
        self.model = PeftCacheModel(sizes)
        self.cache = PeftCacheManager(sizes)
        self.operations: Counter[str] = Counter()
        self.on_host: dict[int, list[object]] = {}  # page -> what its elements hold
        self.on_device: dict[int, list[object]] = {}

    def put(self, request: int, task: int, content: str) -> None:
        rows = rows_of(content)
        if self.model.of_request(request):
            return
        try:
            expected: Put | None = self.model.put(request, task, content, rows)
        except AdapterError:
            expected = None
        try:
            done: Put | None = self.cache.put(request, task, content, rows)
        except AdapterError:
            done = None
        require(done is expected, "put", done, expected)
        self.proved(f"put {done.name.lower() if done else 'refused'}")

    def use(self, request: int, task: int) -> None:
        if self.model.of_request(request):
            return
        try:
            self.model.use(request, task)
            expected = True
        except AdapterError:
            expected = False
        try:
            self.cache.use(request, task)
            done = True
        except AdapterError:
            done = False
        require(done is expected, "use", done, expected)
        self.proved("use" if done else "use refused")

    def loaded(self, adapter: Plain) -> None:
        """The rows are written to the host pages."""
        real = self.real(adapter)
        pages = self.cache.host_pages(real)
        for page in pages:
            self.on_host[page] = [None] * PAGE_SIZE
        for index, (row, place) in enumerate(zip(real.rows, real.packing.places, strict=True)):
            held = self.on_host[pages[place.page]]
            require(place.offset % 8 == 0, "not aligned", place)
            for element in range(row.num_elements):
                held[place.offset + element] = (adapter, index, element)
        adapter.loading = False
        self.cache.loaded(real)
        self.model.tidy()
        self.proved("loaded")

    def ensure(self, request: int) -> None:
        adapter = self.model.of_request(request)
        if adapter is None:
            return
        expected = self.model.ensure(request, adapter)
        copies = self.cache.ensure(request)
        done = "wait" if copies is None else "copy" if copies else "there"
        require(done == expected, "ensure", done, expected)
        for source, destination, num_elements in copies or ():
            self.on_device[destination] = self.on_host[source][:num_elements]
            self.model.copied += 2 * num_elements
        if done != "wait":
            self.check_content(adapter)
        self.proved(f"ensure {done}")

    def check_content(self, adapter: Plain) -> None:
        """Each element of each row is on the device, where its place says."""
        real = self.real(adapter)
        pages = self.cache.device_pages(real)
        require(pages is not None, "not on the device", adapter)
        for index, (row, place) in enumerate(zip(real.rows, real.packing.places, strict=True)):
            held = self.on_device[(pages or ())[place.page]]
            row_there = held[place.offset : place.offset + row.num_elements]
            right = [(adapter, index, element) for element in range(row.num_elements)]
            require(row_there == right, "content of", adapter.task, index)

    def copied(self, adapter: Plain) -> None:
        self.cache.copied(self.real(adapter))
        adapter.copying = False
        self.model.tidy()
        self.proved("copied")

    def pause(self, request: int) -> None:
        adapter = self.model.of_request(request)
        if adapter is not None:
            self.model.pause(request, adapter)
            self.cache.pause(request)
            self.proved("pause")

    def release(self, request: int) -> None:
        self.model.release(request)
        self.cache.release(request)
        self.proved("release")

    def forget(self, task: int) -> None:
        expected, done = self.model.forget(task), self.cache.forget(task)
        require(expected is done, "forget", done)
        self.proved("forget")

    def take_freed(self) -> None:
        for page in self.cache.take_freed():
            require(self.on_host.pop(page, True) is not None, "freed twice", page)
        held = {page for a in self.cache._host.adapters for page in self.cache.host_pages(a)}
        require(self.on_host.keys() <= held, "pages are held by nobody", self.on_host.keys() - held)
        self.proved("take freed")

    def restore(self) -> None:
        """Go on with another cache, brought to the state of this one."""
        state = peft_cache_state(self.cache)
        self.cache = PeftCacheManager(self.cache.sizes)
        restore_peft_cache(self.cache, state)
        require(peft_cache_state(self.cache) == state, "restored otherwise")
        self.proved("restore")

    def real(self, adapter: Plain) -> CachedAdapter:
        """Both are in the order of their last use."""
        order = sorted(self.model.all, key=lambda a: a.used)
        return [*self.cache._host.adapters][order.index(adapter)]

    def proved(self, kind: str) -> None:
        """Compare everything."""
        self.operations[kind] += 1
        self.cache.check()
        model, counts, sizes = self.model, self.cache.counts(), self.cache.sizes
        on_host = sum(a.pages for a in model.all)
        on_device = sum(a.pages for a in model.all if a.on_device)
        expected = (
            sizes.num_host_pages, on_host, sizes.num_host_pages - on_host,
            sizes.num_device_pages, on_device, sizes.num_device_pages - on_device,
            model.hits, model.misses, model.gone_host, model.gone_device, model.copied,
        )  # fmt: skip
        require(counts == expected, kind, counts, expected)
        real = [
            (a.task_id, a.digest, a.requests, a.running, a.is_replaced, a in device)
            for device in [self.cache._device.adapters]
            for a in self.cache._host.adapters
        ]
        plain = [
            (a.task, a.content, a.requests, a.running, a.replaced, a.on_device)
            for a in sorted(model.all, key=lambda a: a.used)
        ]
        require(real == plain, kind, real, plain)
        for task in {a.task for a in model.all}:
            require(self.cache.determine_num_pages(task) == model.needed(task), "pages of", task)
