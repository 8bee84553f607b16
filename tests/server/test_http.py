"""HTTP as bytes: what is malformed, too long, cut off, or asks for another protocol."""

import asyncio
import json
import socket

import pytest
from running_server import running_server, settings_of, wait_for
from starlette.routing import Route

from gptmanager.server import http_protocol, serving
from gptmanager.server.responses import EventStream, event

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b'{"prompt":"hi"}'
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def told(connection):
    """Status and JSON of the next answer."""
    with connection.makefile("rb") as answer:
        status = int(answer.readline().split()[1])
        length = 0
        while (line := answer.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, json.loads(answer.read(length))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (POST + b"Content-Length: -5\r\n\r\n" + BODY, 400),
        (POST + b"Content-Length: 15\r\nContent-Length: 3\r\n\r\n" + BODY, 400),
        (POST + b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n" + BODY, 400),
        (b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (HEALTH[:-2] + b"X: " + b"a" * (1 << 20), 431),
        (b"GET /" + b"a" * (1 << 20), 431),
        (HEALTH[:-2] + b"X: a\r\n" * 100_000, 431),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_ends(server, data, expected):
    with connect(server) as connection:
        connection.sendall(data)
        status, body = told(connection)
        assert status == expected
        assert body["error"]["type"] == "invalid_request_error" and "param" in body["error"]


def test_a_request_in_pieces_and_several_in_one_piece_are_answered(server):
    with connect(server) as connection:
        for byte in HEALTH:
            connection.sendall(bytes([byte]))
        assert told(connection) == (200, {"status": "ready"})
    with connect(server) as connection:
        connection.sendall(POST + b"Content-Length: 15\r\nConnection: close\r\n\r\n" + BODY)
        assert told(connection)[0] == 200
    with connect(server) as connection, connection.makefile("rb") as answers:
        last = HEALTH[:-2] + b"Connection: close\r\n\r\n"
        connection.sendall(HEALTH * 3 + last)
        assert answers.read().count(b'{"status":"ready"}') == 4


def test_who_asks_for_another_protocol_gets_this_one(server):
    """Java's client asks for h2c with each request."""
    wants = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with connect(server) as connection:
        connection.sendall(POST + wants + b"Content-Length: 15\r\n\r\n" + BODY)
        status, body = told(connection)
    assert status == 200 and body["count"] == len(body["tokens"])


def test_a_body_that_waits_to_be_asked_for_is_asked_for(server):
    with connect(server) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert told(connection)[0] == 200


def test_who_writes_too_large_a_body_still_reads_the_answer():
    with running_server(settings_of(max_body_bytes=1 << 20)) as server:
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        for head, body in [
            (b"Content-Length: 1900000\r\n\r\n", b"x" * 1_900_000),
            (b"Transfer-Encoding: chunked\r\n\r\n", piece * 29 + b"0\r\n\r\n"),
        ]:
            with connect(server) as connection:
                connection.sendall(POST + head + body)
                assert told(connection)[0] == 413
        with connect(server) as connection:
            connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 9999999\r\n\r\n")
            assert told(connection)[0] == 413


@pytest.mark.parametrize(
    "begun", [b"", HEALTH[:-2], POST + b"Content-Length: 15\r\n\r\n" + BODY[:5]]
)
def test_connections_that_fall_silent_are_closed(monkeypatch, begun):
    monkeypatch.setattr(serving, "_KEEP_ALIVE_S", 0.05)
    with running_server(settings_of()) as server, connect(server) as connection:
        connection.sendall(begun)
        assert connection.recv(100) == b""
        wait_for(lambda: not server.server.server_state.connections)
        assert server.engine.counts == (0, 0)


def test_who_takes_nothing_of_a_long_stream_is_cut_off(monkeypatch):
    monkeypatch.setattr(serving, "_KEEP_ALIVE_S", 0.2)
    ends = []

    async def frames():
        try:
            while True:
                await asyncio.sleep(0)
                yield event({"text": "x" * 60_000})
        finally:
            ends.append(True)

    async def stream(request):
        return EventStream(frames())

    with running_server(settings_of()) as server:
        server.server.config.app.router.routes.append(Route("/endless", stream))
        with connect(server) as connection:
            connection.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            wait_for(lambda: ends)
            wait_for(lambda: not server.server.server_state.connections)


def test_who_goes_on_reading_in_time_is_not_cut_off(server):
    async def stand_still_for_a_while():
        (protocol,) = (it for it in server.server.server_state.connections if it not in others)
        protocol.pause_writing()
        timer = protocol._standstill
        protocol.resume_writing()
        return timer.cancelled()

    others = set(server.server.server_state.connections)
    with connect(server) as connection:
        connection.sendall(HEALTH)
        assert told(connection)[0] == 200
        assert server.run(stand_still_for_a_while())


def test_a_head_has_a_limit_for_each_request_of_a_connection(server, monkeypatch):
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", 2 * len(HEALTH))
    with connect(server) as connection:
        for _ in range(5):
            connection.sendall(HEALTH)
            assert told(connection)[0] == 200
