"""`AsyncRequestQueue`: streams, whole results, awaited room, and tasks that go away."""

import asyncio
import gc
import queue
from contextlib import closing

import pytest
from responding import ending, streamed

from gptmanager import FinishReason, InferenceRequest
from gptmanager.callbacks import AsyncRequestQueue
from gptmanager.errors import CapacityError, ManagerDeadError, RequestError


def take(requests):
    """What a manager does in an iteration; the ids."""
    return [request.request_id for request in requests.get_inference_requests(-1)]


async def until(condition):
    """The event loop goes on until `condition()`; the test's own limit ends what never comes."""
    while not condition():
        await asyncio.sleep(0)


async def collect(stream, seen=None):
    seen = [] if seen is None else seen
    async for tokens in stream:
        seen.append(tokens)
    return seen


def test_a_stream_yields_what_came_since_the_last_look():
    """The end alone is not a list of no tokens."""
    requests = AsyncRequestQueue()

    async def main():
        task = asyncio.ensure_future(collect(requests.stream([1, 2], 5), seen := []))
        await until(lambda: requests.num_pending)
        assert take(requests) == [1]
        requests.send_response(1, streamed([5]), False, "")
        requests.send_response(1, streamed([6], 1), False, "")
        await until(lambda: not requests._wakeups.waiter()._mailbox._woken)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        requests.send_response(1, streamed([7], 2), False, "")
        await until(lambda: len(seen) == 2)
        requests.send_response(1, [*streamed([], 3), *ending()], True, "")
        return await task

    assert asyncio.run(main()) == [[5, 6], [7]]


def test_an_error_comes_after_the_tokens_before_it():
    requests = AsyncRequestQueue()

    async def main():
        task = asyncio.ensure_future(collect(requests.stream([1], 5), seen := []))
        await until(lambda: requests.num_pending)
        take(requests)
        requests.send_response(1, streamed([5]), False, "")
        requests.send_response(1, [], True, "RequestError: it broke")
        with pytest.raises(RequestError, match="it broke"):
            await task
        assert seen == [[5]]

    asyncio.run(main())


def test_generate_returns_the_result():
    requests = AsyncRequestQueue()

    async def main():
        task = asyncio.ensure_future(requests.generate([1], 5, is_streaming=True))
        await until(lambda: requests.num_pending)
        take(requests)
        requests.send_response(1, [*streamed([5, 6]), *ending()], True, "")
        return await task

    assert asyncio.run(main()).generated_ids == ((5, 6),)


@pytest.mark.parametrize("call", ["stream", "generate"])
def test_a_cancelled_task_stops_its_request(call):
    requests = AsyncRequestQueue()

    async def main():
        made = getattr(requests, call)([1], 5)
        task = asyncio.ensure_future(collect(made) if call == "stream" else made)
        await until(lambda: requests.num_pending)
        assert take(requests) == [1]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert requests.poll_stop_signal() == {1}
        requests.send_response(1, ending(FinishReason.CANCELLED), True, "")
        assert requests.num_open == 0

    asyncio.run(main())


def test_a_stream_that_is_left_early_stops_its_request():
    requests = AsyncRequestQueue()

    async def main():
        async def read():
            async for _ in requests.stream([1], 5):
                break

        task = asyncio.ensure_future(read())
        await until(lambda: requests.num_pending)
        take(requests)
        requests.send_response(1, streamed([5]), False, "")
        await task
        await until(requests.poll_stop_signal)

    asyncio.run(main())


def test_tasks_wait_for_room_in_their_order():
    requests = AsyncRequestQueue(max_pending=1)

    async def main():
        started = []

        async def submit(number):
            await requests.submit_async([number], 5)
            started.append(number)

        tasks = []
        for number in range(4):
            tasks.append(asyncio.ensure_future(submit(number)))
            await asyncio.sleep(0)
        await until(lambda: started)
        fetched = []
        while len(fetched) < 4:
            await until(lambda: requests.num_pending)
            assert requests.num_pending == 1
            fetched += [r.input_ids[0] for r in requests.get_inference_requests(-1)]
        await asyncio.gather(*tasks)
        assert fetched == [0, 1, 2, 3] == started

    asyncio.run(main())


def test_a_submit_that_gives_up_waiting_leaves_nothing_and_lets_the_next_one_in():
    requests = AsyncRequestQueue(max_pending=1)

    async def main():
        await requests.submit_async([0], 5)
        first = asyncio.ensure_future(requests.submit_async([1], 5))
        second = asyncio.ensure_future(requests.submit_async([2], 5))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        take(requests)
        assert (await second).request.input_ids.tolist() == [2]
        assert requests.num_open == 2

    asyncio.run(main())


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_task_whose_event_loop_was_closed_delays_no_other(is_woken):
    requests = AsyncRequestQueue(max_pending=1)

    async def leave():
        await requests.submit_async([0], 5)
        asyncio.ensure_future(requests.submit_async([1], 5))
        await asyncio.sleep(0)

    async def main():
        waiting = [asyncio.ensure_future(requests.submit_async([2], 5)) for _ in range(2)]
        await asyncio.sleep(0)
        take(requests)
        await until(lambda: requests.num_pending)
        take(requests)
        await asyncio.gather(*waiting)

    with closing(asyncio.new_event_loop()) as loop:
        loop.set_exception_handler(lambda loop, context: None)  # told that its task is destroyed
        loop.run_until_complete(leave())
        if is_woken:
            take(requests)
    asyncio.run(main())
    requests.send_response(1, [*streamed([7]), *ending()], True, "")
    gc.collect()
    assert requests.num_open == 2 and not requests._turns


def test_tasks_of_a_stopped_event_loop_delay_no_other_and_go_on_when_it_starts_again():
    requests = AsyncRequestQueue(max_pending=1)

    async def submit(number):
        return (await requests.submit_async([number], 5)).request_id

    async def leave():
        await submit(0)
        waiting.append(asyncio.ensure_future(submit(1)))
        await asyncio.sleep(0)

    async def main():
        later = asyncio.ensure_future(submit(2))
        await asyncio.sleep(0)
        for _ in range(3):
            found.extend(take(requests))
            await asyncio.sleep(0)
        return await later

    waiting, found = [], []
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(leave())
        assert asyncio.run(main()) == 3 and found == [1, 3]
        assert len(waiting[0].get_loop()._ready) <= 1  # however many iterations made room
        assert loop.run_until_complete(waiting[0]) == 2
    assert take(requests) == [2]
    assert not requests._turns and not requests._stopped


def test_a_cancelled_pending_request_makes_room():
    requests = AsyncRequestQueue(max_pending=1)

    async def main():
        first = await requests.submit_async([0], 5)
        second = asyncio.ensure_future(requests.submit_async([1], 5))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).request_id == 2

    asyncio.run(main())


def test_the_end_of_the_queue_wakes_all_waiting_submits():
    requests = AsyncRequestQueue(max_pending=1)

    async def main():
        await requests.submit_async([0], 5)
        waiting = [asyncio.ensure_future(requests.submit_async([1], 5)) for _ in range(3)]
        await asyncio.sleep(0)
        requests.close()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in found] == [ManagerDeadError] * 3

    asyncio.run(main())


def requests_of(*lengths):
    return [InferenceRequest.from_tokens(i, [1] * n, 5) for i, n in enumerate(lengths)]


def test_all_are_queued_or_none():
    requests = AsyncRequestQueue(max_pending=3, max_pending_tokens=10)
    assert len(requests.submit_all(requests_of(2, 2))) == 2

    more = [InferenceRequest.from_tokens(i, [1], 5) for i in (7, 8)]
    with pytest.raises(queue.Full, match="2 requests are pending, 2 more would exceed"):
        requests.submit_all(more)
    assert requests.num_open == 2

    take(requests)
    with pytest.raises(CapacityError, match="one call of 11 prompt tokens exceeds"):
        requests.submit_all(
            [InferenceRequest.from_tokens(i, [1] * n, 5) for i, n in ((7, 5), (8, 6))]
        )
    assert requests.num_open == 2
    assert len(requests.submit_all(more)) == 2
    assert requests.submit_all([]) == []


def test_one_wrong_request_queues_none():
    requests = AsyncRequestQueue()
    with pytest.raises(Exception, match="request_id = 0 is in use"):
        requests.submit_all([*requests_of(1, 1), InferenceRequest.from_tokens(0, [1], 5)])
    assert requests.num_open == 0 == requests.num_pending


def test_outside_of_asyncio_an_error_leaves_no_request_open():
    """Another event loop, such as trio's, runs the coroutine."""
    requests = AsyncRequestQueue()
    with pytest.raises(RuntimeError, match="no running event loop"):
        requests.submit_async([1], 5).send(None)
    assert requests.num_open == 0
