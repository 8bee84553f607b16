"""HTTP as bytes: what is malformed, too long, cut off, or asks for another protocol."""

import asyncio
import contextlib
import json
import logging
import resource
import socket
import time

import pytest
from running_server import running_server, settings_of, wait_for
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gptmanager.errors import ConfigError
from gptmanager.lifecycle.log import RareWarnings
from gptmanager.server.http import http_protocol
from gptmanager.server.http.connections import Connections, Proxies, default_max_connections
from gptmanager.server.http.responses import EventStream, disconnected, event

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt":"hi"}'
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


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
        (b"GET /v1/models/\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (HEALTH[:-2] + b"X: " + b"a" * (1 << 20), 431),
        (b"GET /" + b"a" * (1 << 20), 431),
        (HEALTH[:-2] + b"X: a\r\n" * 100_000, 431),
        (HEALTH[:-2] + b"X: " + b"a" * (1 << 16) + b"\r\n\r\n", 431),  # whole, in one segment
        (HEALTH[:-2] + b"X: aaaaaaa\r\n" * 6000 + b"\r\n", 431),
        (CHUNKED + b"5\r\nabcde\r\nzz\r\n", 400),
        (CHUNKED + b"5;" + b"x" * (1 << 20), 431),
        (CHUNKED + b"0\r\n" + b"X: aaaaaaa\r\n" * 6000 + b"\r\n", 431),
        (CHUNKED + b"0\r\nX: " + b"a" * (1 << 20), 431),
    ],
)
def test_an_invalid_http_request_is_refused_and_its_connection_ends(server, data, expected):
    with connect(server) as connection:
        connection.sendall(data)
        status, body = told(connection)
        assert status == expected
        assert body["error"]["type"] == "invalid_request_error" and "param" in body["error"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (POST + b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n",
         ": Transfer-Encoding can't be present with Content-Length"),
        (b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n", ""),  # no path
    ],
)  # fmt: skip
def test_the_reason_of_the_parser_is_in_the_refusal(server, data, reason):
    with connect(server) as connection:
        connection.sendall(data)
        status, answer = told(connection)
    assert (status, answer["error"]["code"]) == (400, "invalid_http")
    assert answer["error"]["message"] == f"the request must be HTTP/1.1{reason}"


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


def test_a_request_for_another_protocol_gets_this_one(server):
    """Java's client asks for h2c with each request."""
    with connect(server) as connection:
        connection.sendall(POST + UPGRADE + b"Content-Length: 15\r\n\r\n" + BODY)
        status, body = told(connection)
    assert status == 200 and body["count"] == len(body["tokens"])


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_a_client_of_http_1_0_gets_streams_without_chunks(server, connection):
    """Its body ends with the connection; a whole answer still has its length."""
    body = b'{"prompt":"17 + 25 =","max_tokens":3,"stream":true}'
    for data in (body, body.replace(b"true", b"false")):
        head = b"POST /v1/completions HTTP/1.0\r\nConnection: %b\r\n" % connection
        with connect(server) as client, client.makefile("rb") as reader:
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            head, answer = reader.read().split(b"\r\n\r\n", 1)
        lines = head.lower().split(b"\r\n")
        assert lines[0] == b"http/1.1 200 ok" and b"connection: close" in lines
        assert not [line for line in lines if line.startswith(b"transfer-encoding")]
        assert (b"content-length: %d" % len(answer) in lines) == (data != body)
        if data == body:
            frames = answer.decode().split("\n\n")
            assert frames[-2:] == ["data: [DONE]", ""]
            assert all(frame.startswith("data: ") for frame in frames[:-1])


def test_the_header_upgrade_is_removed_wherever_a_head_is_cut(server):
    head = POST + UPGRADE + b"Content-Length: 15\r\n\r\n"
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in range(1, len(head)):
            connection.sendall(head[:cut])
            time.sleep(0.001)  # most pieces arrive one by one
            connection.sendall(head[cut:] + BODY)
            assert told(connection)[0] == 200, head[:cut]


def test_the_header_upgrade_is_removed_from_each_of_several_requests(server):
    length, last = b"Content-Length: 15\r\n", b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"
    requests = (
        HEALTH,
        CHUNKED[:-2] + UPGRADE + b"\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n",
        POST + b"uPGRADE: x\r\n" + UPGRADE + length + b"\r\n" + BODY,
        POST + last + length + b"\r\n" + BODY,
    )
    with connect(server) as connection:
        connection.sendall(b"".join(requests))
        with connection.makefile("rb") as reader:
            answers = reader.read()
    assert answers.count(b"HTTP/1.1 200 OK") == 4 and answers.count(b'"count":') == 3


def test_a_body_that_waits_to_be_asked_for_is_asked_for(server):
    with connect(server) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert told(connection)[0] == 200


def test_a_client_of_http_1_0_is_not_asked_for_its_body(server):
    """It would read the interim answer as the answer."""
    head = POST.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        time.sleep(0.1)  # for an interim answer, which would be wrong
        connection.sendall(BODY)
        assert told(connection)[0] == 200


def test_a_client_that_writes_too_large_a_body_still_reads_the_answer():
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


@pytest.fixture(scope="module")
def hasty():
    """A server that waits for nobody long, with few connections."""
    settings = settings_of(read_timeout=0.1, max_connections=4)
    with running_server(settings) as server:
        yield server


@pytest.mark.parametrize("begun", [b"", b"\r\n", HEALTH])
def test_unused_connections_are_closed(hasty, begun, monkeypatch):
    patience_s = 0.5 if begun == HEALTH else 0.1  # a client may be late with its request
    monkeypatch.setattr(hasty.server.config, "timeout_keep_alive", patience_s)
    with connect(hasty) as connection:
        connection.sendall(begun)
        if begun == HEALTH:
            assert told(connection)[0] == 200
        assert connection.recv(100) == b""
    wait_for(lambda: not hasty.server.server_state.connections)


@pytest.mark.parametrize(
    "begun", [HEALTH[:-2], POST + b"Content-Length: 99\r\n\r\n" + BODY[:5], CHUNKED + b"0\r\n"]
)
def test_a_request_has_so_much_time_to_arrive_however_it_comes(hasty, begun):
    with connect(hasty) as connection:
        connection.sendall(begun)
        with contextlib.suppress(OSError):  # a byte now and then wins no time
            for _ in range(20):
                connection.send(b"a")
                time.sleep(0.01)
        status, body = told(connection)
        assert status == 408 and "0.1 s" in body["error"]["message"]
    wait_for(lambda: not hasty.server.server_state.connections)
    assert hasty.engine.counts == (0, 0)


async def wait_for_the_end(request):
    await disconnected(request.receive)
    return Response()


def test_the_number_of_connections_is_limited(hasty):
    """A connection whose request has arrived has no time limit."""
    hasty.server.config.app.router.routes.append(Route("/wait", wait_for_the_end))
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(hasty)).sendall(HEALTH.replace(b"/health", b"/wait"))
        wait_for(lambda: len(hasty.server.server_state.tasks) == 4)
        with connect(hasty) as connection, connection.makefile("rb") as answer:
            head = answer.read().decode()
            assert head.startswith("HTTP/1.1 503") and "retry-after: 1" in head.lower()
            assert "--max-connections = 4" in head
    wait_for(lambda: not hasty.server.server_state.connections)


def test_no_answer_waits_for_an_acknowledgement(server):
    others = set(server.server.server_state.connections)
    with connect(server) as connection:
        connection.sendall(HEALTH)
        assert told(connection)[0] == 200
        (protocol,) = server.server.server_state.connections - others
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("limit", "most"),
    [(8, 16), (22, 16), (24, 18), (1024, 768), (1 << 20, 65536), (resource.RLIM_INFINITY, 65536)],
)
def test_by_default_files_and_pipes_have_a_quarter_of_the_descriptors(monkeypatch, limit, most):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert default_max_connections() == most


def test_connections_of_an_address_and_requests_of_a_proxy_s_client_are_limited():
    limits = Connections(100, 2, Proxies(["10.0.0.0/8", "::1"]))
    assert [limits.enter("1.2.3.4") is None for _ in range(3)] == [True, True, False]
    assert limits.enter("1.2.3.5") is None
    assert [limits.enter("10.1.1.1") is None for _ in range(4)] == [True] * 4
    limits.leave("1.2.3.4")
    limits.leave("1.2.3.4")
    assert [limits.enter("1.2.3.4") is None for _ in range(2)] == [True, False]
    with pytest.raises(ConfigError, match="forwarded_allow_ips: 'nobody'"):
        settings_of(forwarded_allow_ips=["nobody"])

    settings = settings_of(max_connections_per_address=2)

    async def wait(request):
        num_waiting.append(request.client.host)
        return await wait_for_the_end(request)

    num_waiting = []
    with running_server(settings) as server:
        server.server.config.app.router.routes.append(Route("/wait", wait))
        with contextlib.ExitStack() as stack:
            for count in range(1, 4):
                for name in (b"1.2.3.4", b"1.2.3.5"):
                    connection = stack.enter_context(connect(server))
                    head = (
                        b"GET /wait HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: %b\r\n\r\n"
                        % name
                    )
                    connection.sendall(head)
                    if count == 3:
                        assert told(connection)[0] == 429
                    else:
                        wait_for(lambda a=name.decode(), n=count: num_waiting.count(a) == n)


def test_bad_connections_are_logged_now_and_then(caplog):
    now = [100.0]
    log = RareWarnings(logging.getLogger("test"), lambda: now[0])
    for when in (100.0, 101.0, 105.0, 111.0, 112.0):
        now[0] = when
        log.warning("%s is %s", "it", "bad")
    assert [record.getMessage() for record in caplog.records] == [
        "it is bad",
        "it is bad, and 2 others since the last line",
    ]


def test_trailers_are_passed_over(server):
    trailers = b"X: 1\r\nContent-Type: a/b\r\n\r\n"
    with connect(server) as connection, connection.makefile("rb") as answers:
        connection.sendall(CHUNKED + b"f\r\n" + BODY + b"\r\n0\r\n" + trailers)
        connection.sendall(HEALTH[:-2] + b"Connection: close\r\n\r\n")
        found = answers.read()
    assert b'"count"' in found and found.endswith(b'{"status":"ready"}')


def test_a_client_that_writes_while_its_answer_fails_is_read_to_the_end(server):
    async def pieces():
        yield "a"
        raise RuntimeError("boom")

    async def fail(request):
        return StreamingResponse(pieces())

    routes = server.server.config.app.router.routes
    routes.append(Route("/fail", fail, methods=["POST"]))
    size, head = 8 << 20, b"POST /fail HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    try:
        with connect(server) as connection, connection.makefile("rb") as answer:
            connection.sendall(head % (size + 999) + bytes(size))
            assert (
                answer.readline().startswith(b"HTTP/1.1 200") and b"0\r\n\r\n" not in answer.read()
            )
    finally:
        routes.pop()


def test_an_unread_body_ends_its_connection(server):
    """A refusal does not wait for the rest, and what comes of it is no other request."""
    with connect(server) as connection:
        connection.sendall(
            b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
        )
        with connection.makefile("rb") as answer:
            head = answer.readline(), *iter(answer.readline, b"\r\n")
            assert head[0].startswith(b"HTTP/1.1 404") and b"connection: close\r\n" in head
            answer.read(int(dict(line.split(b": ") for line in head[1:])[b"content-length"]))
            connection.sendall(HEALTH)
            assert answer.read() == b""


def test_a_client_may_ask_for_so_much_before_it_reads(server):
    with connect(server) as connection, connection.makefile("rb") as answers:
        connection.sendall(HEALTH * 1000)
        found = answers.read()
    assert found.count(b'{"status":"ready"}') == 65  # one is being answered, and 64 wait
    assert found.count(b"HTTP/1.1 400") == 1 and b"more than 64 requests wait" in found


@pytest.mark.parametrize(
    "wrong",
    [
        b"\xcd\x9d\xf2\r\n\r\n",  # where the next request begins
        CHUNKED + b"f\r\n" + BODY + b"zz\r\n",  # within the body of a request that waits
        HEALTH[:-2] + b"X: " + b"a" * (1 << 17),
    ],
)
def test_complete_requests_before_wrong_bytes_are_answered(server, wrong):
    """A streamed answer that is being sent then is not cut off."""
    body = b'{"prompt": "hi", "max_tokens": 40, "ignore_eos": true, "stream": true}'
    stream = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
    with connect(server) as connection, connection.makefile("rb") as answers:
        connection.sendall(stream % (len(body), body))
        assert answers.readline().startswith(b"HTTP/1.1 200")  # it is being sent
        connection.sendall(HEALTH + wrong + HEALTH * 3)
        found = answers.read()
    assert found.count(b"data: [DONE]") == 1 and found.count(b'{"status":"ready"}') == 1
    assert (
        found.index(b"data: [DONE]")
        < found.index(b'{"status":"ready"}')
        < found.index(b"HTTP/1.1 4")
    )
    assert found.count(b"HTTP/1.1 4") == 1 and found.endswith(b"}")


def test_a_client_that_reads_nothing_of_a_long_stream_is_cut_off():
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

    with running_server(settings_of(keep_alive_timeout=0.5)) as server:
        server.server.config.app.router.routes.append(Route("/endless", stream))
        with connect(server) as connection:
            connection.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_for(lambda: ends)
            wait_for(lambda: not server.server.server_state.connections)


def test_a_client_that_goes_on_reading_in_time_is_not_cut_off(server):
    async def stand_still_for_a_while():
        (protocol,) = (it for it in server.server.server_state.connections if it not in others)
        protocol.pause_writing()
        timer = protocol._write_timeout
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


def test_a_client_may_leave_before_its_answers(server, caplog):
    """The log has no traceback for any of its requests."""
    for _ in range(20):
        with connect(server) as connection:
            connection.sendall(HEALTH * 60)
    with connect(server) as connection:
        connection.sendall(HEALTH)
        assert told(connection)[0] == 200
    wait_for(lambda: not server.server.server_state.tasks)
    assert "Exception" not in caplog.text
