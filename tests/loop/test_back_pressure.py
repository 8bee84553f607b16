"""What Get returns beyond its room: taken whole, or as much of it as may wait."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import Future

import pytest
from shorthand import request, start

from gptmanager import KvCacheConfig
from gptmanager.recorder import read_recording
from gptmanager.replay import replay
from gptmanager.testing import RecordingCallbacks


class Flood(RecordingCallbacks):
    """A Get that returns all there is, whatever room there is."""

    def get_inference_requests(self, room):
        return super().get_inference_requests(-1)


def refused(host):
    return [r.request_id for r in host.responses if r.error]


@pytest.mark.parametrize(
    ("max_waiting", "num_taken"), [(None, 12), (100, 12), (8, 12), (7, 11), (2, 6), (0, 4)]
)
@pytest.mark.parametrize("max_active", ["auto", None])
def test_max_waiting_requests_may_wait_in_addition_to_active_ones(
    max_waiting, num_taken, max_active
):
    host = Flood(request(i, [1, 2], 3) for i in range(12))
    with start(host, max_waiting_requests=max_waiting, max_active_requests=max_active) as manager:
        assert manager.wait_idle(20)
    assert refused(host) == list(range(num_taken, 12))
    for request_id in refused(host):
        assert host.final(request_id, 0).error == (
            f"CapacityError: {max_waiting} requests wait already, "
            f"max_waiting_requests = {max_waiting}"
        )


def test_would_fit_says_that_no_more_may_wait():
    # Given four that have a place, and one that may wait and does
    host = Flood(request(i, [1, 2], 2) for i in range(5))
    prepares = Future()

    class Unready:
        def prepare(self, device):
            return prepares

        def __call__(self, *ignored):
            pass

    for waiting in host._waiting:
        waiting.logits_post_processor = Unready()
    with start(host, max_waiting_requests=1, max_active_requests=None) as manager:
        while manager.health().num_active < 5:
            time.sleep(0.001)
        fit = manager.would_fit(request(5, [1, 2], 2))
        host.submit(request(5, [1, 2], 2))
        text = "CapacityError: 1 requests wait already, max_waiting_requests = 1"
        assert host.final(5).error == fit.text == text
        assert not (fit.accepted or fit.starts_now)
        prepares.set_result(None)
        assert manager.wait_idle(20)
        assert manager.would_fit(request(5, [1, 2], 2)).starts_now


def test_only_those_that_have_not_started_wait():
    # Given four that run and two that wait, which is the most
    host = Flood(request(i, [1, 2], 100, is_streaming=True) for i in range(6))
    send = host.send_response

    def send_response(request_id, *response):
        send(request_id, *response)
        if request_id == 3 and len(host.of(3)) == 10:
            host.submit(*(request(i, [1, 2], 2) for i in range(6, 9)))
            host.stop(0, 1)

    host.send_response = send_response
    with start(host, max_waiting_requests=2, max_active_requests=None) as manager:
        # When two of those that run end as three more come
        assert manager.wait_idle(20)
    # Then there are places for the two that waited, and two of the three wait in their stead
    assert refused(host) == [8]
    assert Counter(r.request_id for r in host.responses if r.is_final) == Counter(range(9))


def test_requests_that_memory_keeps_waiting_are_bounded_and_a_replay_decides_alike(tmp_path):
    rng = random.Random(1)
    host = Flood(request(i, [1] * rng.randint(1, 30), rng.randint(1, 30)) for i in range(40))
    path = tmp_path / "run.jsonl"
    cache = KvCacheConfig(max_tokens=80, tokens_per_block=4)
    with start(host, max_waiting_requests=9, kv_cache_config=cache, recording_path=path) as manager:
        assert manager.wait_idle(30)
    assert refused(host) == list(range(13, 40))
    report = replay(read_recording(path))
    assert report.divergence is None and report.compared > 10
