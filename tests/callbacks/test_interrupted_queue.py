"""A signal at any moment of a call of a queue: others can still call it, and all handles end.

Its handler raises, as that of Ctrl-C does, or it calls the queue itself.
"""

import asyncio
import time
from concurrent.futures import TimeoutError
from contextlib import suppress
from itertools import count
from queue import Full
from threading import Event, Thread

import pytest
from fuzz import STRIDE
from interrupting import TIMEOUT_S, handled, in_a_thread, interrupted
from responding import ManagerStub, whole

from gptmanager.callbacks import AsyncRequestQueue, RequestQueue
from gptmanager.callbacks.queue.generation import ReadPosition
from gptmanager.errors import ManagerDeadError
from gptmanager.lifecycle.condition import Condition

CALLS = {
    "submit": lambda queue, runs, waits: queue.submit([5], 2, timeout=0.0),
    "expect": lambda queue, runs, waits: queue.expect([5], 2, request_id=77),
    "cancel": lambda queue, runs, waits: runs.cancel(),
    "cancel a pending one": lambda queue, runs, waits: waits.cancel(),
    "close": lambda queue, runs, waits: queue.close(),
    "result": lambda queue, runs, waits: runs.result(0.0001),
    "tokens": lambda queue, runs, waits: next(runs.tokens(0.0001)),
    "next_part": lambda queue, runs, waits: runs.next_part(ReadPosition()),
}


def answer_all(queue):
    """Act as the loop of a manager: return the ids that it has fetched."""
    fetched = [request.request_id for request in queue.get_inference_requests(-1)]
    for request_id in (1, *fetched):
        queue.send_response(request_id, whole([5, 7, 8]), True, "")
    return fetched


def new_queue():
    """A queue with a running and a pending request, which has room for one more."""
    queue = RequestQueue(max_pending=2, max_pending_tokens=2)
    handles = queue.submit([5], 2), queue.submit([5], 2)
    queue.get_inference_requests(1)
    return queue, *handles


def calling(name, queue, runs, waits):
    def call():
        with suppress(TimeoutError, Full, ManagerDeadError):
            CALLS[name](queue, runs, waits)

    return call


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_a_queue_that_all_others_can_use(name):
    for point in count(step=STRIDE):
        # Given a running and a pending request, When an interrupt comes at this point of a call
        queue, *handles = new_queue()
        is_reached = in_a_thread(interrupted, calling(name, queue, *handles), point)

        # Then the loop can fetch and answer, others can submit, and `close` ends what is left
        in_a_thread(answer_all, queue)
        if name != "close":
            again = in_a_thread(lambda queue=queue: queue.submit([5, 6], 2, timeout=TIMEOUT_S))
            assert in_a_thread(answer_all, queue) == [again.request_id], point
            assert again.done()
        in_a_thread(queue.close)
        assert all(handle.done() for handle in handles), point
        assert queue.num_open == queue.num_pending == queue.num_pending_tokens == 0
        if not is_reached:
            break
    assert point > 5


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_may_close_the_queue_that_it_interrupts(name):
    for point in count():
        queue, *handles = new_queue()
        is_reached = in_a_thread(handled, calling(name, queue, *handles), point, queue.close)

        assert all(handle.done() for handle in handles) or not is_reached, point
        in_a_thread(queue.close)
        if not is_reached:
            break
    assert point > 5


def test_an_interrupted_submit_makes_room_for_all_waiting_submits(monkeypatch):
    """The interrupt comes when its request is queued, and others have found the queue full."""
    requests, wait_for = AsyncRequestQueue(max_pending_tokens=2), Condition.wait_for
    tried, loop = Event(), asyncio.new_event_loop()

    def wait_or_raise(self, predicate, timeout=None):
        if timeout != 7:
            return wait_for(self, lambda: predicate() or tried.set(), timeout)
        requests.get_inference_requests(-1)
        assert predicate()
        loop.run_until_complete(asyncio.sleep(0.001))  # the task tries
        tried.clear()
        waiting.append(Thread(target=requests.submit, args=([2], 5)))
        waiting[1].start()
        assert tried.wait(TIMEOUT_S)
        raise KeyboardInterrupt

    requests.submit([0, 0], 5)
    waiting = [loop.create_task(requests.submit_async([1], 5))]
    loop.run_until_complete(asyncio.sleep(0))
    monkeypatch.setattr(Condition, "wait_for", wait_or_raise)
    with pytest.raises(KeyboardInterrupt):
        requests.submit([3, 3], 5, timeout=7)
    task, thread = waiting
    thread.join(TIMEOUT_S)
    loop.run_until_complete(asyncio.wait_for(task, TIMEOUT_S))
    loop.close()
    assert not thread.is_alive() and requests.num_open == 3


def test_close_ends_all_handles_though_a_callback_raises():
    queue, *handles = new_queue()

    def cancel(handle):
        raise asyncio.CancelledError

    handles[0].add_done_callback(cancel)
    with pytest.raises(asyncio.CancelledError):
        queue.close()
    assert all(handle.done() for handle in handles) and queue.num_open == 0


def test_close_waits_for_the_callbacks_of_other_handles_though_one_raises():
    """The watcher of an ended manager calls them, while `close` ends another handle itself."""
    queue, first, second = new_queue()
    manager, is_entered, may_go, called = ManagerStub(), Event(), Event(), []

    def wait_for_close(handle):
        is_entered.set()
        may_go.wait(TIMEOUT_S)
        time.sleep(0.05)

    def cancel(handle):
        may_go.set()
        raise asyncio.CancelledError

    first.add_done_callback(wait_for_close)
    first.add_done_callback(called.append)
    second.add_done_callback(cancel)
    queue.attach(manager)
    manager.end()
    assert is_entered.wait(TIMEOUT_S)
    with pytest.raises(asyncio.CancelledError):
        queue.close()
    assert called == [first]


def test_a_handler_that_ends_a_request_wakes_the_task_that_it_interrupts():
    """It runs while the task reads, and the task would wait for ever without a wake-up."""

    async def read(point):
        queue, runs, _ = new_queue()
        position, waiter = ReadPosition(), runs.waiter()
        found = []

        def read_once():
            with suppress(ManagerDeadError):
                found.append(runs.next_part(position, waiter))

        is_reached = handled(read_once, point, queue.close)
        if found == [None] and is_reached:
            await asyncio.wait_for(waiter.wait(), TIMEOUT_S)
        queue.close()
        return is_reached

    points = count()
    while in_a_thread(asyncio.run, read(next(points))):
        pass
    assert next(points) > 5
