"""What hangs is named, and ends the manager if it is told to: in the model and in each callback.

`GPTMANAGER_FUZZ` multiplies the number of steps that return at the moment when they are given up.
"""

from __future__ import annotations

import json
import random
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
from fuzz import FUZZ
from loop_driver import next_token
from shorthand import params, request
from shorthand import start as start_manager

from gptmanager import GptManager, ModelType, SchedulerConfig
from gptmanager.errors import ConfigError, ManagerDeadError
from gptmanager.journal.segments import JournalFolder
from gptmanager.lifecycle import clock, watchdog
from gptmanager.lifecycle.state import Lifecycle, LoopAbandoned, ManagerState
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.scheduler import RequestScheduler
from gptmanager.statistics import StatisticsReport
from gptmanager.testing import RecordingCallbacks, ScriptedModel

BUDGET = {"step_budget_s": 0.05, "on_hang": "fail"}


class Gate:
    """What hangs, from the first time that it is armed until it is opened."""

    def __init__(self):
        self.is_armed = False
        self.reached, self._opened = threading.Event(), threading.Event()
        self._reached_ns = 0

    def __call__(self, *ignored):
        if self.is_armed:
            self._reached_ns = self._reached_ns or time.perf_counter_ns()
            self.reached.set()
            self._opened.wait(60)

    def now_ns(self):
        """A clock that goes while something hangs: no other step of a busy machine is slow."""
        return 1 + (time.perf_counter_ns() - self._reached_ns if self._reached_ns else 0)

    def open(self):
        self._opened.set()

    def shut(self):
        self._opened.clear()

    @property
    def opened(self):
        return self._opened.is_set()


class Host(RecordingCallbacks):
    """Counts its calls; `hangs_in` is the callback that comes to the gate."""

    def __init__(self, gate, hangs_in=""):
        super().__init__()
        self.gate, self.hangs_in = gate, hangs_in
        self.num_calls = Counter()

    def _count(self, name):
        self.num_calls[name] += 1
        if self.hangs_in == name:
            self.gate()

    def get_inference_requests(self, room):
        self._count("GetInferenceRequests")
        return super().get_inference_requests(room)

    def send_response(self, *response):
        self._count("SendResponse")
        super().send_response(*response)

    def poll_stop_signal(self):
        self._count("PollStopSignal")
        return super().poll_stop_signal()

    def return_batch_manager_stats(self, record):
        self._count("ReturnBatchManagerStats")
        super().return_batch_manager_stats(record)


@pytest.fixture
def gate(monkeypatch):
    """A gate, whose clock the watchdog reads."""
    before = set(threading.enumerate())
    gate = Gate()
    monkeypatch.setattr(watchdog, "perf_counter_ns", gate.now_ns)
    yield gate
    gate.open()
    deadline = time.monotonic() + 30
    while any(t.name.startswith("gptmanager") for t in set(threading.enumerate()) - before):
        assert time.monotonic() < deadline, "a thread of the manager is left behind"
        time.sleep(0.001)


start = partial(start_manager, black_box_iterations=0)


@pytest.fixture
def overstays(monkeypatch, caplog):
    """Runs a watchdog of a call that starts at 1 s; it looks at the given times, in seconds.
    The answer: which of these looks report the call, and what they say that it took."""

    def run(*looks, budget_s=2.0):
        timer = CallbackTimer("PollStopSignal")
        timer.started_ns = 10**9
        left, found = list(looks), []
        monkeypatch.setattr(watchdog, "perf_counter_ns", lambda: int(left.pop(0) * 10**9))
        given = {"budget_s": budget_s, "step_budget_s": None}
        watch = watchdog.Watchdog([timer], 0, iteration=timer, on_hang=bool, **given)
        watch._ended = SimpleNamespace(wait=lambda period: not left)
        watch._report = lambda name, taken_s: found.append((looks[-len(left) - 1], taken_s))
        watch._watch()
        return found

    return run


def test_a_call_is_reported_once_after_its_budget(overstays):
    assert overstays(1.25, 1.75, 2.25, 2.75, 3, budget_s=None) == []
    assert overstays(1.25, 1.75, 2.25, 2.75, 3) == []  # the budget is not exceeded yet
    assert overstays(1.25, 1.75, 2.25, 2.75, 3.25, 3.75) == [(3.25, 2.25)]


def test_time_in_which_the_process_was_stopped_is_not_the_calls(overstays):
    assert overstays(1.25, 1.5, 61.5, 61.75, 62.0) == []
    assert overstays(1.25, 61.25, 61.75, 62.25, 62.75) == [(62.75, 2.25)]
    assert overstays(61.0, 61.01, budget_s=0.1) == []


def test_an_abandoned_loop_changes_no_state():
    lifecycle = Lifecycle()
    assert lifecycle.abandon(ValueError("hangs"))
    for change in (lifecycle.move_to, lifecycle.leave, lambda _: lifecycle.fail(KeyError("late"))):
        with pytest.raises(LoopAbandoned):
            change(ManagerState.STOPPED)
    assert lifecycle.state is ManagerState.FAILED and str(lifecycle.exception) == "hangs"


def finals(host):
    return {r.request_id: r for r in host.responses if r.is_final}


def each_has_one_final(host, ids):
    counts = Counter(r.request_id for r in host.responses if r.is_final)
    assert counts == Counter(ids)
    seen = set()
    for response in host.responses:
        assert response.request_id not in seen, "a response after the final one"
        if response.is_final:
            seen.add(response.request_id)


def end_thread(manager):
    manager._thread.join(30)
    assert not manager._thread.is_alive()
    for thread in threading.enumerate():
        if thread.name == "gptmanager-watchdog":
            thread.join(30)


def test_a_hanging_step_is_logged_with_all_stacks_and_goes_on(gate, caplog):
    def hanging_network(history):
        gate()
        return next_token(history)

    host = Host(gate)
    with start(host, hanging_network, step_budget_s=0.02) as manager:
        host.submit(request(1, [1], 4))
        host.final(1)
        gate.is_armed = True
        host.submit(request(2, [1], 4))
        gate.reached.wait(30)
        while "All threads" not in caplog.text:
            time.sleep(0.001)
        assert manager.state is ManagerState.RUNNING
        gate.open()
        assert host.final(2).error == ""
        gate.shut()
        host.submit(request(3, [1], 4))
        while caplog.text.count("All threads") < 2:  # the watchdog watches on
            time.sleep(0.001)
        gate.open()
        assert host.final(3).error == ""
    told = next(r.message for r in caplog.records if "the loop hangs" in r.message)
    assert "step_budget_s = 0.02; the loop is not inside a callback, at wait" in told
    assert "hanging_network" in told and "gptmanager-loop" in told and "MainThread" in told
    record = json.loads(told.split("statistics: ")[1].split("\nAll threads")[0])
    assert record["Iteration Counter"] == 3
    assert told.count("the loop hangs") == 1


def test_empty_slots_are_known_without_a_statistics_callback():
    host = Host(lambda: None)
    keywords = host.keywords() | {"return_batch_manager_stats_cb": None}
    model = ScriptedModel(next_token, vocab_size=100, max_position_embeddings=128)
    host.submit(request(1, [1], 4), request(2, [1], 2))
    with GptManager(model, ModelType.V1, optional_params=params(), **keywords) as manager:
        assert host.final(1).error == "" and manager.wait_idle(30)
        record = json.loads(manager._host.statistics.so_far())
    assert record["Empty Generation Slots"] == 1


def test_a_hang_that_cannot_be_reported_still_ends_the_manager(gate, monkeypatch):
    def script(history):
        gate()
        return next_token(history)

    def untold(*ignored):
        raise MemoryError

    monkeypatch.setattr(StatisticsReport, "so_far", untold)
    monkeypatch.setattr(traceback, "format_stack", untold)
    host = Host(gate)
    manager = start(host, script, callback_budget_s=0.01, **BUDGET)
    gate.is_armed = True
    host.submit(request(1, [1], 9))
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    each_has_one_final(host, {1})


def test_a_step_that_hangs_ends_the_manager_and_nothing_follows(gate, caplog):
    def script(history):
        gate()
        return next_token(history)

    host = Host(gate)
    manager = start(host, script, **BUDGET)
    host.submit(request(0, [1], 2))
    host.final(0)
    gate.is_armed = True
    host.submit(*(request(i, [1], 9, is_streaming=i % 2 == 0) for i in range(1, 8)))
    ids = range(8)
    assert gate.reached.wait(30)
    assert manager.wait(30)
    assert manager.state is ManagerState.FAILED and isinstance(manager.exception, ManagerDeadError)
    text = str(manager.exception)
    assert "the loop hangs: one iteration has taken" in text and "step_budget_s = 0.05" in text
    answered = finals(host)
    assert {1, 2, 3, 4} <= set(answered) and not host.final(0).error
    assert all(answered[i].error == f"ManagerDeadError: {text}" for i in answered if i)
    calls = manager.notify, manager.resume_generation, manager.wait_idle, manager.audit
    for call in (*calls, lambda: manager.explain(1)):
        with pytest.raises(ManagerDeadError):
            call()
    health = manager.health()
    assert not health.alive and not health.accepting
    manager.shutdown()
    manager.shutdown(drain=False, timeout=0.01)
    calls = Counter(host.num_calls)
    gate.open()
    end_thread(manager)
    assert "on_hang = 'fail': the manager has ended; statistics: {" in caplog.text
    assert "SendResponse itself hangs" not in caplog.text
    assert host.num_calls == calls
    each_has_one_final(host, set(answered))
    assert set(answered) <= set(ids)


def test_a_send_that_raises_on_the_watchdogs_thread_is_counted(gate):
    class Failing(Host):
        def send_response(self, *response):
            super().send_response(*response)
            raise ConnectionError("the client has gone")

    def script(history):
        gate.is_armed = True
        gate()
        return next_token(history)

    host = Failing(gate)
    manager = start(host, script, **BUDGET)
    host.submit(request(1, [1], 9), request(2, [1], 9))
    assert manager.wait(30)
    gate.open()
    end_thread(manager)
    each_has_one_final(host, {1, 2})
    assert manager.health().callbacks["SendResponse"].errors == 2


class SlowToAnswer(Host):
    """While it gets the first error, the step that hung returns, and the loop's thread ends."""

    def send_response(self, request_id, tensors, is_final, error):
        super().send_response(request_id, tensors, is_final, error)
        if error and not self.gate.opened:
            self.gate.open()
            self.manager._thread.join(30)


@pytest.mark.parametrize("keeps_responses", [False, True])
def test_a_step_that_returns_while_others_answer_writes_nothing_into_the_journal(
    gate, tmp_path, keeps_responses
):
    def script(history):
        gate.is_armed = len(history) > 8
        gate()
        return next_token(history)

    host, folder = SlowToAnswer(gate), tmp_path / "journal"
    restore = {"restore_cb": lambda request_id: None} if keeps_responses else {}
    manager = start(host, script, **BUDGET, journal_path=folder, journal_sync="never", **restore)
    host.submit(*(request(i, [1], 99, is_streaming=True) for i in range(3)))
    assert manager.wait(20) and manager.state is ManagerState.FAILED
    end_thread(manager)
    each_has_one_final(host, range(3))
    assert JournalFolder(folder).read().entries == {}  # every end is there, and no token after it


@pytest.mark.parametrize("name", ["PollStopSignal", "ReturnBatchManagerStats"])
def test_a_callback_that_hangs_ends_the_manager_and_is_named(gate, name):
    host = Host(gate, name)
    manager = start(host, **BUDGET)
    gate.is_armed = True
    host.submit(request(1, [1], 9, is_streaming=True), request(2, [1], 9))
    assert manager.wait(30)
    assert f"the loop is inside callback {name}, for" in str(manager.exception)
    each_has_one_final(host, {1, 2})
    calls = Counter(host.num_calls)
    gate.open()
    end_thread(manager)
    assert host.num_calls == calls


def test_what_a_get_that_hangs_yields_before_and_after_is_answered(gate):
    host = Host(gate)

    def get(room):
        gate.is_armed = True
        yield request(1, [1], 2)
        yield request(2, [1], 2)
        gate()
        yield request(3, [1], 2)

    host.get_inference_requests = get
    manager = start(host, **BUDGET)
    assert manager.wait(30)
    assert "callback GetInferenceRequests" in str(manager.exception)
    each_has_one_final(host, {1, 2})
    gate.open()
    end_thread(manager)
    each_has_one_final(host, {1, 2, 3})


def test_finals_wait_for_a_send_that_hangs_but_nothing_else_does(gate, caplog):
    host = Host(gate, "SendResponse")
    manager = start(host, **BUDGET)
    gate.is_armed = True
    host.submit(*(request(i, [1], 9, is_streaming=True) for i in range(3)))
    assert manager.wait(30)
    assert manager.state is ManagerState.FAILED
    assert "callback SendResponse" in str(manager.exception)
    manager.shutdown()
    assert not finals(host)
    gate.open()
    end_thread(manager)
    each_has_one_final(host, {0, 1, 2})
    assert "SendResponse itself hangs" in caplog.text


def test_a_send_that_hangs_while_a_failed_loop_answers_delays_no_caller(gate):
    def explode(history):
        gate.is_armed = True
        raise FloatingPointError("the network is broken")

    host = Host(gate, "SendResponse")
    manager = start(host, explode, max_step_failures=1, **BUDGET)
    host.submit(request(1, [1], 9), request(2, [1], 9))
    assert manager.wait(30)
    assert manager.state is ManagerState.FAILED
    assert isinstance(manager.exception, FloatingPointError)
    gate.open()
    end_thread(manager)
    each_has_one_final(host, {1, 2})


class Processor:
    def __init__(self, gate, hangs_in):
        self.gate, self.hangs_in = gate, hangs_in

    def prepare(self, device):
        if self.hangs_in == "prepare":
            self.gate()
        done = Future()
        done.set_result(None)
        return done

    def __call__(self, *ignored):
        if self.hangs_in == "call":
            self.gate()


@pytest.mark.parametrize(
    ("hangs_in", "name"),
    [("prepare", "LogitsPostProcessor.prepare"), ("call", "LogitsPostProcessor")],
)
def test_a_processor_that_hangs_is_named(gate, hangs_in, name, caplog):
    host = Host(gate)
    manager = start(host, callback_budget_s=0.01, **BUDGET)
    gate.is_armed = True
    processor = Processor(gate, hangs_in)
    host.submit(request(1, [1], 9, logits_post_processor=processor), request(2, [1], 9))
    assert manager.wait(30)
    assert f"the loop is inside callback {name}, for" in str(manager.exception)
    assert manager.health().callbacks[name].overstays == 1
    each_has_one_final(host, {1, 2})


def test_a_scheduler_that_hangs_is_named(gate, caplog):
    class Waiting(RequestScheduler):
        def schedule_request(self, active_requests, inflight_request_ids):
            gate()

    host = Host(gate)
    gate.is_armed = True
    config = SchedulerConfig(create_scheduler=lambda **parts: Waiting())
    manager = start(host, config=config, callback_budget_s=0.01, **BUDGET)
    host.submit(request(1, [1], 9))
    assert manager.wait(30)
    assert "the loop is inside callback Scheduler, for" in str(manager.exception)
    assert "callback Scheduler has run for" in caplog.text
    each_has_one_final(host, {1})


def test_questions_to_an_abandoned_loop_are_refused(gate):
    host = Host(gate, "PollStopSignal")
    manager = start(host, **BUDGET)
    gate.is_armed = True
    host.submit(request(1, [1], 9))
    gate.reached.wait(30)
    with pytest.raises(ManagerDeadError):
        manager.audit(timeout=None)
    with pytest.raises(ManagerDeadError):
        manager.wait_idle()


def test_what_a_send_asks_on_the_watchdogs_thread_waits_for_nothing(gate):
    # Given a step that hangs, and a host that asks and ends its manager when it hears of an error
    answers = []

    def script(history):
        gate()
        return next_token(history)

    def send_response(request_id, tensors, is_final, error):
        send(request_id, tensors, is_final, error)
        answers.append((manager.wait(), manager.wait_idle(), manager.shutdown()))
        asks = manager.audit, manager.resume_generation, lambda: manager.explain(2)
        for call in (manager.notify, *asks):
            with pytest.raises(ManagerDeadError):
                call()

    host = Host(gate)
    send, host.send_response = host.send_response, send_response
    manager = start(host, script, **BUDGET)
    gate.is_armed = True
    host.submit(*(request(i, [1], 9) for i in range(3)))
    # Then each request has its final
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    each_has_one_final(host, {0, 1, 2})
    assert answers == 3 * [(False, False, None)]


def test_a_host_that_is_idle_or_slow_within_its_budget_does_not_hang(monkeypatch, caplog):
    now_ns = [1]
    monkeypatch.setattr(watchdog, "perf_counter_ns", lambda: now_ns[0])
    host = Host(lambda: None)
    with start(host, step_budget_s=0.02, on_hang="fail", idle_poll_s=None) as manager:
        assert manager.wait_idle(30)
        now_ns[0] += 10**12
        time.sleep(0.1)  # the watchdog looks several times
        host.submit(request(1, [1], 3))
        assert host.final(1).error == ""
        assert manager.wait_idle(30)
    assert manager.state is ManagerState.STOPPED and "hangs" not in caplog.text


def test_a_step_that_returns_when_it_is_given_up():
    rng = random.Random(1)
    states = Counter()
    while sum(states.values()) < 12 * FUZZ or len(states) < 2:  # a busy machine is late more often

        def script(history):
            time.sleep(rng.choice([0, 0, 0, rng.uniform(0.004, 0.02)]))
            return next_token(history)

        host = Host(Gate())
        manager = start(host, script, step_budget_s=0.01, on_hang="fail")
        submitted = []
        for i in range(6):
            submitted.append(i)
            try:
                host.submit(request(i, [1], rng.randint(1, 6), is_streaming=i % 2 == 0))
            except ManagerDeadError:  # Get may have returned it before the end
                break
        if rng.random() < 0.5:
            manager.shutdown(drain=rng.random() < 0.5)
        elif rng.random() < 0.5:
            try:
                manager.wait_idle(30)
            except ManagerDeadError:
                pass
        manager.shutdown()
        assert manager.wait(30)
        end_thread(manager)
        states[manager.state] += 1
        assert (manager.exception is not None) is (manager.state is ManagerState.FAILED)
        fetched = submitted[: len(submitted) - len(host._waiting)]
        each_has_one_final(host, fetched)
        assert set(states) <= {ManagerState.STOPPED, ManagerState.FAILED}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step_budget_s": 0.0}, "step_budget_s = 0.0 must be a number from 0.001 to 1000000.0"),
        ({"step_budget_s": float("nan")}, "step_budget_s = nan must be a number"),
        ({"on_hang": "end"}, "on_hang = 'end' must be 'log' or 'fail'"),
        ({"on_hang": "fail"}, "on_hang = 'fail' needs step_budget_s"),
        ({"max_waiting_requests": -1}, "max_waiting_requests = -1 must be an integer from 0"),
        ({"max_waiting_requests": 1.0}, "max_waiting_requests = 1.0 must be an integer from 0"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options, text):
    with pytest.raises(ConfigError) as raised:
        start(RecordingCallbacks(), **options)
    assert text in str(raised.value)


def test_a_patience_counts_a_jump_of_the_clock_as_a_quarter(monkeypatch):
    """And what is shorter as what it is."""
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    for step, calls in ((100.0, 4), (2.0, 4), (1.5, 5)):
        patience, count = clock.Patience(8.0), 0
        now[0] += step
        while not patience.is_over():
            now[0] += step
            count += 1
        assert count == calls
