"""`Adapters`: the LoRA adapters of the active requests, from their arrival to the device.

`Adapters` decides which requests wait for an adapter, and which adapters get device pages. Reads
and copies of adapters run elsewhere, as `AdapterWork`. `peft_cache` counts the pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gptmanager.errors import AdapterError, response_text
from gptmanager.loop.active_request import FOR_ADAPTER, ActiveRequest
from gptmanager.peft_cache.layout import AdapterRow, CacheSizes
from gptmanager.peft_cache.manager import PeftCacheManager, Put
from gptmanager.peft_cache.page_eviction import CachedAdapter
from gptmanager.peft_cache.work import (
    AdapterDone,
    AdapterWork,
    CopyAdapter,
    DropAdapter,
    FreeHostPages,
    ReadAdapter,
    WriteAdapter,
)
from gptmanager.request.llm_request import LlmRequest
from gptmanager.step import Failure


def no_adapters() -> Adapters:
    """Return `Adapters` for a loop without LoRA."""
    return Adapters(PeftCacheManager(CacheSizes(0, 0, 0, 0, 0)), lambda work: None, patience=0)


@dataclass(slots=True)
class Read:
    """An adapter that was sent with a request and is not cached; `digest` is "" until it is read.

    `brought_by` is the id of the request that sent the adapter. `wanted_by` has the ids of the
    active requests that use it: the sender, and later requests with the same task id. If
    `is_forgotten`, no new request may use the adapter.
    """

    task_id: int
    brought_by: int
    rows: tuple[AdapterRow, ...]
    digest: str = ""
    is_forgotten: bool = False
    wanted_by: list[int] = field(default_factory=list)


class Adapters:
    """The requests that have an adapter, and the requests that wait for one.

    `load` starts work on an adapter; `take_in` applies the results.

    Started requests keep their device pages. The others get pages in the order of the active
    requests. If an adapter needs more pages than are free, later requests may overtake its request,
    at most `patience` times. `waiting` has the ids of the requests that wait in PREPARING.
    """

    def __init__(
        self, cache: PeftCacheManager, load: Callable[[AdapterWork], None], patience: int
    ) -> None:
        self.cache = cache
        self.waiting: set[int] = set()
        self.requests: dict[int, ActiveRequest] = {}
        self.reads: dict[int, Read] = {}  # by job, in order of arrival
        self.moves: dict[int, CachedAdapter] = {}  # copies to the host or the device, by job
        self.counts = cache.counts()  # at the last call of `count`
        self.unknown: list[int] = []  # requests with ids of unknown adapters
        self.num_jobs = 0  # started so far
        self.has_changed = False  # since the last assignment of pages
        self._forgotten: deque[int] = deque()  # task ids, noted but not applied yet
        self._done: deque[AdapterDone] = deque()
        self._failures: list[Failure] = []  # not returned yet
        self.passed_over = -1  # the first request for which too few pages are free
        self.num_overtaken = 0  # how often a later request has overtaken it
        self._load = load
        self._patience = patience

    # Input ---------------------------------------------------------------------------------

    def note(self, forgotten: Iterable[int], done: Iterable[AdapterDone]) -> None:
        """Note ids of forgotten tasks, and ended adapter work, which `take_in` applies."""
        self._forgotten.extend(forgotten)
        self._done.extend(done)
        self.has_changed = True

    def take_in(self) -> list[Failure]:
        """Apply noted changes before requests are added; return failures that end requests."""
        while self._forgotten:
            self.forget(self._forgotten.popleft())
        while self._done:
            self._end_job(self._done.popleft())
        return self._take_failures()

    def forget(self, task_id: int) -> None:
        """Require new requests with this id to send weights. Earlier requests keep the adapter."""
        self.cache.forget(task_id)
        for read in self.reads.values():
            read.is_forgotten |= read.task_id == task_id

    def add(self, request: ActiveRequest) -> None:
        """Add an admitted request. Do nothing for a request without an adapter."""
        task_id, tensors = request.lora_task_id, request.adapter_tensors
        if task_id is None:
            return
        request_id = request.request_id
        self.requests[request_id] = request
        self.waiting.add(request_id)
        self.has_changed = True
        if tensors is None:
            if not self._follow(request_id, task_id):
                self.unknown.append(request_id)  # another new request may send the weights
            return
        request.adapter_tensors = None
        rows = tuple(AdapterRow(*row) for row in tensors.row_sizes())
        job = self._next_job()
        self.reads[job] = Read(task_id, request_id, rows, wanted_by=[request_id])
        self._load(ReadAdapter(job, task_id, tensors))

    def settle(self, active: Iterable[ActiveRequest]) -> list[Failure]:
        """Assign pages after requests were added; return failures that end requests."""
        while self.unknown:
            self._follow_or_fail(self.unknown.pop(0))
        for job in self._next_reads():
            self._put(job)
        failed = {failure.request_id for failure in self._failures}
        self._give_pages([r for r in active if r.request_id not in failed])
        freed = self.cache.take_freed()
        if freed:
            self._load(FreeHostPages(freed))
        self.count()
        self.has_changed = False
        return self._take_failures()

    def _take_failures(self) -> list[Failure]:
        failures, self._failures = self._failures, []
        return failures

    def count(self) -> None:
        """Update `counts` for the statistics. This is slow, so it is done only after changes."""
        self.counts = self.cache.counts()

    # Changes of requests -------------------------------------------------------------------

    def pause(self, request: LlmRequest) -> None:
        """Pause a running request. It needs its adapter on the device again before it continues."""
        active = self.requests.get(request.request_id)
        if active is not None:
            self._take_pages(active)
            self.has_changed = True

    def release(self, request_id: int) -> None:
        """Remove a request that has ended. Do nothing for a request without an adapter."""
        if self.requests.pop(request_id, None) is None:
            return
        self.has_changed = True
        self.waiting.discard(request_id)
        self.cache.release(request_id)
        for job, read in list(self.reads.items()):
            if request_id in read.wanted_by:
                read.wanted_by.remove(request_id)
                if not read.wanted_by:
                    self._drop(job)

    # From the request to host pages --------------------------------------------------------

    def _next_job(self) -> int:
        self.num_jobs += 1
        return self.num_jobs

    def _follow(self, request_id: int, task_id: int) -> bool:
        """Let the request use an adapter that is cached or being read; return False if none is."""
        if task_id in self.cache:
            self.cache.use(request_id, task_id)
            self._attach(request_id)
            return True
        for read in reversed(self.reads.values()):
            if read.task_id == task_id and not read.is_forgotten:
                read.wanted_by.append(request_id)
                return True
        return False

    def _follow_or_fail(self, *request_ids: int) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.lora_task_id is None:
                continue  # the request has ended
            if not self._follow(request_id, request.lora_task_id):
                try:
                    self.cache.use(request_id, request.lora_task_id)
                except AdapterError as error:
                    self._failures.append(Failure(request_id, error))

    def _attach(self, request_id: int) -> None:
        self.requests[request_id].adapter_digest = self.cache.adapter_of(request_id).digest

    def _drop(self, job: int) -> Read:
        """Drop a job that is not needed any more, and return its read."""
        self._load(DropAdapter(job))
        return self.reads.pop(job)

    def _end_job(self, done: AdapterDone) -> None:
        read = self.reads.get(done.job)
        if read is not None and done.error is None:
            read.digest = done.digest
        elif read is not None:
            self._fail(done.job, done.error or AdapterError())
        elif done.job in self.moves:
            self._end_move(done, self.moves.pop(done.job))

    def _fail(self, job: int, error: BaseException) -> None:
        """Drop a job that failed, and end the request that sent its adapter.

        Other requests that wait for the failed adapter use another adapter with its task id.
        Without another adapter, or if the failed one was forgotten, these requests end as well.
        """
        read = self._drop(job)
        if read.brought_by in read.wanted_by:
            read.wanted_by.remove(read.brought_by)
            self._failures.append(Failure(read.brought_by, error))
        if not read.is_forgotten:
            self._follow_or_fail(*read.wanted_by)
            return
        # A later adapter with this task id may not be the adapter that these requests want.
        text = f"lora_task_id {read.task_id} was forgotten, and had not been cached: "
        gone = AdapterError(text + response_text(error))
        self._failures += [Failure(request_id, gone) for request_id in read.wanted_by]

    def _end_move(self, done: AdapterDone, adapter: CachedAdapter) -> None:
        if done.error is not None:
            text = f"lora_task_id {adapter.task_id} could not be loaded: "
            error = AdapterError(text + response_text(done.error))
            self._failures += [Failure(it, error) for it in sorted(adapter.requests)]
            if not adapter.is_replaced:
                self.cache.forget(adapter.task_id)
        if adapter.is_loading:
            self.cache.loaded(adapter)
        else:
            self.cache.copied(adapter)

    def _next_reads(self) -> Iterator[int]:
        """Yield the finished read jobs. Jobs of one task are yielded in order of arrival."""
        unread: set[int] = set()
        for job, read in list(self.reads.items()):
            if read.task_id not in unread and read.digest:
                yield job
            if job in self.reads:
                unread.add(read.task_id)

    def _put(self, job: int) -> None:
        """Start to write an adapter to host pages if enough host pages are free."""
        read = self.reads[job]
        first, *others = read.wanted_by
        try:
            answer = self.cache.put(first, read.task_id, read.digest, read.rows)
        except AdapterError as error:
            self._fail(job, error)
            return
        if answer is Put.WAIT:
            return
        self._attach(first)
        for request_id in others:
            self.cache.use(request_id, read.task_id)
            self._attach(request_id)
        if read.is_forgotten:
            self.cache.forget(read.task_id)
        if answer is Put.KNOWN:
            self._drop(job)
            return
        del self.reads[job]
        adapter = self.cache.adapter_of(first)
        pages, write = self.cache.host_pages(adapter), self._next_job()
        self.moves[write] = adapter
        freed = self.cache.take_freed()
        if freed:
            self._load(FreeHostPages(freed))
        self._load(WriteAdapter(write, job, pages, adapter.rows, adapter.packing))

    # From host pages to device pages -------------------------------------------------------

    def _give_pages(self, active: Iterable[ActiveRequest]) -> None:
        with_adapter = [(r, a) for r in active if (a := self.cache.find(r.request_id)) is not None]
        free, claimed = self.cache.get_max_device_pages(), set()
        for request, adapter in with_adapter:
            if request.slot >= 0 and adapter not in claimed:
                claimed.add(adapter)
                free -= adapter.num_pages
        passed_over, chosen = -1, []
        for request, adapter in with_adapter:
            if request.slot >= 0 or adapter.is_loading:
                continue
            fits = adapter in claimed or adapter.num_pages <= free
            if not fits and passed_over < 0:
                passed_over = request.request_id
            if 0 <= passed_over == self.passed_over and self.num_overtaken >= self._patience:
                fits = False
            if not fits:
                if request.request_id in adapter.running:
                    self._take_pages(request)
                continue
            chosen.append((request, adapter, passed_over >= 0))
            if adapter not in claimed:
                claimed.add(adapter)
                free -= adapter.num_pages
        if passed_over != self.passed_over:
            self.passed_over, self.num_overtaken = passed_over, 0
        for request, adapter, overtakes in chosen:
            self.num_overtaken += self._ensure(request, adapter) and overtakes

    def _take_pages(self, request: ActiveRequest) -> None:
        """Let a paused or not started request give up its device pages, and make it wait."""
        request_id = request.request_id
        self.cache.pause(request_id)
        self.waiting.add(request_id)
        request.adapter_slot = -1
        request.wait_for(FOR_ADAPTER)

    def _ensure(self, request: ActiveRequest, adapter: CachedAdapter) -> bool:
        """Reserve device pages; start a copy if needed. Return whether this call reserved pages."""
        request_id = request.request_id
        is_new = request_id not in adapter.running
        copies = self.cache.ensure(request_id)
        if copies is None:
            return False  # other adapters still use pages, for example for a copy
        pages = self.cache.device_pages(adapter)
        assert pages is not None  # assigned by `ensure`
        if copies:
            job = self._next_job()
            self.moves[job] = adapter
            parts = adapter.rows, adapter.packing, pages
            self._load(CopyAdapter(job, pages[0], copies, *parts))
        if not adapter.is_copying and request_id in self.waiting:
            self.waiting.discard(request_id)
            request.adapter_slot = pages[0]
            request.clear_wait(FOR_ADAPTER)
        return is_new

    # Questions -----------------------------------------------------------------------------

    def require_known(self, request: ActiveRequest) -> None:
        """Raise AdapterError if a new request sends no weights, and its adapter is unknown."""
        task_id = request.lora_task_id
        if task_id is None or request.adapter_tensors is not None:
            return
        if not any(r.task_id == task_id and not r.is_forgotten for r in self.reads.values()):
            self.cache.determine_num_pages(task_id)

    def why_waiting(self, request: ActiveRequest) -> str:
        """Return why a request in `waiting` waits, to complete the sentence "request 7 waits"."""
        name, cache = f"its adapter {request.lora_task_id}", self.cache
        adapter = cache.find(request.request_id)
        if adapter is None:
            wanted = [r for r in self.reads.values() if request.request_id in r.wanted_by]
            if wanted and wanted[0].digest:
                return f"for host pages of {name}: all are in use"
            return f"until {name} is read"
        if adapter.is_loading or adapter.is_copying:
            return f"until {name} is {'on the host' if adapter.is_loading else 'on the device'}"
        counts = cache.counts()
        return (
            f"for {adapter.num_pages} adapter pages of {name}: {counts.device_free_pages} of "
            f"{counts.device_total_pages} are free, and running requests and requests ahead of it "
            "come first"
        )

    def lacks_pages(self, request_id: int) -> bool:
        """Return whether the adapter of a request is on the host, and only lacks device pages."""
        adapter = self.cache.find(request_id)
        is_there = adapter is not None and not (adapter.is_loading or adapter.is_copying)
        return request_id in self.waiting and is_there

    def problem(self) -> str | None:
        """Check all counts. Return the first inconsistency, or None."""
        for request_id, request in self.requests.items():
            adapter, where = self.cache.find(request_id), f"request {request_id}"
            waits = request_id in self.waiting
            if waits != bool(request.awaited & FOR_ADAPTER):
                return f"{where}: `waiting` and `awaited` disagree on its adapter"
            if waits and (request.slot >= 0 or request.adapter_slot >= 0):
                return f"{where} waits for its adapter, but has started or has an adapter slot"
            if waits:
                continue
            pages = None if adapter is None else self.cache.device_pages(adapter)
            if adapter is None or pages is None or request_id not in adapter.running:
                return f"{where} may run, but its adapter is not on the device"
            if request.adapter_slot != pages[0] or request.adapter_digest != adapter.digest:
                return f"{where} has the slot or digest of another adapter"
        for adapter in self.cache.adapters:
            for request_id in adapter.requests:
                if request_id not in self.requests:
                    return (
                        f"adapter {adapter.task_id} is kept for request {request_id}, which ended"
                    )
        return self.cache.audit().problem
