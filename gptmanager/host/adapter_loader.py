"""`AdapterLoader`: reads, writes and copies adapters for a loop, on its own threads.

The loader makes no decisions. Its work must not delay the steps of the loop: see `BackgroundJobs`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from gptmanager.config import PeftCacheManagerConfig
from gptmanager.errors import AdapterError, ManagerDeadError, RequestError, response_text
from gptmanager.host.background_jobs import BackgroundJobs
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.peft_cache.work import (
    AdapterDone,
    AdapterWork,
    CopyAdapter,
    DropAdapter,
    FreeHostPages,
    ReadAdapter,
    WriteAdapter,
)

_NICE = 10
_LOOK_UP_S = 0.05  # interval at which a waiting thread checks that the manager still runs


def _step_back() -> None:
    """Make torch use only the calling thread for its work, and lower the thread's priority."""
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):  # on systems without thread priorities
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class AdapterLoader:
    """Does adapter work for a loop. `wake` ends the pause of an idle loop.

    `done` has the jobs that have ended, and `forgotten` the task ids of adapters that were
    replaced. Any thread may append to these queues, and the next intake empties them.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.done: deque[AdapterDone] = deque()
        self.forgotten: deque[int] = deque()
        self.jobs = BackgroundJobs()
        self._wake = wake
        self._mark: Callable[[], threading.Event | None] = lambda: None
        self._pool: AdapterPool | None = None
        self._config = PeftCacheManagerConfig()
        self._putting: ThreadPoolExecutor | None = None  # started with the first adapter
        self._ensuring: ThreadPoolExecutor | None = None
        self._streams: deque[Any] = deque()  # streams that no thread uses now
        self._streams_left = threading.Semaphore(0)
        self._read: dict[int, list[Tensor] | None] = {}  # weights by job, None until read
        self._lock = threading.Lock()  # guards `_read`

    def attach(
        self,
        pool: AdapterPool | None,
        config: PeftCacheManagerConfig,
        mark: Callable[[], threading.Event | None] = lambda: None,
        *,
        loop_helps: bool = False,
    ) -> None:
        """Connect to the loop; called once, before it iterates.

        `mark()` returns an event that is set when all launched steps have run, or None if they have
        run already. If `loop_helps`, and the pages are in CPU memory, the loop's thread may do
        pieces of jobs between steps.
        """
        self._pool, self._config, self._mark = pool, config, mark
        # the loop's thread does no copies that wait for a device
        is_cpu = pool is not None and pool.pages.device.type == "cpu"
        self.jobs.loop_helps = loop_helps and is_cpu

    def forget(self, task_id: int) -> None:
        """Report in the next intake that a task's adapter was replaced. Any thread may call it."""
        self.forgotten.append(task_id)

    def release(self) -> None:
        """Drop work that has not started, and end the rest soon.

        The loop must not iterate any more.
        """
        self.jobs.is_released = True
        self._wake, self._mark = lambda: None, lambda: None
        for threads in (self._putting, self._ensuring):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)
        self._putting = self._ensuring = self._pool = None
        with self._lock:
            self._read.clear()

    def begin(self, work: AdapterWork) -> None:
        """Start a piece of work; see `Host.load`."""
        pool = self._pool
        if pool is None:
            return
        try:
            self._begin(work, pool)
        except Exception as error:  # for example if no thread can be started
            if not isinstance(work, (DropAdapter, FreeHostPages)):
                self.done.append(AdapterDone(work.job, "", _request_error(work, error)))

    def _begin(self, work: AdapterWork, pool: AdapterPool) -> None:
        if self._putting is None or self._ensuring is None:
            self._putting, self._ensuring = self._start_threads(pool)
        if isinstance(work, ReadAdapter):
            with self._lock:
                self._read[work.job] = None
            self._putting.submit(self._do, self._read_adapter, work, pool)
        elif isinstance(work, WriteAdapter):
            self._putting.submit(self._do, self._write_adapter, work, pool)
        elif isinstance(work, CopyAdapter):
            self._ensuring.submit(self._do, self._copy_adapter, work, pool, self._mark())
        elif isinstance(work, DropAdapter):
            with self._lock:
                self._read.pop(work.source, None)
        elif isinstance(work, FreeHostPages):
            pool.release(work.host_pages)

    def _start_threads(self, pool: AdapterPool) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        config, device = self._config, pool.pages.device
        for _ in range(config.num_copy_streams):
            is_cuda = device.type == "cuda"
            stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
            self._streams.append(stream)
            self._streams_left.release()
        names = "gptmanager-put", "gptmanager-ensure"
        numbers = config.num_put_workers, config.num_ensure_workers
        putting, ensuring = (
            ThreadPoolExecutor(number, name, initializer=_step_back)
            for name, number in zip(names, numbers, strict=True)
        )
        return putting, ensuring

    def _do(self, function: Callable[..., str], work: Any, *arguments: Any) -> None:
        digest, failure = "", None
        try:
            digest = function(work, *arguments)
        except BaseException as error:  # noqa: B036 - a host's tensor may raise, or memory run out
            failure = _request_error(work, error)
        self.done.append(AdapterDone(work.job, digest, failure))
        with suppress(ManagerDeadError):
            self._wake()

    def _read_adapter(self, work: ReadAdapter, pool: AdapterPool) -> str:
        pool.warm_up()  # compiles the LoRA kernels, once per machine
        tensors = work.tensors
        adapter = self.jobs.finish(tensors.read_in_pieces(), by_loop=tensors.is_plain)
        weights = pool.kept(adapter)
        with self._lock:
            if work.job in self._read:  # otherwise the job was dropped
                self._read[work.job] = weights
        return adapter.digest

    def _write_adapter(self, work: WriteAdapter, pool: AdapterPool) -> str:
        with self._lock:
            weights = self._read.pop(work.source)
        assert weights is not None  # the loop has the digest, so the adapter was read
        self.jobs.finish(pool.put_in_pieces(work.host_pages, work.rows, work.packing, weights))
        return ""

    def _copy_adapter(
        self, work: CopyAdapter, pool: AdapterPool, begun: threading.Event | None
    ) -> str:
        """Wait for `begun`, then copy an adapter to the device.

        `begun` is set when no launched step reads the pages any more. If no launched step reads
        the pages at the call, `begun` is None.
        """
        while begun is not None and not begun.wait(_LOOK_UP_S):
            self.jobs.check()
        self._streams_left.acquire()
        stream = self._streams.popleft()
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self.jobs.finish(pool.copy_in_pieces(work.copies))
                pool.place(work.slot, work.rows, work.packing, work.device_pages)
            if stream is not None:
                stream.synchronize()  # later steps must see the copied pages
        finally:
            self._streams.append(stream)
            self._streams_left.release()
        return ""


def _request_error(work: AdapterWork, error: BaseException) -> BaseException:
    """Return the error for a request after work on its adapter has failed."""
    if not isinstance(work, ReadAdapter) or isinstance(error, RequestError):
        return error
    return AdapterError(f"lora_task_id {work.task_id} could not be read: {response_text(error)}")
