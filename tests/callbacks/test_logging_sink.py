import json
import logging
import math

import pytest

from gptmanager import GptManager, ModelType, SchedulerConfig
from gptmanager.callbacks import LoggingSink, RequestQueue
from gptmanager.callbacks.sinks.logging import summary
from gptmanager.testing import ScriptedModel

INFLIGHT = {
    "Timestamp": "11-21-2026 10:00:00",
    "Iteration Counter": 120,
    "Active Request Count": 8,
    "Max Request Count": 256,
    "Runtime CPU Memory Usage": 1,
    "Runtime GPU Memory Usage": 0,
    "Runtime Pinned Memory Usage": 0,
    "Max KV cache blocks": 80,
    "Free KV cache blocks": 60,
    "Used KV cache blocks": 20,
    "Tokens per KV cache block": 64,
    "Scheduled Requests": 6,
    "Context Requests": 2,
    "Generation Requests": 4,
    "Total Context Tokens": 512,
    "MicroBatch ID": 0,
    "Paused Requests": 1,
    "Waiting Requests": 2,
    "gptmanager": {"schema_version": 1},
}
PAGED = ("Used KV cache blocks", "Generation Requests", "Paused Requests", "Waiting Requests")


@pytest.fixture
def logger(caplog):
    caplog.set_level(logging.INFO)
    return logging.getLogger("test.statistics")


def test_the_summary_of_in_flight_batching():
    assert summary(INFLIGHT) == (
        "iteration 120: 8/256 active, 6 scheduled (2 in context, 4 in generation, "
        "512 context tokens), 2 waiting, 1 paused; KV cache 20/80 blocks (25 %)"
    )


def test_the_summary_of_static_batching():
    static = {key: value for key, value in INFLIGHT.items() if key not in PAGED}
    static |= {"Total Generation Tokens": 9, "Empty Generation Slots": 3}

    assert summary(static) == (
        "iteration 120: 8/256 active, 6 scheduled (2 in context, 512 context tokens, "
        "9 generation tokens, 3 empty slots)"
    )


def test_a_line_now_and_then(logger, caplog):
    # Given a sink that logs every 10 seconds
    now = [100.0]
    sink = LoggingSink(logger, logging.INFO, 10.0, clock=lambda: now[0])

    # When records come at 0, 4, and 20 seconds
    begun = INFLIGHT | {"Iteration Counter": 1}
    sink(json.dumps(begun))
    now[0] = 104.0
    sink("not even parsed")
    now[0] = 120.0
    sink(json.dumps(INFLIGHT | {"Iteration Counter": 41}))

    # Then the first and the last are shown, with the speed in between
    first, second = [record.getMessage() for record in caplog.records]
    assert first == summary(begun)
    assert second.startswith("iteration 41: ")
    assert second.endswith("; 2.0 iterations/s")


@pytest.mark.parametrize(
    "record",
    [
        *("{", "[]", "{}", '{"Iteration Counter": 1}'),
        json.dumps(INFLIGHT | {"Iteration Counter": math.inf}),
        json.dumps(INFLIGHT | {"Used KV cache blocks": 10**400}),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_an_unreadable_record_is_shown_as_it_is(logger, caplog, record):
    LoggingSink(logger)(record)

    assert caplog.messages == [f"unreadable statistics: {record}"]


def test_records_at_one_moment_have_no_speed(logger, caplog):
    sink = LoggingSink(logger, every_s=0.0, clock=lambda: 100.0)

    sink(json.dumps(INFLIGHT))
    sink(json.dumps(INFLIGHT | {"Iteration Counter": 160}))

    assert caplog.messages == [summary(INFLIGHT), summary(INFLIGHT | {"Iteration Counter": 160})]


def test_nothing_happens_below_the_level(caplog):
    logger = logging.getLogger("test.statistics.quiet")
    logger.setLevel(logging.WARNING)

    LoggingSink(logger)("{")

    assert caplog.messages == []


def test_the_records_of_a_manager_are_readable(logger, caplog):
    with (
        RequestQueue() as queue,
        GptManager(
            ScriptedModel(lambda history: 5),
            ModelType.INFLIGHT_FUSED_BATCHING,
            1,
            SchedulerConfig(),
            queue.get_inference_requests,
            queue.send_response,
            queue.poll_stop_signal,
            LoggingSink(logger),
        ) as manager,
    ):
        queue.attach(manager)
        queue.submit([1, 2, 3], 3).result(30)

    (line,) = [r.getMessage() for r in caplog.records if r.name == logger.name]
    assert "1 scheduled (1 in context, 0 in generation, 3 context tokens)" in line
