import asyncio
import gc
import threading
import weakref

from gptmanager.callbacks.queue.wakeups import AsyncWakeups

TIMEOUT = 5.0


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


def test_a_closed_event_loop_is_not_kept_alive():
    async def wait():
        wakeups.waiter().wake()
        await asyncio.sleep(0)
        return weakref.ref(asyncio.get_running_loop())

    wakeups = AsyncWakeups()
    loop = asyncio.run(wait())
    gc.collect()

    assert loop() is None
