"""`ForwardThread`: runs a stage's forward passes in order, in parallel with the loop's thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from gptmanager.executor.step_in_flight import StepInFlight
from gptmanager.kernels.simd.threads import compute_alone, end_threads_of_caller
from gptmanager.step import Schedule

Forward = Callable[[Schedule], StepInFlight]
_Queue = SimpleQueue[tuple[Schedule, Future[StepInFlight]] | threading.Event | None]


class ForwardThread:
    """A thread that calls `forward` for each schedule, in the order of `submit`.

    `forward` may wait for other ranks. The thread ends when this object is closed or
    garbage-collected. If a call hangs, the thread never ends, but it does not keep the process
    alive.
    """

    def __init__(self, forward: Forward) -> None:
        # the forward thread gets all cores, because the caller, the loop's thread, needs only one
        end_threads_of_caller()
        compute_alone()
        self._queue: _Queue = SimpleQueue()
        name, arguments = "gptmanager-forward", (self._queue, forward)
        self._thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, schedule: Schedule) -> Callable[[], StepInFlight]:
        """Enqueue a call of `forward`.

        Return a function that waits for the call, and returns the result of `forward` or raises
        the error that `forward` raised.
        """
        future: Future[StepInFlight] = Future()
        self._queue.put((schedule, future))
        return future.result

    def mark(self) -> threading.Event:
        """Return an event that is set when all calls submitted before this mark have ended."""
        mark = threading.Event()
        self._queue.put(mark)
        return mark

    def close(self, timeout_s: float) -> bool:
        """End the thread after all submitted calls.

        Return whether the thread has ended within `timeout_s`.
        """
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _run(queue: _Queue, forward: Forward) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        schedule, future = item
        try:
            future.set_result(forward(schedule))
        except BaseException as error:  # noqa: B036 - raised by the caller of `future.result`
            future.set_exception(error)
        del item, schedule, future
