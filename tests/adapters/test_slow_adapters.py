"""Requests that end while a thread reads their adapters, in whole managers; the others go on."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from adapter_runs import texts_of
from pausing import PausingHost
from tuned_models import cache_of, tuned

from gptmanager import (
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
)
from gptmanager.host import background_jobs
from gptmanager.kernels import compiled_bodies
from gptmanager.testing import ContractChecker, RecordingCallbacks

PROMPT = [5, 6, 7]


class Slow(torch.Tensor):
    """A thread that reads its numbers for a manager waits."""

    read, goes_on = threading.Event(), threading.Event()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if threading.current_thread().name.startswith("gptmanager-put"):
            cls.read.set()
            assert cls.goes_on.wait(60)
        return super().__torch_function__(function, types, args, kwargs or {})


def request(number, length, tensors, **limits):
    tensors = {"input_ids": PROMPT, "request_output_len": length} | tensors
    return InferenceRequest(number, tensors, **limits)


@pytest.fixture
def made():
    Slow.read.clear()
    Slow.goes_on.clear()
    yield tuned("llama", (1, 8))
    Slow.goes_on.set()


def managed(made, host):
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=400, tokens_per_block=4),
        peft_cache_manager_config=cache_of("llama", 40, 40),
        max_batch_size=4,
        max_seq_len=64,
        exclude_input_in_output=True,
    )
    callbacks = checker.get_inference_requests, checker.send_response, host.poll_stop_signal
    return checker, GptManager(
        made.source, ModelType.INFLIGHT_FUSED_BATCHING, 1, None, *callbacks, None, params
    )


def test_stops_and_deadlines_while_an_adapter_is_read(made):
    weights = made.lora(1)
    slow = weights | {"lora_weights": weights["lora_weights"].as_subclass(Slow)}
    host = RecordingCallbacks()
    checker, manager = managed(made, host)
    with manager:
        host.submit(request(1, 4, slow), request(2, 4, slow | {"lora_task_id": 9}, deadline_s=0.2))
        host.submit(request(3, 4, {"lora_task_id": 1}, queue_timeout_s=0.2))
        assert Slow.read.wait(30)
        host.submit(request(4, 40, {}))
        assert made.is_greedy(None, PROMPT, texts_of(host.final(4))[0]), "nobody waits for them"
        host.stop(1)
        host.submit(request(5, 4, {}))  # a stop is asked for after an iteration
        reasons = [int(host.final(n).tensors["finish_reasons"]) for n in (1, 2, 3)]
        assert reasons == [FinishReason.CANCELLED, FinishReason.TIMED_OUT, FinishReason.TIMED_OUT]
        host.submit(request(6, 4, weights))
        while manager.explain(6).reason == "unknown":
            time.sleep(0.001)
        assert manager.explain(6).reason == "preparing" and manager.audit().ok
        Slow.goes_on.set()
        assert made.is_greedy(1, PROMPT, texts_of(host.final(6))[0])
        assert manager.wait_idle(30) and manager.audit().ok
        checker.check(manager)
    assert not manager._host.adapter_loader.jobs.pending


def test_a_manager_ends_while_an_adapter_is_read(made):
    weights = made.lora(1)
    host = RecordingCallbacks()
    host.submit(
        request(1, 4, weights | {"lora_weights": weights["lora_weights"].as_subclass(Slow)})
    )
    _, manager = managed(made, host)
    assert Slow.read.wait(30)
    manager.shutdown(drain=False, timeout=30)
    assert host.final(1).error


def test_kernels_of_adapters_are_compiled_with_the_first_adapter(made, monkeypatch):
    """On the thread that reads it, while requests without adapters run."""
    compiled, compile_all = [], compiled_bodies.compile_all

    def watched(bodies, on_progress=None):
        if names := [body.__name__ for body in bodies]:
            compiled.append((threading.current_thread().name.rpartition("_")[0], names))
        compile_all(bodies, on_progress)

    monkeypatch.setattr(compiled_bodies, "compile_all", watched)
    compiled_bodies.compile_for_adapters.cache_clear()
    Slow.goes_on.set()
    host = RecordingCallbacks([request(1, 3, {})])
    _, manager = managed(made, host)
    with manager:
        assert manager.wait_idle(60)
        assert compiled == []
        for number in (0, 1):
            host.submit(request(2 + number, 3, made.lora(number)))
        assert manager.wait_idle(60)
    assert compiled == [("gptmanager-put", ["add", "plan_runs"])]


def test_the_loop_helps_between_its_steps(made, monkeypatch):
    """On a machine where steps want all cores, the tokens are those of merged weights."""
    monkeypatch.setattr(background_jobs, "num_cores", lambda: 1)
    for name in ("_LEAST_BUSY_S", "_MOST_BUSY_S"):
        monkeypatch.setattr(background_jobs, name, 600)
    turns = []
    take_turn = background_jobs.BackgroundJobs._work_after_step
    monkeypatch.setattr(
        background_jobs.BackgroundJobs,
        "_work_after_step",
        lambda self, step_s: turns.append(take_turn(self, step_s)),
    )
    compiled_bodies.compile_for_adapters()
    host = PausingHost(lambda of_all, *_: of_all == 1)
    checker, host.manager = managed(made, host)
    with host.manager as manager:
        host.submit(*(request(n, 60, {}, is_streaming=True) for n in range(3)))
        while not host.responses:
            time.sleep(0.001)
        host.submit(request(7, 5, made.lora(0)), request(8, 5, made.lora(1)))
        loop, jobs = manager._worker.loop, manager._host.adapter_loader.jobs
        forward = loop.forward

        def hold(schedule):  # no step ends before a thread has begun to read
            while not (jobs.pending or turns):
                time.sleep(0.001)
            return forward(schedule)

        monkeypatch.setattr(loop, "forward", hold)
        manager.resume_generation()
        for number, task in ((7, 0), (8, 1)):
            assert made.is_greedy(task, PROMPT, texts_of(host.final(number))[0])
        checker.check(manager)
    assert turns


def test_an_adapter_that_comes_just_after_steps_is_read_at_once(made, monkeypatch):
    """No step follows, so that nobody else reads it, however long steps count as running."""
    for name in ("_LEAST_BUSY_S", "_MOST_BUSY_S", "_LOOK_UP_S"):
        monkeypatch.setattr(background_jobs, name, 600)
    monkeypatch.setattr(background_jobs, "num_cores", lambda: 1)
    host = RecordingCallbacks()
    checker, manager = managed(made, host)
    with manager:
        for number, task in ((1, None), (2, 0), (3, None), (4, 1)):
            host.submit(request(number, 4, made.lora(task)))
            assert made.is_greedy(task, PROMPT, texts_of(host.final(number))[0])
        checker.check(manager)
