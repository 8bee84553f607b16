"""The Ray Serve example for real: streams, a client that leaves, replicas that come and go."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
URL = "http://127.0.0.1:8765/"
LONG = 200  # tokens

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray, of the extra ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.timeout(240),
]


def ask(prompt: str, max_new_tokens: int, **options: Any) -> Any:
    body = {"prompt": prompt, "max_new_tokens": max_new_tokens, **options}
    request = urllib.request.Request(URL, json.dumps(body).encode(), method="POST")
    return urllib.request.urlopen(request, timeout=120)


def answer(prompt: str, max_new_tokens: int, **options: Any) -> tuple[str, str]:
    """Return the whole text, and its finish reason."""
    lines = [json.loads(line) for line in ask(prompt, max_new_tokens, **options)]
    return "".join(line["text"] for line in lines), lines[-1]["finish_reason"]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    # for Ray's processes, too; the interval is read when Ray is imported
    os.environ["PYTHONPATH"] = str(EXAMPLES)
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.2"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": 8765})
    sys.path.insert(0, str(EXAMPLES))
    application = importlib.import_module("ray_serve_host").application
    delays = {"upscale_delay_s": 0.3, "downscale_delay_s": 0.5}
    spans = {"metrics_interval_s": 0.2, "look_back_period_s": 1.0}
    try:
        yield serve.run(application(EXAMPLES / "tiny_llama", 2, **delays, **spans))
    finally:
        serve.shutdown()
        ray.shutdown()


def num_replicas() -> int:
    from ray import serve

    (deployment,) = serve.status().applications["default"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


def test_a_text_is_streamed(handle: Any) -> None:
    lines = [json.loads(line) for line in ask("17 + 25 =", 20)]
    assert len(lines) > 2 and "".join(line["text"] for line in lines) == " 42"
    assert lines[-1]["finish_reason"] == "END_ID"
    assert all("finish_reason" not in line for line in lines[:-1])


def test_an_invalid_request_is_reported(handle: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask("17", 20, no_such_field=1)
    assert refused.value.code == 400 and "no_such_field" in refused.value.read().decode()


def test_a_client_that_leaves_cancels_its_request(handle: Any) -> None:
    def count(what: str) -> float:
        return handle.record_autoscaling_stats.remote().result()[what]

    response = ask("Count from 1 to 12:", 480, min_length=480)
    assert json.loads(response.readline())["text"] is not None
    assert (count("open"), count("cancelled")) == (1, 0)
    response.close()
    wait_for(lambda: count("open") == 0)
    assert count("cancelled") == 1


def test_replicas_come_with_load_and_go_without_losing_a_request(handle: Any) -> None:
    """The replica that Ray removes first finishes the requests that it has started."""
    assert num_replicas() == 1
    answers: list[tuple[str, str]] = []
    is_over, lock = threading.Event(), threading.Lock()
    asked = [0]

    def client(lasts: bool) -> None:
        while lasts or not is_over.is_set():
            with lock:
                asked[0] += 1
            found = answer("Count from 1 to 12:", LONG, min_length=LONG)
            with lock:
                answers.append(found)
            if lasts and num_replicas() == 1 and is_over.is_set():
                return

    # Given more requests than a replica has slots, so that Ray starts a second replica
    threads = [threading.Thread(target=client, args=(i < 5,)) for i in range(16)]
    for thread in threads:
        thread.start()
    wait_for(lambda: num_replicas() == 2)
    wait_for(lambda: len(answers) > 40)
    # When most clients end, and five continue until Ray has removed one replica
    is_over.set()
    for thread in threads:
        thread.join(120)
    # Then every request has all of its tokens
    assert not any(thread.is_alive() for thread in threads)
    assert len(answers) == asked[0]
    assert {reason for _, reason in answers} == {"LENGTH"}
    assert len({text for text, _ in answers}) == 1
