"""Whatever a host does between two lines of the manager: signals, forks, clocks that lie.

A signal handler is code between two lines of the thread that it interrupts, and a fork stops all
other threads between two of theirs: both are tried at every line. `GPTMANAGER_FUZZ` multiplies the
numbers of real signals and forks, at random moments.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
import warnings
from itertools import count

import pytest
from fuzz import FUZZ, STRIDE
from interrupting import in_a_thread
from loop_driver import expected_output
from shorthand import request, start

import gptmanager
from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams
from gptmanager.errors import ManagerDeadError
from gptmanager.lifecycle.state import ManagerState
from gptmanager.testing import RecordingCallbacks

PATH = os.path.dirname(gptmanager.__file__)
FILES = {
    os.path.join(PATH, *name)
    for name in (
        ("manager", "gpt_manager.py"),
        ("manager", "loop_questions.py"),
        ("manager", "inbox.py"),
        ("lifecycle", "latch.py"),
    )
}

CALLS = {
    "notify": lambda manager: manager.notify(),
    "wait_idle": lambda manager: manager.wait_idle(30),
    "audit": lambda manager: manager.audit(),
    "explain": lambda manager: manager.explain(1),
    "would_fit": lambda manager: manager.would_fit(request(1, [1], 2)),
    "clear_cached": lambda manager: manager.clear_cached(),
    "health": lambda manager: manager.health(),
    "state": lambda manager: manager.state,
    "exception": lambda manager: manager.exception,
    "wait": lambda manager: manager.wait(0.0005),
}


def with_a_handler(call, handler):
    """Call with `handler` run at each line of the manager's that the call comes to."""
    is_handling = False

    def trace(frame, event, argument):
        nonlocal is_handling
        if frame.f_code.co_filename not in FILES or is_handling:
            return None
        is_handling = True
        try:
            handler()
        finally:
            is_handling = False
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("handler", CALLS)
def test_a_handler_may_call_whatever_it_interrupts(handler):
    host = RecordingCallbacks()
    with start(host) as manager:
        for name, call in CALLS.items():
            handled = []

            def handle(handled=handled):
                handled.append(CALLS[handler](manager))

            in_a_thread(with_a_handler, lambda call=call: call(manager), handle)
            assert handled, name
        host.submit(request(1, [1], 3))
        assert manager.wait_idle(30)
        assert host.output(1) == [1, *expected_output([1], 3)]


@pytest.mark.parametrize("interrupted", CALLS)
def test_a_handler_may_shut_down_at_any_line(interrupted):
    for line in count():
        manager = start(RecordingCallbacks())
        lines = count()
        reached = []

        def shut_down(lines=lines, line=line, manager=manager, reached=reached):
            if next(lines) == line:
                reached.append(line)
                manager.shutdown()

        def call(manager=manager):
            CALLS[interrupted](manager)

        in_a_thread(with_a_handler, call, shut_down)
        manager.shutdown()
        assert manager.state is ManagerState.STOPPED
        if not reached:
            break
    assert line > 1


def in_the_fork(manager):
    """Every public method in a process that has no loop; a hang is ended by the alarm."""
    signal.setitimer(signal.ITIMER_REAL, 20)
    assert manager.state is ManagerState.STOPPED and manager.exception is None
    assert not manager.health().alive and not manager.health().accepting
    assert manager.wait() and manager.wait(0.01)
    for name in ("notify", "wait_idle", "audit", "explain", "would_fit", "clear_cached"):
        try:
            CALLS[name](manager)
        except ManagerDeadError as error:
            assert "runs in process" in str(error)
        else:
            raise AssertionError(name)
    with manager:
        pass
    manager.shutdown()
    manager.shutdown(drain=False, timeout=0.1)
    manager._at_exit()


def fork(manager):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            in_the_fork(manager)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.every(5)
@pytest.mark.parametrize("forked", ["notify", "wait_idle", "audit", "wait", "shutdown"])
def test_a_child_that_was_forked_at_any_line_does_not_hang(forked):
    call = {**CALLS, "shutdown": lambda manager: manager.shutdown()}[forked]
    manager, lines = start(RecordingCallbacks()), count()

    def fork_at_a_line():
        if next(lines) % STRIDE == 0 and manager.state is ManagerState.RUNNING:
            done = threading.Thread(target=fork, args=(manager,))  # with this thread in mid-line
            done.start()
            done.join()

    in_a_thread(with_a_handler, lambda: call(manager), fork_at_a_line)
    manager.shutdown()


def test_real_signals_and_forks_at_random_moments():
    rng = random.Random(FUZZ)
    host = RecordingCallbacks()
    manager = start(host)
    is_over = threading.Event()
    names = list(CALLS)

    def call_everything():
        own = random.Random(threading.get_ident())
        while not is_over.is_set():
            CALLS[own.choice(names)](manager)

    threads = [threading.Thread(target=call_everything) for _ in range(3)]
    handled = count()

    def handle(number, frame):
        next(handled)
        CALLS[rng.choice(names)](manager)

    before = signal.signal(signal.SIGALRM, handle)
    for thread in threads:
        thread.start()
    try:
        for turn in range(200 * FUZZ):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
            CALLS[rng.choice(names)](manager)
            if turn % 40 == 0:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                fork(manager)
                signal.signal(signal.SIGALRM, handle)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_over.set()
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGALRM, before)
    assert next(handled)
    # the last handler ends it
    signal.signal(signal.SIGALRM, lambda number, frame: manager.shutdown())
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    try:
        while not manager.wait(0):
            try:
                manager.notify()
            except ManagerDeadError:
                pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert manager.state is ManagerState.STOPPED


def fails():
    raise OSError("no clock")


@pytest.mark.parametrize(
    "broken",
    [fails, lambda: math.nan, lambda: math.inf, lambda: -1e30, lambda: 0.0, lambda: None],
    ids=["raises", "nan", "inf", "past", "stands still", "none"],
)
def test_a_host_that_breaks_the_clocks_breaks_nothing_else(broken, monkeypatch, caplog):
    host = RecordingCallbacks()
    asked = request(1, [1], 5, is_streaming=True)
    asked.deadline_s = 60.0
    with start(host, callback_budget_s=0.05) as manager:
        for name in ("time", "monotonic", "perf_counter", "localtime"):
            monkeypatch.setattr(time, name, broken)
        for name in ("perf_counter_ns", "monotonic_ns", "time_ns", "thread_time_ns"):
            monkeypatch.setattr(time, name, broken)
        monkeypatch.setattr(time, "strftime", lambda *arguments: fails())
        # the warning of a refused request asks the clock of `logging`
        host.submit(asked, request(2, [], 5), request(3, [2], 4000))
        assert manager.wait_idle(20)
        assert manager.health().progressing and manager.audit().ok
        monkeypatch.undo()
    assert host.output(1) == expected_output([1], 5)
    assert "input_ids is empty" in host.final(2).error
    assert host.final(3).error == ""
    assert manager.state is ManagerState.STOPPED


def test_captured_steps_of_a_model_do_not_ask_the_clocks_of_a_host(monkeypatch):
    host = RecordingCallbacks()
    options = OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=256), max_batch_size=1)
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager("examples/tiny_llama", fused, optional_params=options, **host.keywords()) as it:
        host.manager = it
        for name in ("time", "monotonic", "perf_counter", "perf_counter_ns", "thread_time_ns"):
            monkeypatch.setattr(time, name, fails)
        host.submit(request(1, [5, 6], 8))
        assert it.wait_idle(60)
        monkeypatch.undo()
    assert host.final(1).error == ""


def test_a_question_that_waits_too_long_says_what_the_loop_does():
    host = RecordingCallbacks()
    gate = threading.Event()
    send = host.send_response

    def hanging(*response):
        gate.wait(20)
        send(*response)

    host.send_response = hanging
    with start(host) as manager:
        host.submit(request(1, [1], 1))
        while not manager._host.timers.send.running_s:
            time.sleep(0.001)
        for name, ask in (
            ("audit", lambda timeout: manager.audit(timeout=timeout)),
            ("explain", lambda timeout: manager.explain(1, timeout=timeout)),
            ("would_fit", lambda timeout: manager.would_fit(request(9, [1], 1), timeout=timeout)),
        ):
            with pytest.raises(TimeoutError) as caught:
                ask(0.01)
            assert f"{name}: no answer within timeout = 0.01 s" in str(caught.value)
            assert "is inside callback SendResponse, for" in str(caught.value)
            assert ", at wait (threading.py:" in str(caught.value)
        assert not manager._inbox._questions  # nobody runs them later
        gate.set()
        assert manager.audit(timeout=None).ok
    assert manager.audit(timeout=0).ok  # after the end at once
