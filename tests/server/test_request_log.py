"""The log of requests: one line for each, without texts; ids; refusals in the metrics."""

import io
import json
import logging
import socket
import threading

import httpx
import pytest
from running_server import running_server, settings_of, wait_for

from gptmanager.server import log_output
from gptmanager.server.engine.throughput import Throughput
from gptmanager.server.http.request_log import MAX_ID_LETTERS, as_text, logger
from gptmanager.server.log_output import logging_to
from gptmanager.server.main import progress_reports
from gptmanager.terminal.progress import NOTES
from gptmanager.terminal.redrawn_lines import RedrawnLines

ASKED = {"prompt": "17 + 25 =", "max_tokens": 4, "seed": 1}
OURS = {"X-Request-Id": "mine-1"}
CHAT = {"messages": [{"role": "user", "content": "17 + 25 ="}], "max_tokens": 4}


@pytest.fixture
def lines(caplog):
    """The fields of each line of our id, once there is one: it is written after the answer.

    So a line of another test's request may still come, which has another id.
    """
    caplog.set_level(logging.INFO, logger.name)

    def ours():
        fields = [it.fields for it in caplog.records if it.name == logger.name]
        return [it for it in fields if it["id"] == "mine-1"]

    def found():
        wait_for(ours)
        return ours()

    return found


@pytest.mark.parametrize(("body", "status"), [({**CHAT, "max_tokens": 1}, 200), ({}, 400)])
def test_clients_of_anthropics_api_get_the_id_in_their_own_header(client, body, status):
    answer = client.post("/v1/messages", json=body, headers=OURS)
    assert (answer.status_code, answer.headers["Request-Id"]) == (status, "mine-1")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_line_for_each_request(client, lines, path, stream, server):
    body = {**(CHAT if "chat" in path else ASKED), "stream": stream}
    answer = client.post(path, json=body, headers=OURS)
    assert answer.status_code == 200 and answer.headers["X-Request-Id"] == "mine-1"
    server.wait_idle()
    (line,) = lines()
    assert (line["id"], line["method"], line["route"]) == ("mine-1", "POST", path)
    assert (line["status"], line["model"], line["event"]) == (200, "tiny_llama", "request")
    assert line["answer"].endswith("-mine-1") and line["answer"].encode() in answer.content
    assert line["prompt_tokens"] == 7 and 0 < line["generated_tokens"] <= 4
    assert line["finish"] in ("stop", "length") and line["cached_tokens"] >= 0
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"]
    assert not {"prompt", "output"} & line.keys()
    assert not logging.getLogger("uvicorn.access").propagate  # uvicorn writes no line of its own


def test_refusals_are_logged_and_counted_by_code(client, lines):
    def refused():
        text = client.get("/metrics").text.splitlines()
        return [one for one in text if one.startswith("gptmanager_requests_refused_total{")]

    def count(code):
        return sum(float(one.rpartition(" ")[2]) for one in refused() if f'code="{code}"' in one)

    before = count("unknown_field")
    answer = client.post("/v1/completions", json={**ASKED, "odd": 1}, headers=OURS)
    assert answer.status_code == 400
    wait_for(lambda: count("unknown_field") > before)
    assert [(line["status"], line["code"]) for line in lines()] == [(400, "unknown_field")]
    assert any('status="400"' in one and 'model_name="tiny_llama"' in one for one in refused())


def test_bytes_that_are_not_http_are_counted_by_code(server):
    count = server.engine.metrics.request_log.refusals
    before = count["400", "invalid_http"]
    with socket.create_connection(httpx.URL(server.url).netloc.decode().split(":")) as client:
        client.sendall(b"nonsense\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 400")
    wait_for(lambda: count["400", "invalid_http"] > before)


@pytest.mark.parametrize(
    "given", ["", "a b", "x" * (MAX_ID_LETTERS + 1), 'a"b', "a;b", "%0a", "é".encode("latin-1")]
)
def test_an_id_with_other_characters_is_replaced(client, given):
    answer = client.get("/v1/models", headers={"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] != given and len(answer.headers["X-Request-Id"]) == 32
    longest = "x" * MAX_ID_LETTERS
    answer = client.get("/v1/models", headers={"X-Request-Id": longest})
    assert answer.headers["X-Request-Id"] == longest


def test_probes_leave_no_lines_and_a_path_cannot_forge_one(client, lines):
    for path in ("/health", "/health/ready", "/metrics", "/v2/health/live"):
        assert client.get(path, headers=OURS).status_code == 200
    assert client.get("/none%0a2026 POST" + "x" * 300, headers=OURS).status_code == 404
    (line,) = lines()
    assert line["status"] == 404 and len(line["route"]) == 200
    assert "\n" not in as_text(line)


def test_fields_as_text():
    fields = {"a": 1, "b": "x y", "c": None, "d": 'say "é"', "e": "", "f": "\x1b[2J", "g": "a=b"}
    assert as_text(fields) == r"""a=1 b='x y' d='say "\xe9"' e='' f='\x1b[2J' g='a=b'"""


def test_texts_are_logged_if_asked_for(lines):
    with running_server(settings_of(log_prompts=True, triton=False)) as server:
        body = {**ASKED, "temperature": 0}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=OURS, timeout=30)
        server.wait_idle()
    (line,) = lines()
    assert line["prompt"].endswith("17 + 25 =") and line["output"] == " 42"


def test_a_line_of_throughput_while_busy(server, client):
    throughput = Throughput(server.engine, 0.0)
    server.wait_idle()
    throughput.fields(5.0)
    assert throughput.fields(10.0) is None
    client.post("/v1/completions", json={**ASKED, "ignore_eos": True, "max_tokens": 20})
    fields = throughput.fields(21.0)
    assert fields["generated_tokens_per_s"] == 1.8 and fields["running"] == 0
    assert 0 <= fields["kv_cache_usage"] <= 1 and 0 <= fields["prefix_cache_hits"] <= 1


def test_the_log_as_text_and_as_json():
    log = logging.getLogger("gptmanager.requests")
    for name, expected in (("text", "info a=1"), ("json", {"event": "request", "a": 1})):
        stream = io.StringIO()
        with logging_to(stream, name):
            log.info("a=%s", 1, extra={"fields": {"event": "request", "a": 1}})
            log.warning("odd: %s", "é")
        # A server of another test may still write its own lines into the same log.
        own = " a=1", '"a": 1', "odd:"
        first, second = (
            it for it in stream.getvalue().splitlines() if any(part in it for part in own)
        )
        if name == "text":
            assert first.endswith(expected) and second.endswith("warning odd: é")
        else:
            assert expected.items() <= json.loads(first).items()
            assert json.loads(second)["message"] == "odd: é"
        assert logging.getLogger("gptmanager").propagate


def test_a_first_start_is_a_record_of_the_log_so_that_a_json_log_has_no_other_lines(caplog):
    caplog.set_level(logging.INFO, "gptmanager")
    stderr = io.StringIO()
    report = progress_reports(RedrawnLines(stderr))
    report("kernels", 0, 2)
    report("kernels", 2, 2)
    assert [it.getMessage() for it in caplog.records] == [NOTES["kernels"]]
    assert stderr.getvalue() == ""


def test_a_stuck_reader_delays_no_request(monkeypatch):
    monkeypatch.setattr(log_output, "_LAST_LINES_S", 30.0)  # 10,000 lines take their time

    class Stuck(io.StringIO):
        released = threading.Event()

        def write(self, text):
            self.released.wait(30)
            return super().write(text)

    stream = Stuck()
    with logging_to(stream, "text"):
        for index in range(12_000):
            logger.info("%s", index)
        stream.released.set()
    assert 10_000 <= len(stream.getvalue().splitlines()) < 12_000
