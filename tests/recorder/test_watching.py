"""A manager that is watched: what is told of a loop, and that nothing is told unasked."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future

import pytest
from loop_driver import ForcedPauses, LoopDriver

from gptmanager import (
    REQUEST_METRICS,
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.errors import ManagerDeadError
from gptmanager.manager.watching import Arrival, Beginning, Ending, Ran, Watchers
from gptmanager.recorder.taps import ExecutorTap, HostTap
from gptmanager.statistics import Counts
from gptmanager.testing import RecordingCallbacks, ScriptedModel


def managed(host, policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, **options):
    return GptManager(
        ScriptedModel(lambda history: 1, vocab_size=4),
        ModelType.INFLIGHT_FUSED_BATCHING,
        scheduler_config=SchedulerConfig(policy),
        **host,
        optional_params=OptionalParams(black_box_iterations=0, **options),
    )


def request(request_id, prompt_len=4, max_new_tokens=6, **by_name):
    return InferenceRequest.from_tokens(request_id, [1] * prompt_len, max_new_tokens, **by_name)


def test_requests_come_run_and_end_in_order():
    host, events = RecordingCallbacks(), deque()
    with managed(host.keywords(), max_batch_size=3) as manager:
        manager.watch(events.append)
        host.submit(request(7), request(8, 2, 3), request(9, priority=0.9), request(10, 4, 0))
        assert manager.wait_idle(20)

    beginning = events.popleft()
    assert isinstance(beginning, Beginning) and beginning.max_batch_size == 3
    arrivals = [event for event in events if isinstance(event, Arrival)]
    lengths = [(it.request_id, it.prompt_len, it.max_new_tokens, it.priority) for it in arrivals]
    assert sorted(lengths) == [(7, 4, 6, 0.5), (8, 2, 3, 0.5), (9, 4, 6, 0.9)]
    for request_id, generated in ((7, 6), (8, 3)):
        own = [event for event in events if concerns(event, request_id)]
        assert isinstance(own[0], Arrival) and isinstance(own[-1], Ending)
        ran = own[1:-1]
        assert [bool(it.context_rows) for it in ran] == [True] + [False] * (generated - 1)
        assert own[-1].outcome == "LENGTH"
        metrics = dict(zip(REQUEST_METRICS, own[-1].metrics, strict=True))
        assert metrics["generated_tokens"] == generated and metrics["first_token_s"] > 0
    refused = [event for event in events if concerns(event, 10)]
    assert refused == [Ending(10, "InvalidRequestError")]
    ran = [event for event in events if isinstance(event, Ran)]
    assert [it.iteration for it in ran] == list(range(len(ran)))
    counts = [event for event in events if isinstance(event, Counts)]
    assert [it.iteration for it in counts] == [it.iteration for it in ran]


def concerns(event, request_id):
    if isinstance(event, Ran):
        return request_id in {
            row.request_id for row in (*event.context_rows, *event.generation_rows)
        }
    return getattr(event, "request_id", None) == request_id


def test_a_duplicate_does_not_arrive_and_ends_no_other_request():
    driver, events = LoopDriver(), []
    Watchers().add(driver.loop, events.append)
    driver.submit(request(7), request(7))  # the second is refused, and so is the third below
    driver.loop.iterate()
    driver.submit(request(7))
    driver.run()
    told = [it for it in events if isinstance(it, (Arrival, Ending))]
    duplicate = Ending(7, "DuplicateRequestIdError")
    assert isinstance(told[0], Arrival) and told[1:3] == [duplicate] * 2
    assert [it.outcome for it in told[3:]] == ["LENGTH"]


def test_requests_after_a_refused_one_of_their_intake_arrive():
    driver, events = LoopDriver(), []
    Watchers().add(driver.loop, events.append)
    driver.submit(request(1), request(2, 4, 0), request(3))  # the second asks for nothing
    driver.run()
    told = [type(it) for it in events if isinstance(it, (Arrival, Ending)) and it.request_id == 3]
    assert told == [Arrival, Ending]
    assert [it.request_id for it in events if isinstance(it, Arrival)] == [1, 3]


def test_the_progress_of_an_active_request_counts_what_it_generated_before_a_pause():
    driver, events = LoopDriver(scheduler=ForcedPauses), []
    driver.submit(request(1, 4, 9))
    for _ in range(3):
        driver.loop.iterate()
    driver.loop.scheduler.victims.add(1)
    for _ in range(3):
        driver.loop.iterate()
    Watchers().add(driver.loop, events.append)
    _, arrival = events
    assert (arrival.pause_count, arrival.num_generated) == (
        1,
        len(driver.loop.active[0].tokens) - 4,
    )


class Unready:
    """A processor that is never ready."""

    def prepare(self, device):
        return Future()

    def __call__(self, *arguments):
        pass


def test_a_request_that_waits_while_nothing_runs_arrives_all_the_same():
    driver, events = LoopDriver(), []
    Watchers().add(driver.loop, events.append)
    driver.submit(request(1, logits_post_processor=Unready()))
    for _ in range(2):
        driver.loop.iterate()
    assert [type(event) for event in events] == [Beginning, Arrival]


def test_a_watch_that_begins_late_sees_the_present_requests():
    host, constructed, events = RecordingCallbacks([request(1), request(2)]), Future(), []

    def after_two_steps(record):
        manager = constructed.result(20)
        if '"Iteration Counter":1,' in record:
            manager.watch(events.append)

    keywords = {**host.keywords(), "return_batch_manager_stats_cb": after_two_steps}
    with managed(keywords, max_batch_size=1) as manager:
        constructed.set_result(manager)
        assert manager.wait_idle(20)

    assert isinstance(events[0], Beginning) and events[0].iteration == 2
    first = events[1]
    assert (first.request_id, first.holds_memory, first.num_generated) == (1, True, 2)
    assert [event.outcome for event in events if isinstance(event, Ending)] == ["LENGTH"] * 2
    assert next(event for event in events if isinstance(event, Ran)).iteration == 2


def test_a_watcher_that_is_added_again_begins_anew_and_gets_each_event_once():
    host, events = RecordingCallbacks(), deque()
    with managed(host.keywords()) as manager:
        for _ in range(2):
            manager.watch(events.append)
        host.submit(request(7))
        assert manager.wait_idle(20)
    assert [type(event) for event in list(events)[:3]] == [Beginning, Beginning, Arrival]
    assert sum(concerns(event, 7) and isinstance(event, Ending) for event in events) == 1


def test_an_unwatched_loop_has_no_taps():
    host = RecordingCallbacks()
    with managed(host.keywords()) as manager:
        loop = manager._worker.loop
        bare = loop.table.host, loop.executor
        assert not isinstance(bare[0], HostTap) and not isinstance(bare[1], ExecutorTap)
        one, other = [], []
        manager.watch(one.append)
        assert isinstance(loop.table.host, HostTap) and isinstance(loop.executor, ExecutorTap)
        taps = loop.table.host, loop.executor
        manager.watch(other.append)
        assert (loop.table.host, loop.executor) == taps
        manager.unwatch(one.append)
        host.submit(request(1))
        assert manager.wait_idle(20)
        assert len(one) == 1 and len(other) > 10
        manager.unwatch(other.append)
        manager.unwatch(other.append)
        assert (loop.table.host, loop.executor) == bare
    manager.unwatch(other.append)
    with pytest.raises(ManagerDeadError):
        manager.watch(other.append)


def test_a_watch_that_could_not_end_in_time_ends_when_the_loop_goes_on():
    host, events, calls, gate = RecordingCallbacks(), [], threading.Event(), threading.Event()

    def next_token(history):
        calls.set()
        gate.wait(20)
        return 1

    model, fused = ScriptedModel(next_token), ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(model, fused, **host.keywords()) as manager:
        loop = manager._worker.loop
        bare = loop.table.host, loop.executor
        manager.watch(events.append)
        host.submit(request(1))
        assert calls.wait(20)
        with pytest.raises(TimeoutError, match="unwatch"):
            manager.unwatch(events.append, 0.01)
        gate.set()
        assert manager.wait_idle(20)
        assert (loop.table.host, loop.executor) == bare
        seen = len(events)
        host.submit(request(2))
        assert manager.wait_idle(20) and len(events) == seen


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError, SystemExit])
def test_a_raising_watch_harms_no_other(caplog, error):
    host, events = RecordingCallbacks(), []

    def raises(event):
        if isinstance(event, Ran):
            raise error("planted")

    with managed(host.keywords()) as manager:
        manager.watch(raises)
        manager.watch(events.append)
        host.submit(request(1))
        assert manager.wait_idle(20)
    assert caplog.text.count("gets no more") == 1
    assert [event.outcome for event in events if isinstance(event, Ending)] == ["LENGTH"]
    assert host.responses[-1].is_final and not host.responses[-1].error


def test_after_the_last_one_has_raised_the_next_gets_each_event_once():
    host, events = RecordingCallbacks(), []

    def raises(event):
        if isinstance(event, Ran):
            raise RuntimeError("planted")

    with managed(host.keywords()) as manager:
        loop = manager._worker.loop
        manager.watch(raises)
        host.submit(request(1))
        assert manager.wait_idle(20)
        manager.watch(events.append)
        host.submit(request(2))
        assert manager.wait_idle(20)
        assert [it.request_id for it in events if isinstance(it, Ending)] == [2]
        manager.unwatch(events.append)
        taps = loop.table.host, loop.executor
        assert not any(isinstance(it, (HostTap, ExecutorTap)) for it in taps)


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
def test_explain_waiting_equals_explain_of_each_request(policy):
    host, constructed, found = RecordingCallbacks(), Future(), []

    def ask(record):
        manager = constructed.result(20)
        waiting = manager.explain_waiting()
        singles = [manager.explain(it) for it in range(12)]
        expected = [it for it in singles if "waiting requests ahead of it" in it.text]
        assert sorted(waiting, key=lambda it: it.request_id) == expected
        assert [it.ahead for it in waiting] == list(range(len(waiting)))
        assert manager.explain_waiting(2) == waiting[:2]
        found.append(len(waiting))

    host.submit(*[request(i, 4 + i, 12) for i in range(12)])
    keywords = {**host.keywords(), "return_batch_manager_stats_cb": ask}
    cache = KvCacheConfig(max_tokens=64, tokens_per_block=4)
    with managed(
        keywords, policy, max_batch_size=4, max_active_requests=None, kv_cache_config=cache
    ) as manager:
        constructed.set_result(manager)
        assert manager.wait_idle(20)
    assert max(found) >= 8 and min(found) == 0
    assert manager.health().callbacks["ReturnBatchManagerStats"].errors == 0
