"""Ctrl-C at any moment of a wait, or of a start of a thread, harms no other thread."""

import asyncio
import gc
import sys
import threading
import time
import weakref
from concurrent.futures import TimeoutError
from contextlib import suppress
from itertools import count

import pytest
from interrupting import TIMEOUT_S, in_a_thread, interrupted
from shorthand import start

from gptmanager.lifecycle.condition import Condition
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.latched_future import LatchedFuture
from gptmanager.lifecycle.threads import start_thread
from gptmanager.manager import gpt_manager
from gptmanager.testing import RecordingCallbacks


def test_an_interrupted_wait_for_a_latch_hinders_no_setting():
    for point in count():
        latch = Latch()
        is_reached = in_a_thread(interrupted, lambda latch=latch: latch.wait(0.0001), point)
        in_a_thread(latch.set)
        assert in_a_thread(latch.wait, TIMEOUT_S)
        if not is_reached:
            break
    assert point > 1


def test_an_interrupted_wait_for_a_condition_hinders_no_notification():
    for point in count():
        condition, lock, news = Condition(), threading.Lock(), []

        def has_news(lock=lock, news=news):
            with lock:
                return news

        def wait(condition=condition, has_news=has_news):
            condition.wait_for(has_news, 0.0001)

        def change(condition=condition, lock=lock, news=news):
            with lock:
                news.append(1)
            condition.notify_all()

        is_reached = in_a_thread(interrupted, wait, point)
        in_a_thread(change)
        assert in_a_thread(condition.wait_for, has_news, TIMEOUT_S) == [1]
        if not is_reached:
            break
    assert point > 5


@pytest.mark.parametrize("name", ["result", "exception", "done", "set_result"])
def test_an_interrupted_call_of_a_future_hinders_no_other(name):
    for point in count():
        future = LatchedFuture()
        arguments = {"set_result": (7,), "done": ()}.get(name, (0.0001,))

        def call(future=future, arguments=arguments):
            with suppress(TimeoutError):
                getattr(future, name)(*arguments)

        is_reached = in_a_thread(interrupted, call, point)
        if not future.done():
            in_a_thread(future.set_result, 7)
        assert in_a_thread(future.result, TIMEOUT_S) == 7, point
        if not is_reached:
            break
    assert point > 0


@pytest.mark.parametrize("name", ["set_result", "set_exception"])
def test_an_interrupt_of_a_future_that_ends_loses_no_callback(name):
    called = []
    for point in count():
        future, own = LatchedFuture(), []
        for number in range(3):
            future.add_done_callback(lambda _, number=number, own=own: own.append(number))

        def end(future=future):
            getattr(future, name)(RuntimeError("7"))

        is_reached = in_a_thread(interrupted, end, point)
        if not future.done():
            end()
        called.append(own)
        if not is_reached:
            break
    # the interrupt of a callback may come before or after what it does
    assert all(own == sorted({*own}) and len(own) >= 2 for own in called), called
    assert sum(len(own) == 2 for own in called) == 3


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit, ValueError])
def test_a_callback_that_raises_anything_stops_no_other(error):
    future, called = LatchedFuture(), []

    def raise_it(future):
        called.append("raises")
        raise error

    for callback in (raise_it, called.append, raise_it, called.append):
        future.add_done_callback(callback)
    with suppress(error):
        future.set_result(7)
    assert called == ["raises", future, "raises", future]


def test_what_a_callback_raised_is_in_no_cycle():
    class Error(BaseException):
        pass

    def raise_it(future):
        raise Error

    gc.disable()
    try:
        future = LatchedFuture()
        future.add_done_callback(raise_it)
        try:
            future.set_result(7)
        except Error as error:
            raised = weakref.ref(error)
        assert raised() is None
    finally:
        gc.enable()


def test_a_future_wakes_its_readers_before_it_calls_back():
    """A callback may wait for a thread that reads the result."""
    future, found = LatchedFuture(), []
    future.add_done_callback(lambda future: found.append(in_a_thread(future.result, TIMEOUT_S)))
    future.set_result(7)
    assert found == [7] and future.done() and future.exception() is None
    with pytest.raises(TimeoutError):
        LatchedFuture().result(-1.0)


def test_a_thread_runs_even_if_an_interrupt_hits_the_one_that_starts_it():
    for point in count():
        ran = threading.Event()
        thread = threading.Thread(target=ran.set, daemon=True)
        is_reached = in_a_thread(interrupted, lambda thread=thread: start_thread(thread), point)
        if thread.ident is not None or not is_reached:
            assert ran.wait(TIMEOUT_S), point
        if not is_reached:
            break
    assert point > 3


def test_a_thread_that_cannot_start_raises_in_the_caller(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(threading.Thread())


# an interrupt may hit the garbage collection of an earlier manager, which ignores it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_of_a_constructor_ends_its_loop(monkeypatch):
    """From the start of the thread on: from there on another thread may wait for a lock."""

    def construct(point):
        points, is_reached = count(), []

        def profile(frame, event, argument):
            if event in ("call", "c_return") and next(points) == point:
                is_reached.append(point)
                sys.setprofile(None)
                raise KeyboardInterrupt

        def start_interrupted(thread):
            sys.setprofile(profile)
            start_thread(thread)

        monkeypatch.setattr(gpt_manager, "start_thread", start_interrupted)
        try:
            manager = start(RecordingCallbacks())
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        manager.shutdown()
        return bool(is_reached)

    for point in count():
        is_reached = in_a_thread(construct, point)
        give_up = time.monotonic() + TIMEOUT_S
        while any(it.name == "gptmanager-loop" for it in threading.enumerate()):
            assert time.monotonic() < give_up, point
            time.sleep(0.001)
        if not is_reached:
            break
    assert point > 10
