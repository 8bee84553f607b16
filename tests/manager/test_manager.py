"""A manager's life with real threads: start, callbacks, drain, abort, failure, idle."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from dataclasses import astuple
from importlib.resources import files
from queue import SimpleQueue
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from left_threads import no_thread_is_left
from loop_driver import expected_output
from pausing import PausingHost
from shorthand import params, request
from started_manager import FUSED, model, start

from gptmanager import (
    CapacitySchedulerPolicy,
    FinishReason,
    GptManager,
    KvCacheConfig,
    ModelType,
    SchedulerConfig,
)
from gptmanager.assembly.cpu_backend import CpuBackend
from gptmanager.errors import CallbackError, ConfigError, ManagerDeadError
from gptmanager.host import retries
from gptmanager.host.callback_host import CallbackHost
from gptmanager.host.journal_seam import NoJournal
from gptmanager.lifecycle.state import ManagerState
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.manager import stall_watch
from gptmanager.manager.inbox import Inbox
from gptmanager.manager.rank_calls import RankCalls
from gptmanager.scheduler import RequestScheduler, SchedulerOutput
from gptmanager.testing import ContractChecker, RecordingCallbacks


@pytest.fixture
def host():
    return RecordingCallbacks()


def paused_at(*numbers):
    """Return a host that pauses its manager at the responses with these numbers."""
    return PausingHost(lambda of_all, *_: of_all in numbers)


SCHEMA = json.loads(files("gptmanager").joinpath("statistics.schema.json").read_text())


@pytest.fixture(autouse=True)
def ended_threads():
    with no_thread_is_left("gptmanager"):
        yield


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_requests_are_served_and_the_manager_drains_on_leaving(host, run_ahead):
    # Given a checker between the manager and the host
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    # When requests come from another thread while the loop runs
    with start(
        host,
        options=params(run_ahead=run_ahead),
        get_inference_requests_cb=checker.get_inference_requests,
        send_response_cb=checker.send_response,
    ) as manager:
        assert manager.state is ManagerState.RUNNING
        for i in range(12):
            host.submit(request(i, [i + 1, 2], 3 + i, is_streaming=i % 3 == 0))
        assert manager.wait_idle(timeout=20)
        host.submit(request(100, [9], 5))
        assert manager.wait_idle(timeout=20)
    # Then each has its tokens and one final, and no block is held
    assert manager.state is ManagerState.STOPPED and manager.exception is None
    for i in range(12):
        expected = expected_output([i + 1, 2], 3 + i)
        assert host.output(i) == (expected if i % 3 == 0 else [i + 1, 2, *expected])
    checker.check(manager)


def test_a_thread_that_cannot_be_started_raises_in_the_callers_line(host, monkeypatch):
    start_thread = threading.Thread.start

    def refuse(thread):
        if thread.name == "gptmanager-loop":
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start(host)


def test_a_wait_that_begins_while_the_bell_is_silenced_ends_with_the_next_iteration():
    inbox = Inbox()
    inbox.wake()
    told = []
    waiter = threading.Thread(target=lambda: told.append(inbox.wait_idle(30)))

    class Bell(SimpleQueue):
        def get_nowait(self):
            waiter.start()
            while not inbox._idle_waits:
                time.sleep(0.001)
            return super().get_nowait()

    inbox._bell = Bell()
    inbox._bell.put(None)
    inbox.begin_iteration()
    inbox.report_idle()
    waiter.join()
    assert told == [True]


def test_a_wait_ends_with_the_first_idle_iteration_that_begins_after_it():
    inbox, told = Inbox(), []
    inbox.begin_iteration()
    inbox.report_idle()
    assert not inbox.wait_idle(0.0)  # that iteration began before
    waiter = threading.Thread(target=lambda: told.append(inbox.wait_idle(None)), daemon=True)
    waiter.start()
    while not inbox._idle_waits:
        time.sleep(0.001)
    inbox.begin_iteration()
    inbox.report_idle()
    waiter.join(30)
    assert told == [True]


def test_a_call_that_waits_for_the_other_ranks_is_refused_at_the_end():
    inbox = Inbox()
    inbox.defers_calls = True
    question = inbox.ask(len, "sleep")
    inbox.refuse(ValueError("too early"))
    assert not question.wait(0.0)
    inbox.close()
    inbox.refuse(ManagerDeadError("the end"))
    with pytest.raises(ManagerDeadError, match="the end"):
        assert question.wait(0.0) and question.answer()


@pytest.mark.parametrize("is_timed", [False, True])
def test_an_iteration_is_timed_after_a_call_as_before_it(is_timed):
    timer, journal = CallbackTimer("iteration"), SimpleNamespace(flush=lambda: None)
    calls = RankCalls(SimpleNamespace(journal=journal), Inbox(), timer)
    if is_timed:
        timer.start()
    assert calls.run("wake", SimpleNamespace(executor=0, pending=()), lambda: timer.running_s) == 0
    assert (timer.started_ns > 0) is is_timed


def test_a_question_is_taken_back_only_once():
    inbox = Inbox()
    question = inbox.ask(len)
    assert inbox.take_back(question) and not inbox.take_back(question)


def test_no_thread_is_left_when_a_wait_has_returned(host, monkeypatch):
    manager = start(host)
    answer = manager._inbox.answer

    def slow_answer(*arguments):
        if manager._lifecycle.ended.is_set:  # the last line of the thread
            time.sleep(0.05)
        answer(*arguments)

    monkeypatch.setattr(manager._inbox, "answer", slow_answer)
    manager.shutdown()
    assert not manager._thread.is_alive()


def test_a_question_in_the_last_moment_is_answered(host, monkeypatch):
    asked, manager = [], start(host)
    release = manager._worker._ending.release

    def late(loop, loop_host):
        asked.append(manager._inbox.ask(lambda loop: loop))
        release(loop, loop_host)

    monkeypatch.setattr(manager._worker._ending, "release", late)
    manager.shutdown()
    (question,) = asked
    assert question.wait(30) and question.answer() is manager._worker.loop


def test_what_a_journal_holds_back_is_sent_before_get_is_called(host, monkeypatch):
    calls = []
    monkeypatch.setattr(NoJournal, "flush", lambda self: calls.append("flush"))

    def get(room):
        calls.append("get")
        return []

    with start(host, get_inference_requests_cb=get) as manager:
        assert manager.wait_idle(30)
    assert calls[0] == "flush"


def test_a_wrong_argument_of_a_call_changes_nothing(host):
    with start(host) as manager:
        for call in (
            manager.shutdown,
            manager.wait,
            manager.wait_idle,
            manager.audit,
            manager.wake,
        ):
            with pytest.raises(
                TypeError, match="timeout = '5' must be a number of seconds, or None"
            ):
                call(timeout="5")
        with pytest.raises(TypeError, match=r"would_fit\(\) needs an InferenceRequest, got 7"):
            manager.would_fit(7)
        assert manager.state is ManagerState.RUNNING


def test_one_forward_call_an_iteration_whose_tokens_are_the_scheduled_sum(host):
    scripted = model()
    with GptManager(scripted, FUSED, optional_params=params(), **host.keywords()) as manager:
        host.manager = manager
        host.submit(*(request(i, [1, 2, 3], 4) for i in range(6)))
        manager.wait_idle(timeout=20)
    records = [json.loads(record) for record in host.statistics]
    assert scripted.num_forwards == len(records)
    assert scripted.num_tokens == sum(
        record["Total Context Tokens"] + record["Generation Requests"] for record in records
    )


def test_every_statistics_record_follows_the_schema(host):
    with start(host) as manager:
        host.submit(*(request(i, [1, 2, 3], 5) for i in range(6)))
        manager.wait_idle(timeout=20)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert len(host.statistics) >= 5
    for number, text in enumerate(host.statistics):
        record = json.loads(text)
        validator.validate(record)
        assert record["Iteration Counter"] == number
        assert (
            record["Free KV cache blocks"] + record["Used KV cache blocks"]
            == record["Max KV cache blocks"]
            == 64
        )
        assert record["Waiting Requests"] == (
            record["Active Request Count"] - record["Scheduled Requests"]
        )
    assert json.loads(host.statistics[0])["Max Request Count"] == 4
    assert json.loads(host.statistics[-1])["Used KV cache blocks"] == 0


def test_get_and_send_are_mandatory_and_bad_arguments_raise_in_the_callers_line(host):
    keywords = host.keywords()
    with pytest.raises(ConfigError, match="send_response_cb is mandatory"):
        GptManager(model(), FUSED, get_inference_requests_cb=keywords["get_inference_requests_cb"])
    with pytest.raises(ConfigError, match="get_inference_requests_cb is mandatory"):
        GptManager(model(), FUSED, send_response_cb=keywords["send_response_cb"])
    with pytest.raises(ConfigError, match="model_type must be a ModelType, got 'V1'"):
        GptManager(model(), "V1", **keywords)
    with pytest.raises(ConfigError, match="enable_chunked_context = True is refused with .*V1"):
        options = params(enable_chunked_context=True)
        GptManager(model(), ModelType.V1, optional_params=options, **keywords)
    with pytest.raises(ConfigError, match="MAX_UTILIZATION is refused with .*V1"):
        config = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)
        GptManager(model(), ModelType.V1, scheduler_config=config, **keywords)
    with pytest.raises(ConfigError, match="max_tokens = 100 is less than one sequence"):
        options = params(kv_cache_config=KvCacheConfig(max_tokens=100))
        GptManager(model(), ModelType.V1, optional_params=options, **keywords)
    with pytest.raises(
        ConfigError, match="enable_trt_overlap = True is refused with run_ahead = 1"
    ):
        options = params(enable_trt_overlap=True, run_ahead=1)
        GptManager(model(), FUSED, optional_params=options, **keywords)
    with pytest.raises(ConfigError, match="max_beam_width = 0"):
        GptManager(model(), FUSED, 0, **keywords)
    with pytest.raises(
        ConfigError,
        match=r"nor a GGUF file, nor a Model \(an object with spec, nbytes and forward\)",
    ):
        GptManager(object(), FUSED, **keywords)
    with pytest.raises(ConfigError, match="config.json"):
        GptManager("/does/not/exist", FUSED, **keywords)
    with pytest.raises(ConfigError, match="max_seq_len = 4096 exceeds"):
        GptManager(model(), FUSED, optional_params=params(max_seq_len=4096), **keywords)
    with pytest.raises(ConfigError, match="KvCacheConfig.use_uvm"):
        options = params(kv_cache_config=KvCacheConfig(use_uvm=True))
        GptManager(model(), FUSED, optional_params=options, **keywords)


async def forward_later(batch, kv_pool):
    pass


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"spec": SimpleNamespace(vocab_size=9)}, "Model.spec.max_position_embeddings = None must"),
        ({"nbytes": None}, "Model.nbytes = None must be an integer of at least 0"),
        ({"forward": forward_later}, "Model.forward = .* is a coroutine function"),
    ],
)
def test_what_is_wrong_with_a_model_of_the_host_is_named(change, told):
    wrong = model()
    vars(wrong).update(change)
    with pytest.raises(ConfigError, match=told):
        GptManager(wrong, FUSED, **RecordingCallbacks().keywords())
    with pytest.raises(ConfigError, match="neither a checkpoint folder"):
        GptManager(type(wrong), FUSED, **RecordingCallbacks().keywords())


def test_a_forward_that_returns_no_tensor_is_named():
    wrong = model()
    wrong.forward = lambda batch, kv_pool: None
    host = RecordingCallbacks([request(1, [1], 2)])
    with GptManager(wrong, FUSED, optional_params=params(), **host.keywords()) as manager:
        manager.wait_idle(10)
    assert "forward of ScriptedModel returned an object of type NoneType, expected a tensor of" in (
        host.responses[-1].error
    )


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (MemoryError("of 4 TiB"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("an illegal memory access"), False),
    ],
    ids=str,
)
def test_options_that_fit_into_no_memory(host, monkeypatch, error, is_of_memory):
    def executor(self, *sizes, **options):
        raise error

    monkeypatch.setattr(CpuBackend, "executor", executor)
    with pytest.raises(RuntimeError if not is_of_memory else ConfigError) as raised:
        start(host, options=params(max_batch_size=9))
    text = "no memory for steps of max_batch_size = 9 sequences of max_seq_len = 128 tokens"
    assert (text in str(raised.value)) is is_of_memory and str(error) in str(raised.value)


def test_the_options_are_the_managers_own_copy(host):
    options = params()
    with start(host, options=options) as manager:
        options.idle_poll_s = None
        options.kv_cache_config.max_tokens = 1
        host.submit(request(1, [1], 3))
        assert manager.wait_idle(timeout=20)
    assert host.output(1) == [1, *expected_output([1], 3)]


def test_an_exception_in_the_block_aborts_with_one_final_error_each(host):
    def unending(history):  # a step that ends with the block
        while host.responses and not host.manager._inbox.is_to_abort:
            time.sleep(0.001)
        return 1

    with pytest.raises(KeyError), start(host, unending):
        host.submit(*(request(i, [1], 100, is_streaming=True) for i in range(6)))
        while not host.responses:
            time.sleep(0.001)
        raise KeyError("the host's own")
    finals = [r for r in host.responses if r.is_final]
    assert 4 <= len({r.request_id for r in finals}) == len(finals)
    assert all(r.error.startswith("ManagerDeadError: the manager was shut down") for r in finals)


def test_shutdown_drains_and_does_not_ask_get_again(host):
    seen = []

    def send(*response):
        host.send_response(*response)
        seen.append((manager.state, manager.health().accepting))

    manager = start(host, send_response_cb=send)
    host.submit(*(request(i, [1], 30) for i in range(4)))
    while not host.statistics:
        time.sleep(0.001)
    manager.shutdown()
    asked = len(host.rooms)
    host.submit = None
    assert all(not host.final(i, 0).error for i in range(4))
    assert (ManagerState.DRAINING, True) not in seen
    assert len(host.rooms) == asked
    manager.shutdown()  # idempotent
    assert manager.wait(0) and manager.wait_idle(0)
    assert manager.audit().ok and manager.audit().used_blocks == 0


def test_shutdown_aborts_when_its_timeout_has_passed(host):
    def unending(history):  # a step that ends when the timeout has passed
        while host.statistics and not host.manager._inbox.is_to_abort:
            time.sleep(0.001)
        return 1

    manager = start(host, unending)
    host.submit(request(1, [1], 120))
    told = []
    waiter = threading.Thread(target=lambda: told.append(manager.wait_idle()), daemon=True)
    waiter.start()
    while not (host.statistics and manager._inbox._idle_waits):
        time.sleep(0.001)
    manager.shutdown(timeout=0.01)
    assert manager.state is ManagerState.STOPPED  # behind the step that ran
    assert host.final(1).error.startswith("ManagerDeadError")  # long before its 120th token
    waiter.join(30)
    assert told == [True]  # the wait ends with the loop


def test_shutdown_from_a_callback_only_asks(host):
    manager = None

    def send(*response):
        host.send_response(*response)
        manager.shutdown(drain=False)
        assert not manager.wait() and not manager.wait_idle()
        assert manager.audit().ok and manager.explain(1).request_id == 1

    manager = start(host, send_response_cb=send)
    host.submit(request(1, [1], 50, is_streaming=True))
    assert manager.wait(30)
    assert manager.state is ManagerState.STOPPED


def test_the_last_failing_step_gives_every_request_one_final_error_and_fails_the_manager(
    host, caplog
):
    def explode(history):
        if len(history) > 6:
            raise FloatingPointError("the network is broken")
        return 1

    manager = start(host, explode, options=params(max_step_failures=1))
    host.submit(*(request(i, [1], 20) for i in range(7)))
    assert manager.wait(30)
    assert manager.state is ManagerState.FAILED
    assert isinstance(manager.exception, FloatingPointError)
    finals = [r for r in host.responses if r.is_final]
    assert len({r.request_id for r in finals}) == len(finals) >= 4
    for final in finals:
        assert final.error.startswith(
            "ManagerDeadError: Encountered an error in forwardAsync function: FloatingPointError"
        )
    logged = [it for it in caplog.records if it.getMessage() == "the token loop has failed"]
    assert [it.exc_info[1] for it in logged] == [manager.exception]
    asks = manager.wait_idle, manager.pause_generation, lambda: manager.explain(1)
    for call in (manager.notify, *asks):
        with pytest.raises(ManagerDeadError) as caught:
            call()
        assert caught.value.__cause__ is manager.exception
    assert manager.audit().used_blocks == 0
    assert not manager.health().alive
    manager.shutdown()


def test_a_get_that_keeps_failing_fails_the_manager_by_the_documented_rule(host, caplog):
    calls = []

    def get(room):
        calls.append(room)
        raise OSError("no queue")

    manager = start(host, get_inference_requests_cb=get, options=params(max_get_failures=3))
    assert manager.wait(30)
    assert manager.state is ManagerState.FAILED
    assert "GetInferenceRequests failed 4 times in a row" in str(manager.exception)
    assert len(calls) == 4
    assert "no queue" in caplog.text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "returned None, as a function without `return` does; expected an iterable"),
        (5, "returned 5; expected an iterable of InferenceRequest"),
        ([3], "returned an item of type int, expected InferenceRequest"),
    ],
)
def test_an_end_caused_by_get_names_what_get_returned(host, answer, text):
    with suppress(ManagerDeadError):
        with start(
            host, get_inference_requests_cb=lambda room: answer, options=params(max_get_failures=2)
        ) as manager:
            assert manager.wait(30)
    error = manager.exception
    assert isinstance(error, CallbackError) and isinstance(error.__cause__, CallbackError)
    assert "GetInferenceRequests failed 3 times in a row" in str(error) and text in str(error)
    assert text in str(error.__cause__)


def test_the_pauses_after_failures_of_get_grow(monkeypatch):
    """10 of them, the default, take 4 s; while requests run Get is left alone for as long."""
    calls, now = [], [100.0]
    monkeypatch.setattr(retries, "monotonic", lambda: now[0])

    def get(room):
        calls.append(room)
        raise OSError("no queue")

    world = CallbackHost(get, lambda *args: None, None, None, max_get_failures=10)
    pauses = []
    while world.get_failures.fatal is None:
        for _ in range(20):  # those that come early, by a notify, are no more failures
            world.peek(4)
        pauses.append(world.get_failures.pause_s)
        now[0] += pauses[-1] + 1e-6
    assert len(pauses) == 11 and pauses[:3] == [0.01, 0.02, 0.04] and pauses[-2:] == [1.0, 1.0]
    assert 4 < sum(pauses[:10]) < 5 and isinstance(world.get_failures.fatal.__cause__, OSError)
    calls.clear()
    now[0] -= 2e-6
    world.fetch(4, num_active=1)
    assert not calls  # not before the pause is over
    world.fetch(4, num_active=0)
    assert len(calls) == 1


@pytest.mark.parametrize("answer", [None, 5, [3], ["x"]])
def test_a_wrong_answer_of_get_is_logged_and_the_loop_goes_on(host, answer, caplog):
    answers = [answer, None, [request(1, [1], 2)]]
    manager = start(host, get_inference_requests_cb=lambda room: answers.pop(0) if answers else [])
    with manager:
        assert host.final(1).error == ""
    assert "GetInferenceRequests" in caplog.text


def test_requests_that_a_raising_get_had_already_yielded_are_served(host):
    def get(room):
        if host.rooms:
            return
        host.rooms.append(room)
        yield request(1, [1], 2)
        raise OSError("half way")

    with start(host, get_inference_requests_cb=get):
        assert host.final(1).error == ""


@pytest.mark.parametrize("callback", ["poll_stop_signal_cb", "return_batch_manager_stats_cb"])
def test_a_raising_poll_or_stats_is_counted_and_the_loop_goes_on(host, callback):
    def fail(*args):
        raise LookupError("of the host")

    with start(host, **{callback: fail}) as manager:
        host.submit(request(1, [1], 5))
        assert host.final(1).error == ""
        errors = {name: latency.errors for name, latency in manager.health().callbacks.items()}
    name = {"poll": "PollStopSignal", "return": "ReturnBatchManagerStats"}[callback.split("_")[0]]
    assert errors[name] == 5 or errors[name] == 4  # the last one may not have run yet


def test_a_raising_send_ends_only_its_request(host):
    def send(request_id, tensors, is_final, error):
        host.send_response(request_id, tensors, is_final, error)
        if request_id == 1:
            raise BrokenPipeError("client 1 has gone")

    with start(host, send_response_cb=send):
        host.submit(request(1, [1], 9, is_streaming=True), request(2, [2], 9, is_streaming=True))
        assert "BrokenPipeError: client 1 has gone" in host.final(1).error
        assert host.final(1).error.startswith("CallbackError: SendResponse raised")
        assert host.final(2).error == ""
    assert host.output(2) == expected_output([2], 9)
    assert len(host.of(1)) == 2


def test_the_watchdog_names_a_callback_that_overstays_with_its_stack(host, caplog):
    def lingering_poll():
        while "callback PollStopSignal has run for" not in caplog.text:
            time.sleep(0.001)
        return set()

    options = params(callback_budget_s=0.1)
    with start(host, poll_stop_signal_cb=lingering_poll, options=options) as manager:
        host.submit(request(1, [1], 1))
        host.final(1)
        assert manager.wait_idle(30)
        latency = manager.health().callbacks["PollStopSignal"]
    assert latency.overstays == latency.calls == sum(latency.histogram) == 1
    assert latency.max_us >= 100_000
    assert "lingering_poll" in caplog.text


def test_stop_signals_cancel_and_unknown_ids_are_ignored():
    host = paused_at(1)
    with start(host) as manager:
        host.stop(4242)
        host.submit(request(1, [1], 120, is_streaming=True), request(2, [1], 5))
        while not host.responses:
            time.sleep(0.001)
        host.stop(1)
        manager.resume_generation()
        final = host.final(1)
        assert FinishReason(int(final.tensors["finish_reasons"])) is FinishReason.CANCELLED
        assert host.final(2).error == ""


def test_without_polling_an_idle_manager_asks_get_only_on_notify(host, monkeypatch):
    rest, rests = Inbox.rest, []
    monkeypatch.setattr(
        Inbox, "rest", lambda self, limit_s: rests.append(limit_s) or rest(self, limit_s)
    )
    with start(host, options=params(idle_poll_s=None)) as manager:
        assert manager.wait_idle(30)
        host.submit(request(1, [1], 2))
        assert host.final(1).error == ""
    assert set(rests) == {None}


def test_an_idle_manager_uses_hardly_any_processor_time(host):
    with start(host) as manager:
        manager.wait_idle(30)
        clock = time.pthread_getcpuclockid(manager._thread.ident)
        before, asked, started = time.clock_gettime(clock), len(host.rooms), time.monotonic()
        time.sleep(0.3)
        used = time.clock_gettime(clock) - before
        asked, passed = len(host.rooms) - asked, time.monotonic() - started
    assert asked < 600 * passed
    assert used < passed / 3  # it is 1 %; this only catches a loop that spins


def test_explain_and_audit_answer_in_numbers_while_requests_run():
    host = paused_at(1)
    with start(host, options=params(kv_cache_config=KvCacheConfig(32, tokens_per_block=4))):
        host.submit(request(1, [1] * 4, 24, is_streaming=True), request(2, [2] * 4, 20))
        manager = host.manager
        while not host.responses:
            time.sleep(0.001)
        waiting, running, report = manager.explain(2), manager.explain(1), manager.audit()
    assert waiting.reason == "kv_blocks"
    assert waiting.needed_blocks == 6 and waiting.running == 1
    assert waiting.free_blocks - waiting.reserved_blocks == 1
    assert "short by 5" in waiting.text and (waiting.needed_tokens, waiting.free_tokens) == (0, 0)
    assert waiting.text.endswith("; waiting requests ahead of it: 0, pauses so far: 0")
    assert running.reason == "running"
    assert manager is host.manager and report.ok
    assert set(sum(report.owners.values(), ())) == {1}
    unknown = astuple(manager.explain(3))
    assert unknown[:2] == (3, "unknown") and not any(unknown[3:])


def test_would_fit_answers_with_the_admission_code(host):
    options = params(kv_cache_config=KvCacheConfig(32, tokens_per_block=4))
    with start(host, options=options) as manager:
        fit = manager.would_fit(request(1, [1] * 4, 24))
        assert fit.accepted and fit.needed_blocks == 7 and fit.free_blocks == fit.total_blocks == 8
        never = manager.would_fit(request(1, [1] * 40, 24))
    assert not never.accepted and never.text.startswith("CapacityError: Prompt length (40)")
    assert not host.responses
    ended = manager.would_fit(request(1, [1] * 4, 24))
    assert not (ended.accepted or ended.starts_now) and ended.needed_blocks == 7
    assert ended.text == "ManagerDeadError: the manager was shut down"


def test_would_fit_knows_ids_that_are_taken_and_what_could_start_now():
    options = params(
        kv_cache_config=KvCacheConfig(32, tokens_per_block=4, enable_block_reuse=True),
        max_active_requests=2,
    )
    host = paused_at(1, 2)
    with start(host, options=options) as manager:
        assert manager.would_fit(request(1, [1] * 4, 24)).starts_now
        host.submit(request(1, [1] * 4, 20, is_streaming=True))
        while not host.responses:
            time.sleep(0.001)
        taken = manager.would_fit(request(1, [1] * 4, 4))
        beside = manager.would_fit(request(2, [1] * 4, 4))
        larger = manager.would_fit(request(2, [1] * 4, 20))
        host.submit(request(2, [1] * 4, 20))
        manager.resume_generation()
        while len(host.responses) < 2:  # Get is called before
            time.sleep(0.001)
        outside = manager.would_fit(request(4, [1], 1))
    assert not taken.accepted and taken.text.startswith("DuplicateRequestIdError: request id 1")
    assert beside.accepted and beside.starts_now and not beside.wait
    assert larger.accepted and not larger.starts_now
    assert larger.wait.startswith("waits for KV cache blocks: it needs 6, ")
    assert larger.wait.endswith("for 1 running request, short by 4") and larger.needed_blocks == 6
    assert outside.accepted and not outside.starts_now
    assert outside.wait == "waits outside: 2 requests are active, max_active_requests = 2"


def test_lengths_that_the_pool_cannot_hold_are_clamped_with_a_warning(host, caplog):
    caplog.set_level(logging.INFO, logger="gptmanager")
    options = params(kv_cache_config=KvCacheConfig(max_tokens=40, tokens_per_block=4))
    with start(host, options=options):
        host.submit(request(1, [1] * 36, 50), request(2, [1] * 37, 1))
        assert int(host.final(1).tensors["sequence_length"]) == 37
        error = host.final(2).error
    assert error.startswith(
        "CapacityError: Prompt length (37) exceeds maximum input length (36). 10 KV cache blocks "
        "of 4 tokens hold at most 37 tokens of one request, (blocks - 1) x tokens_per_block + 1."
    )
    assert "reduced to 37" in caplog.text and "max_input_len is reduced to 36" in caplog.text
    assert "request_output_len = 50 lowered to 1" in caplog.text
    assert "number of blocks in the KV cache primary pool: 10" in caplog.text


def test_health_reports_alive_progressing_and_accepting(host):
    manager = start(host)
    host.submit(request(1, [1], 3))
    host.final(1)
    manager.wait_idle(30)
    health = manager.health()
    assert health.alive and health.progressing and health.accepting and health.num_active == 0
    assert health.last_step_age_s < 10
    manager.shutdown()
    health = manager.health()
    assert not health.alive and not health.accepting


def test_twenty_starts_and_stops_leave_no_trace(host):
    for _ in range(20):
        with start(RecordingCallbacks()):
            pass


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_error_without_a_text_still_gives_every_request_its_final(host):
    def explode(history):
        raise Unspeakable

    manager = start(host, explode, options=params(max_step_failures=1))
    host.submit(request(1, [1], 5))
    assert "Unspeakable" in host.final(1).error
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    assert isinstance(manager.exception, Unspeakable)


def test_the_state_is_failed_already_when_the_finals_of_a_failed_step_are_sent(host):
    seen = []

    def send(*response):
        seen.append((host.manager.state, type(host.manager.exception)))
        host.send_response(*response)

    def explode(history):
        raise FloatingPointError

    manager = start(host, explode, send_response_cb=send, options=params(max_step_failures=1))
    host.submit(request(1, [1], 5))
    assert manager.wait(30)
    assert seen == [(ManagerState.FAILED, FloatingPointError)]


def test_wait_idle_sees_what_a_final_response_made_the_host_submit(host):
    def send(request_id, tensors, is_final, error):
        host.send_response(request_id, tensors, is_final, error)
        if is_final and request_id == 1:
            host.submit(request(2, [2], 3))

    with start(host, send_response_cb=send, options=params(idle_poll_s=5.0)) as manager:
        host.submit(request(1, [1], 100, deadline_s=0.0))
        assert manager.wait_idle(30)
        assert host.final(2, 0).error == ""


def test_a_notify_is_not_lost_to_a_failing_get(host):
    failures = [OSError("once")]

    def get(room):
        if host.rooms and failures:
            raise failures.pop()
        return host.get_inference_requests(room)

    with start(host, get_inference_requests_cb=get, options=params(idle_poll_s=None)) as manager:
        assert manager.wait_idle(30)
        host.submit(request(1, [1], 2))
        assert host.final(1).error == ""


@pytest.mark.parametrize("wrong", [-1, 2**64, True, 1.0, "1"])
def test_an_adapter_is_forgotten_by_its_task_id_only(host, wrong):
    with start(host) as manager, pytest.raises(ValueError, match="task_id = .* must be an integer"):
        manager.forget_adapter(wrong)


@pytest.mark.parametrize("wrong", [0, {}, "", 1])
def test_a_false_value_is_not_a_default(host, wrong):
    with pytest.raises(ConfigError, match="scheduler_config = .*, expected SchedulerConfig"):
        GptManager(model(), FUSED, 1, wrong, **host.keywords())
    with pytest.raises(ConfigError, match="optional_params = .*, expected OptionalParams"):
        GptManager(model(), FUSED, optional_params=wrong, **host.keywords())


def test_a_stalled_request_can_be_cancelled_and_the_stall_is_logged_once(host, caplog, monkeypatch):
    monkeypatch.setattr(stall_watch, "_STALL_WARNING_S", 0.1)

    class Nobody(RequestScheduler):
        def schedule_request(self, active_requests, inflight_request_ids):
            return SchedulerOutput([], [], [])

    config = SchedulerConfig(create_scheduler=lambda **parts: Nobody())
    with GptManager(
        model(), FUSED, 1, config, optional_params=params(), **host.keywords()
    ) as manager:
        host.manager = manager
        host.submit(request(1, [1], 2))
        while "no request has been scheduled for" not in caplog.text:
            time.sleep(0.01)
        time.sleep(0.2)
        host.stop(1)
        final = host.final(1)
    assert FinishReason(int(final.tensors["finish_reasons"])) is FinishReason.CANCELLED
    assert caplog.text.count("no request has been scheduled for") == 1


def test_active_requests_without_a_step_for_ten_seconds_make_no_progress(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stall_watch, "monotonic", lambda: now[0])
    watch = stall_watch.StallWatch()
    for worked, is_active in ((True, True), (False, False), (False, True)):
        now[0] += 60
        assert watch.is_progressing(0) and not watch.is_progressing(1)
        watch.note(worked=worked, is_active=is_active)
        assert watch.is_progressing(1) is (worked or not is_active)
    assert watch.last_step_age_s() == 120


@pytest.mark.parametrize("weights_dtype", [None, "int8"])
def test_a_default_dtype_of_the_process_changes_nothing(host, weights_dtype):
    source = checkpoint(random_model(CONFIGS["llama"]))
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            host = RecordingCallbacks([request(1, [1, 2, 3], 6)])
            own = params(weights_dtype=weights_dtype)
            with GptManager(source, FUSED, optional_params=own, **host.keywords()) as manager:
                assert manager.wait_idle(30)
        finally:
            torch.set_default_dtype(torch.float32)
        outputs.append(host.output(1))
    assert outputs[0] == outputs[1] and len(outputs[0]) == 9
