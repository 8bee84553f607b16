"""Requests that wait for their grammar are counted, and forgotten when their client goes."""

import contextlib
import json
import subprocess
import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest
from running_server import running_server, settings_of, wait_for

from gptmanager import GuidedDecoding
from gptmanager.decoding.guided.grammar_trial import GrammarTrials
from gptmanager.lifecycle.child_process import NoAnswerError

BODY = {"prompt": "Tom had", "max_tokens": 2}


@pytest.fixture(scope="module")
def busy():
    """A server that runs one request, of which one more may wait."""
    with running_server(settings_of(max_concurrency=1, max_queued_requests=1)) as running:
        yield running


@pytest.fixture
def slow_trials(monkeypatch):
    """Patterns that begin with "slow" are tried until nobody wants them.

    Returns the patterns that somebody wants when their trial begins.
    """
    tried, run = [], GrammarTrials.run

    def slowly(self, source, is_wanted):
        if is_wanted():
            tried.append(source.text)
        while source.text.startswith("slow") and is_wanted():
            threading.Event().wait(0.01)
        if not is_wanted():
            raise NoAnswerError("it is not wanted any more")
        return run(self, source, is_wanted)

    monkeypatch.setattr(GrammarTrials, "run", slowly)
    return tried


def post(server, body):
    return httpx.post(f"{server.url}/v1/completions", json={**BODY, **body}, timeout=30)


@pytest.fixture
def asked_for(monkeypatch):
    """The texts of all grammars that were asked for."""
    texts, make = set(), GuidedDecoding._grammar

    def noted(self, source):
        grammar = make(self, source)
        texts.add(source.text)
        return grammar

    monkeypatch.setattr(GuidedDecoding, "_grammar", noted)
    return texts


@contextlib.contextmanager
def waiting(server, asked_for, patterns):
    """Clients that ask for these patterns, and go away at the end of the block."""
    with contextlib.ExitStack() as clients:
        for pattern in patterns:
            client = HTTPConnection(urlsplit(server.url).netloc, timeout=30)
            clients.enter_context(contextlib.closing(client))
            body = json.dumps({**BODY, "guided_regex": pattern})
            client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_for(lambda: server.engine.admission.num_preparing == len(patterns))
        wait_for(lambda: asked_for.issuperset(patterns))  # a thread that asks late is not cancelled
        yield
    wait_for(lambda: not server.engine.admission.num_preparing)


def test_grammars_of_disconnected_clients_are_not_compiled(server, slow_trials, asked_for):
    with waiting(server, asked_for, [f"slow{i}" for i in range(12)]):
        pass
    new = "ab|b{3}c"  # no other test of this server has compiled it
    assert post(server, {"guided_regex": new}).status_code == 200
    assert new in slow_trials and len(slow_trials) < 8  # those that began while clients waited


def test_requests_that_wait_for_a_grammar_count_as_waiting(busy, slow_trials, asked_for):
    with waiting(busy, asked_for, [f"slow {i}" for i in range(2)]):
        for body in ({"guided_regex": "ab"}, {}):
            refused = post(busy, body)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["error"]["code"] == "queue_full"
    assert post(busy, {"guided_regex": "ab"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"guided_choice": ["a"] * 10_001}, "options has 10001 texts, at most 10000 are allowed"),
        ({"guided_regex": "a" * (2**20 + 1)}, "the regex has 1048577 bytes, at most 1048576 are"),
        ({"guided_grammar": "a" * (2**20 + 1)}, "has 1048577 bytes"),
        ({"guided_json": {"title": "a" * 2**20}}, "at most 1048576 are allowed"),
    ],
)
def test_a_grammar_that_is_too_large_is_refused(server, body, text):
    refused = post(server, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, *body)
    assert text in refused.json()["error"]["message"]


def test_without_a_process_requests_get_an_error_and_later_ones_work(monkeypatch):
    def refuse(*args, **keywords):
        raise OSError(24, "Too many open files")

    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with running_server(settings_of()) as server:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            refusals = [
                post(server, {"guided_regex": "abc"}),
                httpx.post(f"{server.url}/v1/chat/completions", json=chat),
            ]
        for refused in refusals:
            assert refused.status_code == 503, refused.text
            assert "no process can be started" in refused.json()["error"]["message"]
        assert post(server, {"guided_regex": "abc"}).status_code == 200
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 200
