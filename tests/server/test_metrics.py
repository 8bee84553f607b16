"""What /metrics says of requests that a client has sent."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from responding import whole
from running_server import wait_for

from gptmanager.errors import ConfigError, DuplicateRequestIdError
from gptmanager.server.engine.call import Call
from gptmanager.server.engine.engine import EngineRequest
from gptmanager.server.engine.metrics import ServerMetrics


def scrape(client):
    """(name, finish reason) -> value."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, sample.labels.get("finish_reason", "")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def rises(before, after, name, label=""):
    return after[name, label] - before.get((name, label), 0)


async def run(engine, length, act=None):
    """One request of this length on the server's loop; `act` on its call after its first part."""
    request = EngineRequest([10, 11, 12], length, is_streaming=True, end_id=-1)
    async with engine.submit([request]) as call:
        async for _ in call.parts():
            if act is not None:
                act(call)
                act = None


def leave(call):
    raise TimeoutError


@pytest.mark.parametrize(
    ("act", "label"),
    [(None, "length"), (lambda call: call.stop(0), "stop"), (Call.time_out, "timeout")],
)
def test_a_request_is_counted_before_its_client_has_the_answer(server, client, act, label):
    before = scrape(client)

    with contextlib.nullcontext() if act is None else server.held():
        server.run(run(server.engine, 5 if act is None else 500, act))

    after = scrape(client)
    finished = "gptmanager_requests_finished_total"
    assert rises(before, after, finished, label) == 1
    assert rises(before, after, finished, "cancelled") == 0
    assert rises(before, after, "gptmanager_prompt_tokens_total") == 3
    if act is None:
        assert rises(before, after, "gptmanager_generation_tokens_total") == 5
        assert rises(before, after, "gptmanager_time_to_first_token_seconds_count") == 1
    assert server.engine.metrics.requests.num_open == 0
    assert after["gptmanager_num_requests_running", ""] == 0
    assert after["gptmanager_num_requests_waiting", ""] == 0
    assert after["process_resident_memory_bytes", ""] > 0


def test_a_client_that_goes_away_is_counted_as_cancelled(server, client):
    before = scrape(client)

    with pytest.raises(TimeoutError), server.held():
        server.run(run(server.engine, 500, leave))

    finished, label = "gptmanager_requests_finished_total", "cancelled"
    wait_for(lambda: not server.engine.metrics.requests.num_open)
    assert rises(before, scrape(client), finished, label) == 1


def test_what_never_reaches_the_manager_is_counted_too(server, client):
    before = scrape(client)
    engine = server.engine

    async def leave_at_once():
        call = engine.submit([EngineRequest([1], 2) for _ in range(3)])
        await call.__aexit__(None, None, None)

    engine.manager.pause_generation()
    try:
        server.run(leave_at_once())
    finally:
        engine.manager.resume_generation()

    finished, label = "gptmanager_requests_finished_total", "cancelled"
    wait_for(lambda: not engine.metrics.requests.num_open)
    after = scrape(client)
    ended = sum(rises(before, after, name, label) for name, label in after if name == finished)
    assert ended == 3 and rises(before, after, finished, label) == 3


def test_a_refused_request_is_not_open(server):
    metrics = server.engine.metrics

    def refuse():
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        metrics.submit(99, refuse)

    assert metrics.requests.num_open == 0


def test_a_refused_duplicate_changes_nothing_of_the_request_with_its_id(server):
    metrics = server.engine.metrics
    before = metrics.requests.finished["length"]

    def refuse():
        raise DuplicateRequestIdError("no")

    metrics.submit(99, lambda: None, is_ended_by_caller=True)
    with pytest.raises(DuplicateRequestIdError):
        metrics.submit(99, refuse, is_try=True)
    metrics.respond(99, whole([1, 2]), True, "")
    assert metrics.requests.num_open == 1  # the caller has not called `cancel` yet
    metrics.ends_as(99, None)
    assert metrics.requests.num_open == 0
    assert metrics.requests.finished["length"] == before + 1

    before = metrics.requests.finished.get("error", 0)
    metrics.submit(99, lambda: None)
    with pytest.raises(DuplicateRequestIdError):
        metrics.submit(99, refuse, is_try=True)
    metrics.respond(99, [], True, "AdapterError: no")  # an error of a request that is not a try
    assert metrics.requests.finished["error"] == before + 1


def test_a_prefix_that_cannot_be_is_refused(server):
    settings = dataclasses.replace(server.settings, metrics_prefix="a b")
    with pytest.raises(ConfigError, match="prefix = 'a b'"):
        ServerMetrics(settings, server.engine.queue)


def test_what_scoring_generates_does_not_count(client):
    body = {"prompt": ["Tom had", "Mia"], "echo": True, "max_tokens": 0, "logprobs": 1, "n": 3}
    before = scrape(client)
    usage = client.post("/v1/completions", json=body).json()["usage"]
    after = scrape(client)

    assert usage["completion_tokens"] == 0 and usage["prompt_tokens"] == 3
    assert rises(before, after, "gptmanager_requests_finished_total", "length") == 2
    assert rises(before, after, "gptmanager_prompt_tokens_total") == 3
    assert rises(before, after, "gptmanager_generation_tokens_total") == 0
    assert rises(before, after, "gptmanager_request_generation_tokens_sum") == 0
    assert rises(before, after, "gptmanager_request_generation_tokens_count") == 2
    assert rises(before, after, "gptmanager_time_to_first_token_seconds_count") == 0
    assert rises(before, after, "gptmanager_e2e_request_latency_seconds_count") == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": ["e"], "n": 3, "seed": 1},
        {"stop": [" "], "ignore_eos": True, "max_tokens": 2, "n": 8, "seed": 2},
        {"stop": ["ning, T"], "include_stop_str_in_output": True},
        {"stop": [" "], "min_tokens": 5},
        {"stop_token_ids": [261, 262], "min_tokens": 2},
        {"use_beam_search": True, "n": 2, "beam_width": 4},
        {"stop": ["never"], "ignore_eos": True, "max_tokens": 60},
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_generated_tokens_are_those_of_usage(server, client, more, stream):
    stream = stream and "use_beam_search" not in more  # which has no streams
    before = scrape(client)
    body = {"prompt": ["Tom had", "One morning"], "max_tokens": 24, "temperature": 0.7, **more}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/completions", json=body)
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    usage = (json.loads(events[-1]) if stream else response.json())["usage"]
    server.wait_idle()
    wait_for(lambda: not server.engine.metrics.requests.num_open)
    after = scrape(client)

    for name in ("generation_tokens_total", "request_generation_tokens_sum"):
        assert rises(before, after, f"gptmanager_{name}") == usage["completion_tokens"]
    number = 2 if "use_beam_search" in more else 2 * more.get("n", 1)
    finished = "gptmanager_requests_finished_total"
    reasons = ("stop", "length", "cancelled")
    rose = {reason: rises(before, after, finished, reason) for reason in reasons}
    assert sum(rose.values()) == number and not rose["cancelled"]


def test_gauges_are_current_also_after_all_clients_have_disconnected(server, client):
    """The last iteration of all has used blocks: a router would never come back."""
    with pytest.raises(TimeoutError), server.held():
        server.run(run(server.engine, 500, leave))
    wait_for(lambda: server.engine.manager.health().num_active == 0)
    assert server.engine.metrics.iterations.last["Used KV cache blocks"] > 0
    found = scrape(client)
    for name in ("num_requests_active", "num_requests_generation", "kv_cache_usage_ratio"):
        assert found[f"gptmanager_{name}", ""] == 0, name
    families = text_string_to_metric_families(client.get("/metrics").text)
    blocks = {
        sample.labels["kv_cache_block_type"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "nv_trt_llm_kv_cache_block_metrics"
    }
    assert blocks["used"] == 0 and blocks["free"] == blocks["max"] > 0 == blocks["fraction"]
