import asyncio
import concurrent.futures
import threading

import pytest
from responding import ending, in_thread, streamed, whole

from gptmanager import FinishReason, InferenceRequest
from gptmanager.callbacks.queue.generation import Generation
from gptmanager.callbacks.queue.wakeups import AsyncWakeups
from gptmanager.errors import CapacityError

TIMEOUT = 30.0


class Cancellations:
    def __init__(self):
        self.ids = []
        self.arrived = threading.Event()

    def __call__(self, generation):
        self.ids.append(generation.request_id)
        self.arrived.set()
        return True


@pytest.fixture
def cancellations():
    return Cancellations()


def make(cancellations, is_streaming=True, wakeups=None):
    request = InferenceRequest.from_tokens(4, [1, 2], 5, is_streaming=is_streaming)
    return Generation(request, cancellations, wakeups or AsyncWakeups())


def answer(generation, *parts):
    """Stream `parts`, then end; each part waits for nobody."""
    for part in parts:
        generation.deliver(streamed(part), False, "")
    generation.deliver([*streamed([]), *ending(FinishReason.END_ID)], True, "")


async def collect(generation):
    return [token async for token in generation]


def test_the_result_comes_with_the_final_response(cancellations):
    # Given a request that does not stream, and a thread that waits for its result
    generation = make(cancellations, is_streaming=False)
    waiting = in_thread(generation.result, TIMEOUT)

    # When the final response comes
    generation.deliver(whole([1, 2, 9, 8]), True, "")

    # Then the thread has it, and so has everybody who asks later
    assert waiting.result(TIMEOUT).generated_ids == ((9, 8),)
    assert generation.result(0) is waiting.result(0)
    assert list(generation) == [9, 8]
    assert not generation.cancelled()


def test_tokens_are_yielded_as_they_come(cancellations):
    generation = make(cancellations)
    tokens = generation.tokens(TIMEOUT)

    generation.deliver(streamed([9]), False, "")
    assert next(tokens) == 9
    generation.deliver(streamed([8, 7]), False, "")
    assert (next(tokens), next(tokens)) == (8, 7)
    assert not generation.done()
    assert repr(generation) == f"Generation({generation.request_id}, 3 tokens so far)"

    waiting = in_thread(next, tokens, "end")
    generation.deliver([*streamed([]), *ending()], True, "")
    assert waiting.result(TIMEOUT) == "end"
    assert repr(generation) == f"Generation({generation.request_id}, done)"


def test_every_reader_sees_every_token(cancellations):
    generation = make(cancellations)
    readers = [in_thread(list, generation) for _ in range(4)]

    answer(generation, *([token] for token in range(50)))

    assert [reader.result(TIMEOUT) for reader in readers] == [list(range(50))] * 4
    assert list(generation) == list(range(50))


def test_no_token_in_time_is_a_timeout(cancellations):
    generation = make(cancellations)

    with pytest.raises(concurrent.futures.TimeoutError, match="request 4"):
        next(generation.tokens(timeout=0.01))


def test_news_of_other_kinds_do_not_begin_the_timeout_again(cancellations):
    generation, has_ended = make(cancellations), threading.Event()

    def notify():
        while not has_ended.wait(0.001):
            generation._news.notify_all()

    reader = in_thread(next, generation.tokens(timeout=0.05))
    notifier = in_thread(notify)
    with pytest.raises(concurrent.futures.TimeoutError, match="no new token in 0.05 s"):
        try:
            reader.result(TIMEOUT)
        finally:
            has_ended.set()
    notifier.result(TIMEOUT)


def test_an_error_is_raised_after_the_tokens_before_it(cancellations):
    generation = make(cancellations)
    generation.deliver(streamed([9]), False, "")
    generation.deliver([], True, "CapacityError: the cache is full")

    tokens = iter(generation)

    assert next(tokens) == 9
    with pytest.raises(CapacityError, match="^the cache is full$"):
        next(tokens)
    with pytest.raises(CapacityError):
        generation.result(0)
    assert isinstance(generation.exception(0), CapacityError)


def test_a_done_callback_may_read_the_tokens(cancellations):
    generation = make(cancellations)
    read = []
    generation.add_done_callback(lambda done: read.extend(done))

    answer(generation, [9], [8])

    assert read == [9, 8]


def test_it_is_a_future_among_others(cancellations):
    generations = [make(cancellations) for _ in range(3)]
    for generation in generations[:2]:
        answer(generation)

    done, pending = concurrent.futures.wait(generations, TIMEOUT, "FIRST_COMPLETED")

    assert (done, pending) == (set(generations[:2]), {generations[2]})


def test_leaving_its_block_early_cancels(cancellations):
    with make(cancellations) as generation:
        generation.deliver(streamed([9]), False, "")
        for _ in generation:
            break

    assert cancellations.ids == [4]


def test_leaving_its_block_at_the_end_cancels_nothing(cancellations):
    with make(cancellations) as generation:
        answer(generation, [9])
        assert list(generation) == [9]

    assert cancellations.ids == []


def test_async_iteration_in_several_event_loops(cancellations):
    # Given readers in event loops of different threads
    generation = make(cancellations)
    readers = [in_thread(asyncio.run, collect(generation)) for _ in range(3)]

    # When the tokens come from yet another thread
    answer(generation, *([token] for token in range(50)))

    # Then each has all of them
    assert [reader.result(TIMEOUT) for reader in readers] == [list(range(50))] * 3


def test_async_iteration_waits_for_each_token(cancellations):
    async def converse():
        generation = make(cancellations)
        tokens = aiter(generation)
        for token in (9, 8):
            waiting = asyncio.ensure_future(anext(tokens))
            await asyncio.sleep(0)
            assert not waiting.done()
            in_thread(generation.deliver, streamed([token]), False, "")
            assert await asyncio.wait_for(waiting, TIMEOUT) == token
        in_thread(generation.deliver, [*streamed([7]), *ending()], True, "")
        assert [token async for token in tokens] == [7]

    asyncio.run(converse())


def test_awaiting_gives_the_result_and_raises_the_error(cancellations):
    async def converse():
        good, bad = make(cancellations), make(cancellations)
        in_thread(answer, good, [9])
        in_thread(bad.deliver, [], True, "CapacityError: full")
        return await asyncio.wait_for(asyncio.gather(good, bad, return_exceptions=True), TIMEOUT)

    result, error = asyncio.run(converse())

    assert result.generated_ids == ((9,),)
    assert isinstance(error, CapacityError)


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_cancelling_the_task_that_waits_cancels_the_request(cancellations, how):
    async def converse():
        # Given a task that waits
        generation = make(cancellations)
        task = asyncio.ensure_future(collect(generation) if how == "iterate" else wait(generation))
        await asyncio.sleep(0.01)

        # When the task is cancelled
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        # Then so is the request; its last responses disturb nobody
        await asyncio.to_thread(cancellations.arrived.wait, TIMEOUT)
        answer(generation, [9])
        return generation.result(0)

    async def wait(generation):
        return await generation

    assert asyncio.run(converse()).generated_ids == ((9,),)
    assert cancellations.ids == [4]


def test_a_shielded_generation_survives_its_reader(cancellations):
    async def converse():
        generation = make(cancellations)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(generation), 0.01)
        assert cancellations.ids == []
        answer(generation, [9])
        return await generation

    assert asyncio.run(converse()).generated_ids == ((9,),)


@pytest.mark.parametrize("end", ["final", "error", "fail"])
def test_tokens_wait_for_a_long_step_but_never_after_the_end(cancellations, end):
    wakeups = AsyncWakeups()
    wakeups.begin_step(True)
    generation = make(cancellations, wakeups=wakeups)

    async def read():
        seen = []

        async def collect_tokens():
            async for token in generation:
                seen.append(token)

        task = asyncio.ensure_future(collect_tokens())
        await asyncio.sleep(0)
        generation.deliver(streamed([9]), False, "")
        for _ in range(5):
            await asyncio.sleep(0)
        assert seen == []
        assert next(generation.tokens(TIMEOUT)) == 9  # a thread does not wait
        if end == "final":
            generation.deliver([*streamed([8]), *ending(FinishReason.END_ID)], True, "")
        elif end == "error":
            generation.deliver([], True, "boom")
        else:
            generation.fail(RuntimeError("boom"))
        await asyncio.wait([task], timeout=TIMEOUT)
        return seen, task.exception()

    seen, error = asyncio.run(read())
    assert seen == ([9, 8] if end == "final" else [9])
    assert (error is None) == (end == "final")
