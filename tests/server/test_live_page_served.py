"""The live page of the server: who may see it, and that it tells of the server's requests."""

import json
import re
import time

import httpx
from running_server import running_server, settings_of


def test_the_page_and_its_events(server, client):
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.text.startswith("<!DOCTYPE html>") and "live/events" in page.text
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert client.post("/").status_code == 405
    with client.stream("GET", "/live/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000" and next(lines) == "event: snapshot"
        for line in lines:  # the limits come once the loop is watched
            if '"limits"' in line:
                break
        body = {"model": "tiny_llama", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        ended = next(event for event in map(told, lines) if "ended" in event)
    assert sum(ended["ended"].values()) >= 1


def told(line):
    return json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}


def test_the_key_is_sent_once_and_a_cookie_replaces_it():
    with running_server(settings_of(api_key="a key")) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.get("/").status_code == 401
            assert client.get("/live/events").status_code == 401
            assert client.get("/", params={"key": "another"}).status_code == 401
            answer = client.get("/", params={"key": "a key"}, follow_redirects=True)
            assert answer.status_code == 200 and "key" not in str(answer.url)
            with client.stream("GET", "/live/events") as events:
                assert events.status_code == 200
            assert client.get("/v1/models").status_code == 401  # the page's cookie, and no more


def test_open_pages_do_not_hold_up_the_end():
    with running_server(settings_of()) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            with client.stream("GET", "/live/events") as events:
                lines = events.iter_lines()
                assert re.match("retry", next(lines))
                server.run(server.engine.drain(1.0))
                began = time.monotonic()
                assert [line for line in lines][-1:] == [""]
    assert time.monotonic() - began < 60  # the stream has ended by itself


def test_a_head_request_for_the_events_takes_no_viewer_s_place(client):
    for _ in range(17):
        assert client.head("/live/events").status_code == 200
    with client.stream("GET", "/live/events") as answer:
        assert answer.status_code == 200
