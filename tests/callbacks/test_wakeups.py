import asyncio
import gc
import threading
import weakref

from gptmanager.callbacks.queue.wakeups import AsyncWakeups

TIMEOUT = 30.0


def test_a_waiter_is_woken_from_another_thread():
    async def wait():
        waiter = AsyncWakeups().waiter()
        threading.Thread(target=waiter.wake).start()
        await asyncio.wait_for(waiter.wait(), TIMEOUT)

    asyncio.run(wait())


def test_a_wakeup_before_the_wait_is_not_lost_and_a_waiter_may_be_used_again():
    async def wait():
        waiter = AsyncWakeups().waiter()
        for _ in range(3):
            waiter.wake()
            await asyncio.wait_for(waiter.wait(), TIMEOUT)

    asyncio.run(wait())


def test_many_wakeups_share_one_call_into_the_event_loop():
    async def wait():
        # Given many waiters of one event loop
        wakeups = AsyncWakeups()
        waiters = [wakeups.waiter() for _ in range(100)]
        loop = asyncio.get_running_loop()
        calls = []
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), original(*args))

        # When all are woken while the event loop is busy
        for waiter in waiters:
            waiter.wake()

        # Then one call carries them all
        await asyncio.wait_for(asyncio.gather(*(w.wait() for w in waiters)), TIMEOUT)
        assert len(calls) == 1

    asyncio.run(wait())


def test_waking_a_closed_event_loop_does_nothing():
    async def wait():
        return wakeups.waiter()

    wakeups = AsyncWakeups()
    waiter = asyncio.run(wait())

    waiter.wake()
    waiter.wake()


def test_an_event_loop_that_is_closed_with_a_wakeup_in_it_is_freed_by_the_next_one():
    async def wait():
        return wakeups.waiter()

    wakeups = AsyncWakeups()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(wait()).wake()
    loop.close()
    wakeups.send()
    closed = weakref.ref(loop)
    del loop
    gc.collect()

    assert closed() is None


def test_a_closed_event_loop_is_not_kept_alive():
    async def wait():
        wakeups.waiter().wake()
        await asyncio.sleep(0)
        return weakref.ref(asyncio.get_running_loop())

    wakeups = AsyncWakeups()
    loop = asyncio.run(wait())
    gc.collect()

    assert loop() is None


def opened(*calls):
    """Run `calls(wakeups, waiter)` in turn; return after each whether the waiter was opened."""

    async def run():
        wakeups, results = AsyncWakeups(), []
        waiter = wakeups.waiter()
        for call in calls:
            waiter._is_woken = False
            call(wakeups, waiter)
            await asyncio.sleep(0)
            results.append(waiter._is_woken)
        return results

    return asyncio.run(run())


def token(wakeups, waiter):
    waiter.wake(may_wait=True)


def final(wakeups, waiter):
    waiter.wake()


def long_step(wakeups, waiter):
    wakeups.begin_step(True)


def short_step(wakeups, waiter):
    wakeups.begin_step(False)


def test_wakeups_for_tokens_of_a_long_step_wait_for_the_next_step():
    assert opened(token, long_step, token, token, long_step, long_step, token, short_step) == (
        [True, False, False, False, True, False, False, True]
    )


def test_after_a_short_step_no_wakeup_waits():
    assert opened(long_step, token, short_step, token, token, short_step) == (
        [False, False, True, True, True, False]
    )


def test_a_wakeup_for_a_final_response_never_waits():
    assert opened(long_step, token, final, token, final) == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_each_event_loop_is_woken_by_the_next_step():
    wakeups, ready, woken = AsyncWakeups(), threading.Barrier(3), []

    def run_loop():
        async def wait():
            waiter = wakeups.waiter()
            waiter.wake(may_wait=True)
            ready.wait(TIMEOUT)
            await asyncio.wait_for(waiter.wait(), TIMEOUT)
            woken.append(waiter)

        asyncio.run(wait())

    wakeups.begin_step(True)
    threads = [threading.Thread(target=run_loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(TIMEOUT)
    wakeups.begin_step(True)
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(woken) == 2


def test_a_step_after_an_event_loop_was_closed_does_nothing():
    async def post():
        wakeups.waiter().wake(may_wait=True)
        return asyncio.get_running_loop()

    wakeups = AsyncWakeups()
    wakeups.begin_step(True)
    closed = asyncio.run(post())
    wakeups.begin_step(False)
    assert closed.is_closed() and not wakeups._mailboxes[closed]._woken
