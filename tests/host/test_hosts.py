"""Hosts that try hard to break a manager, and what must hold for them all the same."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from loop_driver import expected_output, next_token
from prometheus_client import CollectorRegistry
from shorthand import params, request

from gptmanager import (
    CapacitySchedulerPolicy,
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    SchedulerConfig,
)
from gptmanager.bindings import gpt_manager as bindings_manager
from gptmanager.callbacks import PrometheusSink
from gptmanager.errors import ManagerDeadError
from gptmanager.host import received_requests
from gptmanager.kernels import CpuKernels
from gptmanager.lifecycle.state import ManagerState
from gptmanager.manager import gpt_manager as manager_module
from gptmanager.manager.inbox import Inbox
from gptmanager.models import load_model
from gptmanager.recorder.recording_file import read_recording
from gptmanager.request.inference_request import KEYWORDS, TENSOR_ALIASES, TENSORS
from gptmanager.scheduler import (
    CapacityScheduler,
    LlmRequest,
    LlmRequestState,
    RequestList,
    RequestScheduler,
    SchedulerOutput,
    SimpleScheduler,
)
from gptmanager.testing import ContractChecker, RecordingCallbacks, ScriptedModel

FUSED = ModelType.INFLIGHT_FUSED_BATCHING


def start(host, script=next_token, options=None, config=None, **callbacks):
    model = ScriptedModel(script, vocab_size=100, max_position_embeddings=128)
    keywords = {**host.keywords(), **callbacks}
    manager = GptManager(model, FUSED, 1, config, optional_params=options or params(), **keywords)
    host.manager = manager
    return manager


def slowly(history):
    time.sleep(0.001)
    return next_token(history)


def until(condition, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def finals(host):
    return [response for response in host.responses if response.is_final]


@pytest.fixture
def host():
    return RecordingCallbacks()


# What a host hands over --------------------------------------------------------------------------


def test_ids_at_both_ends_and_of_numpy_come_back_as_ints(host):
    ids = [0, 2**64 - 1, 2**63, np.uint64(7), np.int8(3)]
    with start(host, options=params(max_active_requests=None)) as manager:
        host.submit(*(request(request_id, [1], 2) for request_id in ids))
        assert manager.wait_idle(30)
    assert sorted(r.request_id for r in finals(host)) == [0, 3, 7, 2**63, 2**64 - 1]
    assert all(type(r.request_id) is int and not r.error for r in host.responses)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([5, 9]).to(torch.uint64),
        np.array([5, 9], dtype=">i4"),
        np.array([9, 0, 5])[::-2],
        torch.tensor([[5, 0, 9, 0]], dtype=torch.int16)[:, ::2],
    ],
    ids=["uint64", "big endian", "negative stride", "strided"],
)
def test_integer_prompts_of_any_layout_are_taken(host, ids):
    with start(host):
        host.submit(InferenceRequest(1, {"input_ids": ids, "request_output_len": np.array([3])}))
        assert host.final(1).error == ""
    assert host.output(1) == [5, 9, *expected_output([5, 9], 3)]


def test_tensors_that_cannot_be_read_are_refused_and_harm_no_other_request(host):
    unreadable = [
        torch.empty(2, device="meta", dtype=torch.int32),
        torch.tensor([1, 2]).to_sparse(),
        torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1, 2], dtype=torch.complex64),
        torch.tensor([True]),
        np.zeros(2, dtype=[("token", "i4")]),
        np.array([1, "a"], dtype=object),
        np.array(["2020"], dtype="M8[D]"),
        np.ma.array([1, 2], mask=[False, True]),
        np.ma.array([1, 2]),
        "abc",
        object(),
    ]
    with start(host, options=params(max_active_requests=None)):
        host.submit(request(99, [1], 40))
        for request_id, ids in enumerate(unreadable):
            host.submit(InferenceRequest(request_id, {"input_ids": ids, "request_output_len": 1}))
        for request_id in range(len(unreadable)):
            assert host.final(request_id).error.startswith("InvalidRequestError: ")
        assert host.final(99).error == "" and len(host.output(99)) == 41


@pytest.mark.parametrize("name", ["input_ids", "embedding_bias", "lora_weights", "end_id"])
def test_a_masked_array_is_refused_before_a_recording_or_a_rank_drops_its_mask(
    host, tmp_path, name
):
    masked = np.ma.array(np.ones((1, 9), np.float32), mask=[[True] + [False] * 8])
    masked = masked.astype(np.int32) if name in ("input_ids", "end_id") else masked
    given = {"input_ids": np.array([1]), "request_output_len": np.array([2]), name: masked}
    with start(host, options=params(recording_path=tmp_path / "recording.jsonl")) as manager:
        fit = manager.would_fit(InferenceRequest(1, given))
        host.submit(InferenceRequest(1, given))
        error = host.final(1).error
    told = f"InvalidRequestError: {name} is a masked array, but masks are not supported"
    assert error.startswith(told) and fit.text == error
    assert not any(
        it.intake.requests for it in read_recording(tmp_path / "recording.jsonl").iterations
    )


def test_a_request_is_the_managers_own_once_get_has_returned_it(host):
    ids = np.array([1, 2, 3], dtype=np.int32)
    handed = InferenceRequest(1, {"input_ids": ids, "request_output_len": np.array([20])})
    answers = [[handed]]

    def get(room):
        if answers:
            return answers.pop()
        ids[:] = 50
        handed.max_new_tokens = np.array([1])
        handed.is_streaming = True
        return []

    with start(host, get_inference_requests_cb=get):
        assert host.final(1).error == ""
    assert host.output(1) == [1, 2, 3, *expected_output([1, 2, 3], 20)]
    assert len(host.of(1)) == 1


class OwnRequest(InferenceRequest):
    """A subclass of a host."""


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_requests_and_options_are_copied_and_pickled_whole(clone):
    given = OwnRequest.from_tokens(
        5, [1, 2], 3, temperature=0.5, is_streaming=True, client_id=9, cache_salt="x"
    )
    copied = clone(given)
    assert type(copied) is OwnRequest
    assert (copied.request_id, copied.is_streaming, copied.client_id) == (5, True, 9)
    copied.retention_priority = 3
    assert given.retention_priority is None
    assert copied.cache_salt == "x" and copied.tensors.keys() == given.tensors.keys()
    copied.temperature = np.array([2.0])
    assert float(given.temperature) == 0.5
    options = params(seed=7)
    assert clone(options) == options
    config = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)
    assert clone(config) == config


def test_a_request_with_a_post_processor_is_copied_and_not_pickled():
    given = request(8, [1], 1, logits_post_processor=threading.Lock().acquire)
    with pytest.raises(TypeError, match="request 8 cannot be pickled: its logits_post_processor"):
        pickle.dumps(given)
    for clone in (copy.copy, copy.deepcopy):
        copied = clone(given)
        assert copied.logits_post_processor is given.logits_post_processor
        copied.input_ids = np.array([9])
        assert given.input_ids.tolist() == [1] and copied.request_id == 8
    assert copy.copy(given).input_ids is given.input_ids
    assert copy.deepcopy(given).input_ids is not given.input_ids


def test_a_subclass_of_a_request_is_copied_as_it_is():
    class Mine(InferenceRequest):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            self.__dict__["tag"] = "mine"

    copied = copy.copy(Mine(3, {"input_ids": np.array([1])}))
    assert type(copied) is Mine and copied.tag == "mine" and copied.input_ids.tolist() == [1]


def test_none_means_not_given_for_every_keyword():
    names = (*KEYWORDS, *TENSORS, *TENSOR_ALIASES)
    given = dict.fromkeys(set(names) - {"input_ids", "request_output_len", "max_new_tokens"})
    made = InferenceRequest.from_tokens(1, [1, 2], 3, **given)
    plain = InferenceRequest.from_tokens(1, [1, 2], 3)
    assert {name: getattr(made, name) for name in KEYWORDS} == {
        name: getattr(plain, name) for name in KEYWORDS
    }
    assert made.tensors.keys() == plain.tensors.keys()


def test_none_means_the_default_to_the_manager(host):
    host.submit(request(1, [1], 2, **dict.fromkeys(set(KEYWORDS) | {"end_id", "temperature"})))
    with start(host):
        assert host.final(1).error == ""


# What a host gets back ---------------------------------------------------------------------------


def test_a_host_may_write_over_every_tensor_that_it_gets(host):
    kept = []

    def send(request_id, tensors, is_final, error):
        host.send_response(request_id, [(n, t.clone()) for n, t in tensors], is_final, error)
        for name, tensor in tensors:
            if name not in ("context_logits", "generation_logits"):  # the two shared dummies
                tensor.fill_(77)
                kept.append(tensor)

    with start(host, send_response_cb=send):
        host.submit(*(request(i, [i + 1], 9, is_streaming=i < 3) for i in range(4)))
        for i in range(4):
            assert host.final(i).error == ""
    for i in range(4):
        expected = expected_output([i + 1], 9)
        assert host.output(i) == (expected if i < 3 else [i + 1, *expected])
    assert all((tensor == 77).all() and not tensor.is_inference() for tensor in kept)


# What callbacks answer and raise -----------------------------------------------------------------


@pytest.mark.parametrize(
    "stops",
    [{np.uint64(1)}, [1, 1, 7], (1,), {1: "x"}, np.array([1]), torch.tensor([1]), range(3)],
    ids=str,
)
def test_stop_signals_may_be_any_iterable_of_integers(host, stops):
    with start(host, slowly, poll_stop_signal_cb=lambda: stops):
        host.submit(request(1, [1], 100), request(2**63, [1], 5))
        reason = FinishReason(int(host.final(1).tensors["finish_reasons"]))
        assert reason is FinishReason.CANCELLED
        assert host.final(2**63).error == ""


@pytest.mark.parametrize(
    "stops",
    [{1.0}, {"1"}, "1", b"\1", 5, True, [[1]], {True}, np.array([True]), torch.tensor([True])],
    ids=str,
)
def test_other_stop_signals_are_counted_and_stop_nothing(host, stops):
    with start(host, poll_stop_signal_cb=lambda: stops) as manager:
        host.submit(request(1, [1], 5))
        assert host.final(1).error == ""
        assert manager.wait_idle(30)
        assert manager.health().callbacks["PollStopSignal"].errors == 5


@pytest.mark.parametrize("make", [itertools.count, functools.partial(itertools.repeat, 1)])
def test_an_endless_generator_of_stop_signals_is_an_error(host, make, monkeypatch):
    monkeypatch.setattr(received_requests, "MAX_YIELDED", 50)
    with start(host, slowly, poll_stop_signal_cb=make) as manager:
        host.submit(request(1, [1], 100))
        assert FinishReason(int(host.final(1).tensors["finish_reasons"])) is FinishReason.CANCELLED
        assert manager.wait_idle(30)
        assert manager.health().callbacks["PollStopSignal"].errors >= 1


def test_a_host_may_overwrite_its_arrays_when_get_is_called_again():
    arrays = {
        "input_ids": np.array([1, 2]),
        "request_output_len": np.array([6]),
        "embedding_bias": np.linspace(-1, 1, 100, dtype=np.float32),
        "bad_words_list": np.array([[[7], [1]]]),
    }
    used, waiting = [request(1, [1, 2], 6)], [InferenceRequest(2, arrays)]
    used[0].tensors.update(copy.deepcopy(arrays))
    answers = {}

    def get_requests(room):
        if not waiting:
            for array in arrays.values():
                array.fill(1)
            return [used.pop()] if used else []
        return [waiting.pop()]

    def send(request_id, tensors, is_final, error):
        answers[request_id] = error or dict(tensors)["output_ids"].tolist()

    keywords = {"get_inference_requests_cb": get_requests, "send_response_cb": send}
    model = ScriptedModel(lambda history: 7, vocab_size=100)  # 7 is banned: the bias decides
    with GptManager(model, ModelType.INFLIGHT_FUSED_BATCHING, **keywords) as manager:
        assert manager.wait_idle(10)
    assert answers[1] == answers[2] == [[[1, 2] + 6 * [99]]]


def test_an_integer_that_no_request_has_as_its_id_stops_nothing(host, tmp_path):
    """A recording could not have it."""
    stops = [-1, 2**64, -(2**70), 1]
    options = params(recording_path=tmp_path / "recording.jsonl")
    with start(host, slowly, options=options, poll_stop_signal_cb=lambda: stops) as manager:
        host.submit(request(1, [1], 100), request(2, [1], 5))
        assert FinishReason(int(host.final(1).tensors["finish_reasons"])) is FinishReason.CANCELLED
        assert host.final(2).error == ""
        assert manager.health().callbacks["PollStopSignal"].errors == 0
    recording = read_recording(tmp_path / "recording.jsonl")
    assert {stop for it in recording.iterations for stop in it.intake.stops} == {1}


def test_an_error_in_a_generator_of_stop_signals_is_logged_as_it_is(host, caplog):
    def ids():
        yield 7
        raise TypeError("of the host's own generator")

    with start(host, poll_stop_signal_cb=ids) as manager:
        host.submit(request(1, [1], 5))
        assert host.final(1).error == ""
        assert manager.wait_idle(30)
    assert "TypeError: of the host's own generator" in caplog.text


def test_a_stop_set_that_still_holds_a_finished_id_ends_its_next_life_only_by_a_new_poll(host):
    # Given a host that never takes an id out of its stop set
    with start(host, poll_stop_signal_cb=lambda: {1}):
        for length in (1, 2, 30, 1):
            host.submit(request(1, [1], length))
            until(lambda: not host._waiting and host.manager.wait_idle(30))
    # Then each life of the id has one final: complete if it ended before the poll, else cancelled
    reasons = [FinishReason(int(r.tensors["finish_reasons"])) for r in finals(host)]
    assert reasons == [FinishReason.LENGTH, *[FinishReason.CANCELLED] * 2, FinishReason.LENGTH]


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration])
@pytest.mark.parametrize("callback", ["get", "final", "poll", "stats"])
def test_nothing_that_a_callback_raises_ends_the_loop(host, callback, raised):
    name = {
        "get": "get_inference_requests",
        "final": "send_response",
        "poll": "poll_stop_signal",
        "stats": "return_batch_manager_stats",
    }[callback]
    once = [True]

    def fail(*args):
        answer = getattr(host, name)(*args)
        if once and not (callback == "get" and answer):
            once.pop()
            raise raised("of the host")
        return answer

    with start(host, **{f"{name}_cb": fail}) as manager:
        host.submit(request(1, [1], 4), request(2, [1], 4))
        assert host.final(1).error == host.final(2).error == ""
        assert manager.wait_idle(30) and manager.state is ManagerState.RUNNING
    assert not once


def test_an_id_may_be_used_again_from_its_final_callback_on(host):
    lives = []

    def send(request_id, tensors, is_final, error):
        host.send_response(request_id, tensors, is_final, error)
        if is_final and len(lives) < 60:
            lives.append(request(1, [len(lives)], 1 + len(lives) % 3, is_streaming=True))
            host.submit(lives[-1])

    checker = ContractChecker(host.get_inference_requests, send)
    with start(
        host,
        get_inference_requests_cb=checker.get_inference_requests,
        send_response_cb=checker.send_response,
    ) as manager:
        host.submit(request(1, [1], 2))
        assert manager.wait_idle(20)
    checker.check(manager)
    assert len(finals(host)) == 61 and not any(r.error for r in host.responses)


def test_a_huge_answer_of_get_is_taken_whole(host):
    answers = [[request(i, [i % 100], 2) for i in range(2000)]]
    options = params(
        max_batch_size=64, kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=4)
    )
    with start(
        host,
        options=options,
        get_inference_requests_cb=lambda room: answers.pop() if answers else (),
    ) as manager:
        assert manager.wait_idle(30)
    assert len(finals(host)) == 2000 and not any(r.error for r in host.responses)
    assert all(host.output(i) == [i % 100, *expected_output([i % 100], 2)] for i in (0, 999, 1999))


def test_an_endless_generator_of_requests_is_an_error_of_get(host, monkeypatch):
    """Those that it has yielded are served; memory does not grow without a limit."""
    monkeypatch.setattr(received_requests, "MAX_YIELDED", 50)
    yielded = itertools.count()

    def get(room):
        while True:
            yield request(next(yielded), [5], 2)

    options = params(max_get_failures=2, max_active_requests=None)
    with start(host, options=options, get_inference_requests_cb=get) as manager:
        assert manager.wait(20) and manager.state is ManagerState.FAILED
    told = "GetInferenceRequests has yielded more than 50 items: the rest is not read"
    assert told in str(manager.exception)
    assert next(yielded) == 153
    assert sorted(it.request_id for it in finals(host)) == list(range(153))


@pytest.mark.parametrize(
    ("make", "count"), [(iter, 50), (deque, 60), (lambda it: dict(enumerate(it)).values(), 60)]
)
def test_an_answer_that_is_complete_is_taken_whole(host, monkeypatch, make, count):
    """A generator may yield as many as the limit, and what has a length has no limit."""
    monkeypatch.setattr(received_requests, "MAX_YIELDED", 50)
    answers = [make([request(i, [5], 2) for i in range(count)])]
    options = params(max_active_requests=None)
    get = lambda room: answers.pop() if answers else ()  # noqa: E731
    with start(host, options=options, get_inference_requests_cb=get) as manager:
        assert manager.wait_idle(30)
        assert manager.health().callbacks["GetInferenceRequests"].errors == 0
    assert len(finals(host)) == count and not any(it.error for it in host.responses)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda get: ContractChecker(get, print).get_inference_requests,
        lambda get: PrometheusSink(model_name="a", registry=CollectorRegistry()).fetching(get),
        lambda get: bindings_manager._Ending(terminate_id=99).fetching(get),
    ],
    ids=["checker", "sink", "bindings"],
)
@pytest.mark.parametrize("make", [list, deque, lambda items: np.array(items, dtype=object)])
def test_a_complete_answer_in_a_wrapper_is_taken_whole(monkeypatch, wrap, make):
    monkeypatch.setattr(received_requests, "MAX_YIELDED", 50)
    given = [request(i, [5], 2) for i in range(60)]
    answer = wrap(lambda room: make(given))(-1)
    assert [*received_requests.items_of("GetInferenceRequests", answer)] == given


# A manager's methods, from everywhere ------------------------------------------------------------


def test_every_method_answers_from_every_callback_in_every_state(host):
    seen = set()
    manager = None

    def asking(callback):
        def ask_and_call(*args):
            if manager is not None:
                assert manager.audit().ok and manager.health().alive
                assert manager.explain(1).request_id == 1
                assert manager.exception is None and manager.notify() is None
                assert manager.wait(9) is False and manager.wait_idle(9) is False
                seen.add((callback.__name__, manager.state))
            return callback(*args)

        return ask_and_call

    def unended(history):  # before it is asked to drain
        while len(host.statistics) > 2 and not manager._inbox.is_to_end:
            time.sleep(0.001)
        return next_token(history)

    callbacks = {name: asking(callback) for name, callback in host.keywords().items()}
    manager = start(host, unended, **callbacks)
    host.submit(request(1, [1], 40, is_streaming=True))
    until(lambda: len(host.statistics) > 2)
    manager.shutdown()
    assert host.final(1, 0).error == ""
    assert manager.health().callbacks["ReturnBatchManagerStats"].errors == 0
    names = {callback.__name__ for callback in host.keywords().values()}
    assert {name for name, state in seen if state is ManagerState.RUNNING} == names
    assert {name for name, state in seen if state is ManagerState.DRAINING} == names - {
        "get_inference_requests"
    }


@pytest.mark.parametrize("seed", range(12))
def test_shutdowns_from_several_threads_leave_each_request_one_final(host, seed):
    rng = random.Random(seed)
    manager = start(host, slowly, params(max_active_requests=None, run_ahead=seed % 2))
    ids = range(rng.randrange(8))
    host.submit(*(request(i, [1], rng.randint(1, 60), is_streaming=i % 2 == 0) for i in ids))
    time.sleep(rng.random() * 0.02)

    def end(drain, timeout):
        manager.shutdown(drain, timeout)
        assert manager.wait(30)

    threads = [
        threading.Thread(target=end, args=(rng.random() < 0.5, rng.choice([None, 0, 0.01, 0.1])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert manager.state is ManagerState.STOPPED and manager.wait_idle(0)
    answered = [response.request_id for response in finals(host)]
    assert sorted(answered + [r.request_id for r in host._waiting]) == list(ids)
    assert manager.audit().ok and not manager.audit().used_blocks


def test_a_shutdown_that_get_asks_for_aborts_what_it_returns(host):
    manager = None

    def get(room):
        taken = host.get_inference_requests(room)
        if taken:
            manager.shutdown(drain=False)
        return taken

    manager = start(host, get_inference_requests_cb=get)
    host.submit(request(1, [1], 100), request(2, [1], 100))
    assert manager.wait(30) and manager.state is ManagerState.STOPPED
    assert sorted(r.request_id for r in finals(host)) == [1, 2]
    assert all(r.error.startswith("ManagerDeadError") for r in finals(host))


def test_a_hung_callback_keeps_its_thread_but_not_the_caller_of_shutdown(host):
    entered, released = threading.Event(), threading.Event()

    def hang():
        entered.set()
        released.wait()
        return set()

    manager = start(host, poll_stop_signal_cb=hang)
    host.submit(request(1, [1], 50))
    assert entered.wait(30)
    manager.shutdown(timeout=0.05)  # returns
    assert manager.health().alive and not finals(host)
    released.set()
    assert manager.wait(30) and manager.state is ManagerState.STOPPED
    assert len(finals(host)) == 1


# Custom schedulers -------------------------------------------------------------------------------


class PrintedScheduler(CapacityScheduler):
    """TensorRT-LLM's documents print it (Apache-2.0); but for line breaks it is unchanged."""

    no_schedule_until_state = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state = LlmRequestState.GENERATION_COMPLETE

    def __init__(self, max_num_requests: int, kv_cache_manager):
        super().__init__()
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager

    def schedule_request(
        self, active_requests: RequestList
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        scheduled_requests = []
        pending_requests = []
        reserved_blocks = 0
        max_blocks = self.kv_cache_manager.get_max_resource_count()
        for request in active_requests:  # noqa: F402
            req_state = request.state
            # if request cannot be scheduled yet or request should no longer be scheduled, skip
            if (
                req_state.value < self.no_schedule_until_state.value
                or req_state.value >= self.no_schedule_after_state.value
            ):
                continue

            if len(scheduled_requests) >= self.max_num_requests or reserved_blocks >= max_blocks:
                break
            elif (
                req_state == LlmRequestState.GENERATION_IN_PROGRESS
                or req_state == LlmRequestState.GENERATION_TO_COMPLETE
            ):
                scheduled_requests.append(request)
                reserved_blocks += self.kv_cache_manager.get_needed_resource_to_completion(request)
            else:
                pending_requests.append(request)

        avaiable_blocks = max_blocks - reserved_blocks
        for request in pending_requests:
            req_state = request.state
            if len(scheduled_requests) >= self.max_num_requests:
                break
            elif req_state == LlmRequestState.CONTEXT_INIT:
                needed_blocks = self.kv_cache_manager.get_needed_resource_to_completion(request)
                if needed_blocks <= avaiable_blocks:
                    scheduled_requests.append(request)
                    avaiable_blocks -= needed_blocks
                elif needed_blocks > avaiable_blocks:
                    # If one requests fails to be scheduled, break
                    break

        assert len(scheduled_requests) > 0, (
            "no pending request can get enough resource to complete, "
            "please increase KV cache pool size."
        )
        return scheduled_requests, []


@pytest.mark.parametrize("tokens_per_block", [1, 4])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_printed_scheduler_runs_live_over_a_tight_pool(host, tokens_per_block, chunked):
    def create_scheduler(max_num_requests, kv_cache_manager, micro_batch_scheduler, **limits):
        assert limits == {"max_batch_size": 4, "max_num_tokens": 16 if chunked else 64}
        capacity = PrintedScheduler(max_num_requests, kv_cache_manager)
        return SimpleScheduler(capacity, micro_batch_scheduler)

    options = params(
        max_active_requests=None,
        enable_chunked_context=chunked,
        max_num_tokens=16 if chunked else 64,
        kv_cache_config=KvCacheConfig(max_tokens=60, tokens_per_block=tokens_per_block),
    )
    lengths = [(3 + 5 * (i % 4), 4 + 3 * (i % 5)) for i in range(24)]
    config = SchedulerConfig(create_scheduler=create_scheduler)
    with start(host, options=options, config=config) as manager:
        host.submit(*(request(i, [i + 1] * p, n) for i, (p, n) in enumerate(lengths)))
        assert manager.wait_idle(20)
    for i, (p, n) in enumerate(lengths):
        prompt = [i + 1] * p
        assert host.output(i) == prompt + expected_output(prompt, n)
    assert not manager.audit().used_blocks


class Idler(RequestScheduler):
    """Lets nobody run, ever."""

    def schedule_request(self, active_requests, inflight_request_ids):
        return SchedulerOutput([], [], [])


def test_a_scheduler_that_lets_no_request_run_neither_spins_nor_delays_a_shutdown(host):
    config = SchedulerConfig(create_scheduler=lambda **arguments: Idler())
    manager = start(host, config=config)
    host.submit(request(1, [1], 5), request(2, [1], 5, deadline_s=0.1))
    assert FinishReason(int(host.final(2).tensors["finish_reasons"])) is FinishReason.TIMED_OUT
    asked, started = len(host.rooms), time.monotonic()
    time.sleep(0.2)
    assert len(host.rooms) - asked < 300 * (time.monotonic() - started)
    assert manager.explain(1).reason == "not_chosen"
    manager.shutdown(timeout=0.05)
    assert host.final(1).error.startswith("ManagerDeadError")


@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("max_batch_size", [1, 2])
def test_one_token_blocks_and_tiny_batches_serve_all(host, policy, run_ahead, max_batch_size):
    options = params(
        max_batch_size=max_batch_size,
        max_active_requests=8,
        run_ahead=run_ahead,
        kv_cache_config=KvCacheConfig(max_tokens=40, tokens_per_block=1),
    )
    lengths = [(1 + 3 * i, 4 + i) for i in range(8)]
    with start(host, options=options, config=SchedulerConfig(policy)) as manager:
        host.submit(*(request(i, [i + 1] * p, n) for i, (p, n) in enumerate(lengths)))
        assert manager.wait_idle(20)
    for i, (p, n) in enumerate(lengths):
        prompt = [i + 1] * p
        assert host.output(i) == prompt + expected_output(prompt, n)


# Processes, threads, other managers --------------------------------------------------------------


def test_managers_in_one_process_may_share_a_model():
    kernels = CpuKernels(deterministic=True)
    kernels.warm_up()
    shared = load_model(checkpoint(random_model(CONFIGS["llama"])), kernels=kernels)
    options = params(deterministic=True, kv_cache_config=KvCacheConfig(1024, tokens_per_block=8))
    prompts = [[(7 * i + j) % 96 for j in range(3 + 5 * i)] for i in range(6)]

    def start_one():
        host = RecordingCallbacks(request(i, prompt, 12) for i, prompt in enumerate(prompts))
        manager = GptManager(shared, FUSED, optional_params=options, **host.keywords())
        return host, manager

    alone, manager = start_one()
    assert manager.wait_idle(30)
    pairs = [start_one() for _ in range(3)]
    for host, other in pairs:
        assert other.wait_idle(30)
        assert [host.output(i) for i in range(6)] == [alone.output(i) for i in range(6)]
    for shut in (manager, *(other for _, other in pairs)):
        shut.shutdown()


def test_a_manager_that_was_shut_down_is_forgotten_with_its_threads_and_files():
    def live_and_die():
        host = RecordingCallbacks([request(1, [1], 2)])
        manager = start(host)
        assert host.final(1).error == ""
        manager.shutdown()
        host.manager = None
        return weakref.ref(manager)

    live_and_die()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    dead = [live_and_die() for _ in range(30)]
    gc.collect()
    assert not any(reference() for reference in dead)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_host_that_hogs_the_interpreter_lock_slows_but_does_not_stop(host):
    released = threading.Event()

    def hog():
        while not released.is_set():
            sum(range(1000))

    thread = threading.Thread(target=hog)
    thread.start()
    try:
        with start(host) as manager:
            host.submit(*(request(i, [i], 10, is_streaming=True) for i in range(4)))
            assert manager.wait_idle(30)
    finally:
        released.set()
        thread.join()
    assert [host.output(i) for i in range(4)] == [expected_output([i], 10) for i in range(4)]


def test_a_ctrl_c_in_the_constructor_leaves_no_thread_and_calls_no_callback(host, monkeypatch):
    assemble = manager_module.assemble

    ask_to_end, is_asked = Inbox.ask_to_end, threading.Event()

    def interrupted_assemble(*arguments):
        os.kill(os.getpid(), signal.SIGINT)  # handled by the main thread
        assert is_asked.wait(30)
        return assemble(*arguments)

    def asked_to_end(inbox, **how):
        ask_to_end(inbox, **how)
        is_asked.set()

    monkeypatch.setattr(manager_module, "assemble", interrupted_assemble)
    monkeypatch.setattr(Inbox, "ask_to_end", asked_to_end)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        start(host)
    assert set(threading.enumerate()) <= before
    assert host.rooms == []


EXITS = """
import os, sys, threading, time
from gptmanager import GptManager, InferenceRequest, ModelType
from gptmanager.testing import RecordingCallbacks, ScriptedModel

def script(history):
    time.sleep(0.001)
    return 1

loaded = set()

class Host(RecordingCallbacks):
    def get_inference_requests(self, room):
        loaded.update(() if loaded else sys.modules)
        return super().get_inference_requests(room)

def start():
    host = Host(InferenceRequest.from_tokens(i, [1], 1000) for i in range(8))
    keywords = host.keywords()
    manager = GptManager(ScriptedModel(script), ModelType.INFLIGHT_FUSED_BATCHING, **keywords)
    while not host.statistics:
        time.sleep(0.001)
    return manager

def on_an_exception():
    start()
    raise ValueError("of the host")

def in_another_thread():
    thread = threading.Thread(target=start)
    thread.start()
    if (3, 12) <= sys.version_info < (3, 12, 2):  # they start no thread after the main one's end
        thread.join()

def in_a_forked_child():
    manager = start()
    if os.fork() == 0:
        assert not manager.health().alive
        sys.exit(0)
    assert os.wait()[1] == 0 and manager.health().alive and manager.audit().ok

def in_a_fork_that_never_meets_half_a_module():
    start()  # a fork while the loop imports would inherit half a module
    assert sys.modules.keys() == loaded

def with_modules_that_lose_their_names():
    manager = start()
    time.keeper = lambda: manager  # a module of C is emptied after all others

ways = {
    on_an_exception: 1,
    in_another_thread: 0,
    in_a_forked_child: 0,
    in_a_fork_that_never_meets_half_a_module: 0,
    with_modules_that_lose_their_names: 0,
}
children = {}
for way in ways:  # forked, so that torch is imported once; each ends as an interpreter of its own
    child = os.fork()
    if child == 0:
        break
    children[child] = way
else:
    for _ in ways:
        child, status = os.wait()
        assert os.waitstatus_to_exitcode(status) == ways[children[child]], children[child]
    sys.exit(0)
way()
"""


@pytest.mark.timeout(240)
def test_an_interpreter_may_exit_while_a_manager_runs():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EXITS],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Traceback") == 1 and "ValueError: of the host" in done.stderr
    assert "Fatal Python error" not in done.stderr


def test_a_failed_manager_refuses_and_its_failure_is_the_cause(host):
    def explode(history):
        raise SystemExit("not even this")

    manager = start(host, explode)
    host.submit(request(1, [1], 5))
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    assert "SystemExit: not even this" in host.final(1).error
    with pytest.raises(ManagerDeadError) as caught:
        manager.notify()
    assert isinstance(caught.value.__cause__, SystemExit)
