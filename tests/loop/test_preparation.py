"""Requests that wait for their logits post-processor: nobody else does, and any end still works."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from loop_driver import LoopDriver, expected_output

from gptmanager import (
    GptManager,
    InferenceRequest,
    ManagerState,
    ModelType,
    OptionalParams,
)
from gptmanager.errors import InvalidRequestError
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.request.llm_request import LlmRequestState
from gptmanager.simulator import simulate
from gptmanager.simulator.cost_model import CostModel
from gptmanager.simulator.load import RecordedLoad
from gptmanager.step import Failure
from gptmanager.testing import RecordingCallbacks, ScriptedModel


class Slow:
    """Ready when its future is. Chooses token 7."""

    def __init__(self):
        self.future = Future()
        self.asked = threading.Event()

    def prepare(self, device):
        self.asked.set()
        return self.future

    def __call__(self, request_id, logits, tokens, stream, client_id):
        assert self.future.done()
        logits[0, 0, 7] = 1e6


def request(request_id, max_new_tokens=4, **more):
    return InferenceRequest.from_tokens(request_id, [request_id, 2, 3], max_new_tokens, **more)


# In the loop --------------------------------------------------------------------------------------


def driver_with(*requests, **options):
    driver = LoopDriver(**options)
    driver.submit(*requests)
    return driver


def test_only_the_unprepared_request_waits_in_a_state_of_its_own():
    driver = driver_with(request(1, logits_post_processor=Slow()), request(2))
    for _ in range(4):
        driver.loop.iterate()
    assert driver.output(2)[3:] == expected_output([2, 2, 3], 4)
    waiting = driver.loop.table.by_id[1]
    assert waiting.state is LlmRequestState.PREPARING and waiting.slot < 0
    assert not driver.loop.iterate()  # nothing to do, and no scheduler was asked
    driver.host.ready.append(1)
    driver.run()
    assert driver.output(1)[3:] == expected_output([1, 2, 3], 4)


def test_a_scheduler_sees_those_that_can_run_only():
    seen = []

    class Watching:
        def __init__(self, scheduler):
            self.schedule_request = self.watch
            self.inner = scheduler

        def watch(self, active, in_flight):
            seen.append([one.request_id for one in active])
            return self.inner.schedule_request(active, in_flight)

    driver = driver_with(request(1, logits_post_processor=Slow()), request(2), scheduler=Watching)
    driver.loop.iterate()
    assert seen == [[2]]


def test_one_that_is_ready_on_arrival_does_not_wait():
    driver = driver_with(request(1, logits_post_processor=Slow()))
    driver.host.ready.append(1)
    driver.run()
    assert not driver.host.preparing and driver.output(1)[3:] == expected_output([1, 2, 3], 4)


def test_what_fails_to_get_ready_ends_its_request():
    driver = driver_with(request(1, logits_post_processor=Slow()), request(2))
    driver.loop.iterate()
    driver.host.failures.append(Failure(1, InvalidRequestError("no such rule")))
    driver.run()
    assert driver.final(1).error == "InvalidRequestError: no such rule"
    assert driver.output(2)[3:] == expected_output([2, 2, 3], 4)


@pytest.mark.parametrize(
    ("reason", "more"), [(5, {}), (4, {"deadline_s": 2.5}), (4, {"queue_timeout_s": 2.5})]
)
def test_a_stop_or_a_deadline_while_it_waits(reason, more):
    driver = driver_with(request(1, logits_post_processor=Slow(), **more))
    driver.loop.iterate()
    if not more:
        driver.host.stops.add(1)
    driver.run(10)
    assert driver.final(1).tensors["finish_reasons"].tolist() == [[reason]]
    assert driver.final(1).tensors["sequence_length"].tolist() == [[3]]
    # what is ready too late means nothing, also to the next request of that id
    driver.submit(request(1, logits_post_processor=Slow()))
    driver.loop.iterate()
    assert driver.loop.table.by_id[1].state is LlmRequestState.PREPARING


def test_a_duplicate_id_changes_nothing():
    driver = driver_with(request(1, logits_post_processor=Slow()))
    driver.loop.iterate()
    driver.submit(request(1, 9))
    driver.loop.iterate()
    assert driver.host.callbacks.of(1)[0].error.startswith("DuplicateRequestIdError")
    driver.host.ready.append(1)
    driver.run()
    assert driver.output(1)[3:] == expected_output([1, 2, 3], 4)


# In a manager -------------------------------------------------------------------------------------


def manager_of(host, **options):
    manager = GptManager(
        ScriptedModel(lambda history: (history[-1] + 1) % 50, vocab_size=50),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(max_batch_size=4, **options),
        **host.keywords(),
    )
    host.manager = manager
    return manager


def test_a_manager_wakes_when_it_is_ready():
    slow, host = Slow(), RecordingCallbacks()
    # Given an idle manager that nobody wakes but its host
    with manager_of(host, idle_poll_s=None) as manager:
        host.submit(request(1, logits_post_processor=slow), request(2))
        assert not host.final(2).error
        assert not manager.wait_idle(0.01)  # the other one is active
        explanation = manager.explain(1)
        assert (
            explanation.reason == "preparing" and "post-processor Slow is ready" in explanation.text
        )
        # When the processor gets ready in another thread
        slow.future.set_result(None)
        # Then the request runs
        assert host.final(1).tensors["output_ids"][0, 0, 3:].tolist() == [7] * 4


def test_the_error_that_its_future_holds_ends_the_request():
    slow, broken, host = Slow(), Slow(), RecordingCallbacks()
    slow.future.set_exception(InvalidRequestError("rule 3 is no rule"))
    broken.future.set_exception(OSError("no disk"))
    cancelled = Slow()
    cancelled.future.cancel()
    with manager_of(host):
        host.submit(
            request(1, logits_post_processor=slow),
            request(2, logits_post_processor=broken),
            request(3, logits_post_processor=cancelled),
            request(4),
        )
        assert host.final(1).error == "InvalidRequestError: rule 3 is no rule"
        text = "CallbackError: logits_post_processor Slow cannot be prepared: "
        assert host.final(2).error == f"{text}OSError: no disk"
        assert host.final(3).error.startswith(f"{text}CancelledError")
        assert not host.final(4).error


def test_a_prepare_that_raises_or_gives_no_future_ends_its_request(caplog):
    class Raises(Slow):
        def prepare(self, device):
            raise ValueError(f"not on {device}")

    class NoFuture(Slow):
        def prepare(self, device):
            return None

    host = RecordingCallbacks()
    with manager_of(host):
        host.submit(
            request(1, logits_post_processor=Raises()), request(2, logits_post_processor=NoFuture())
        )
        assert host.final(1).error.endswith("cannot be prepared: ValueError: not on cpu")
        assert "NoFuture cannot be prepared: AttributeError" in host.final(2).error
    told = "Raises of request 1 cannot be prepared\nTraceback "
    assert told in caplog.text and "\nValueError: not on cpu" in caplog.text


def test_what_gets_ready_for_a_request_that_has_ended_is_ignored():
    first, second, host = Slow(), Slow(), RecordingCallbacks()
    with manager_of(host) as manager:
        host.submit(request(1, logits_post_processor=first))
        assert first.asked.wait(30)
        host.stop(1)
        assert host.final(1).tensors["finish_reasons"].tolist() == [[5]]
        host.responses.clear()
        host.submit(request(1, logits_post_processor=second))
        assert second.asked.wait(30) and manager.explain(1).reason == "preparing"
        first.future.set_result(None)
        host.submit(request(2))
        assert not host.final(2).error and manager.explain(1).reason == "preparing"
        host.responses.clear()
        second.future.set_result(None)
        assert host.final(1).tensors["output_ids"][0, 0, 3:].tolist() == [7] * 4
        assert manager.wait_idle(30)
    assert len(host.responses) == 1


def test_what_is_ready_on_arrival_is_so_for_its_own_request_only():
    slow, ready, host = Slow(), Slow(), RecordingCallbacks()
    ready.future.set_result(None)
    with manager_of(host) as manager:
        # Given a request that waits, and another one under its id
        host.submit(request(1, logits_post_processor=slow))
        assert slow.asked.wait(30) and manager.explain(1).reason == "preparing"
        host.submit(request(1, logits_post_processor=ready), request(2))
        assert not host.final(2).error
        assert [r.error.partition(":")[0] for r in host.of(1)] == ["DuplicateRequestIdError"]
        assert manager.explain(1).reason == "preparing"
        slow.future.set_result(None)
        assert manager.wait_idle(30) and not host.of(1)[-1].error
        # or two of one id in one answer of Get
        host.responses.clear()
        late = Slow()
        host.submit(request(3, logits_post_processor=late), request(3, logits_post_processor=ready))
        assert late.asked.wait(30) and manager.explain(3).reason == "preparing"
        late.future.set_result(None)
        assert manager.wait_idle(30) and not host.of(3)[-1].error


@pytest.mark.parametrize("drain", [True, False])
def test_a_shutdown_while_it_waits(drain):
    slow, host = Slow(), RecordingCallbacks()
    manager = manager_of(host)
    host.submit(request(1, logits_post_processor=slow))
    assert slow.asked.wait(30)
    manager.explain(1)  # an iteration has passed
    manager.shutdown(drain=drain, timeout=0.0 if drain else None)
    slow.future.set_result(None)  # behind the end of the manager
    assert manager.state is ManagerState.STOPPED and len(host.responses) == 1
    assert host.final(1).error == "ManagerDeadError: the manager was shut down"


def test_a_recorded_run_replays_and_can_be_simulated(tmp_path):
    path, host = tmp_path / "run.jsonl", RecordingCallbacks()
    late, early, wrong = Slow(), Slow(), Slow()
    early.future.set_result(None)
    with manager_of(host, recording_path=path) as manager:
        host.submit(
            request(1, logits_post_processor=late, client_id=3),
            request(2, logits_post_processor=early),
            request(3, logits_post_processor=wrong),
            request(4, 9),
        )
        host.final(4)
        late.future.set_result(None)
        wrong.future.set_exception(InvalidRequestError("wrong"))
        assert manager.wait_idle(30)
    recording = read_recording(path)
    ready = [i.intake.ready for i in recording.iterations if i.intake.ready]
    assert ready == [(2,), (1,)]
    report = replay(recording)
    assert report.divergence is None and report.compared == len(recording.iterations)
    blueprint = recording.header.blueprint
    figures = simulate(blueprint, RecordedLoad(recording), CostModel(0.001))
    assert figures.requests == 4
