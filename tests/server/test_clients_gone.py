"""Clients that go away, streaming or not: what they had asked for is stopped."""

import asyncio
import socket

import pytest
from call_results import results_of
from running_server import wait_for
from starlette.routing import Route

from gptmanager import FinishReason
from gptmanager.server.engine.call import EngineRequest
from gptmanager.server.errors import ApiError
from gptmanager.server.http.body import read_json, start_stream, until_disconnected
from gptmanager.server.http.responses import DONE, EventStream, event, json_response

NUM_CLIENTS = 200


@pytest.fixture(scope="module")
def ends(server):
    """Finish reasons of the requests of two endpoints: POST /test/stream and /test/whole."""
    ends = []
    engine = server.engine

    def submit(body):
        request = EngineRequest([5, 6, 7], body.get("length", 400), end_id=-1, is_streaming=True)
        call = engine.submit([request])
        call._running[0].generation.add_done_callback(
            lambda it: ends.append(it.result().finish_reasons[0])
        )
        return call

    async def frames(body):
        async with submit(body) as call:
            async for index, part in call.parts():
                yield event({"tokens": part.tokens})
                if body.get("fails"):
                    raise ApiError(500, "it broke")
        yield DONE

    async def stream(request):
        body = await read_json(request, dict)
        return EventStream(await until_disconnected(request, start_stream(frames(body))))

    async def whole(request):
        body = await read_json(request, dict)

        async def work():
            async with submit(body) as call:
                return await results_of(call)

        (result,) = await until_disconnected(request, work())
        return json_response({"tokens": result.generated_ids[0]})

    added = [
        Route("/test/stream", stream, methods=["POST"]),
        Route("/test/whole", whole, methods=["POST"]),
    ]
    routes = server.server.config.app.router.routes
    routes += added
    yield ends
    for route in added:
        routes.remove(route)


def connect(server, path, body=b"{}"):
    """A client that has sent its request."""
    client = socket.create_connection((server.settings.host, int(server.url.rpartition(":")[2])))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


@pytest.mark.parametrize("path", ["/test/stream", "/test/whole"])
def test_what_a_client_asked_for_ends_with_it(server, ends, path):
    ends.clear()
    with connect(server, path) as client:
        wait_for(lambda: server.engine.counts.running)
        if path == "/test/stream":
            assert client.recv(100)
    server.wait_idle()
    wait_for(lambda: ends)  # the request is no longer open a moment before its handle knows
    assert ends == [FinishReason.CANCELLED]


def test_the_first_of_several_requests_ends_with_its_connection_too(server, ends, caplog):
    def with_two_requests():
        return [it for it in server.server.server_state.connections if it.pipeline]

    async def lose_the_connection():
        (connection,) = with_two_requests()
        connection.transport.abort()  # behind a request that waits, the server reads nothing

    ends.clear()
    with connect(server, "/test/whole") as client:
        wait_for(lambda: server.engine.counts.running)
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(with_two_requests)
        server.run(lose_the_connection())
        assert client.recv(100) == b""
    server.wait_idle()
    wait_for(lambda: ends)
    assert ends == [FinishReason.CANCELLED]
    assert not [record for record in caplog.records if record.exc_info]


def test_many_clients_gone_in_the_midst_leave_nothing(server, ends):
    ends.clear()
    clients = []
    others = set(server.server.server_state.connections)  # kept alive by other tests
    for number in range(NUM_CLIENTS):
        clients.append(connect(server, "/test/stream"))
        if number % 3 == 0:  # some are gone before anything came, some later
            clients.pop().close()
        elif len(clients) > 20:
            first = clients.pop(0)
            assert first.recv(100)
            first.close()
    for client in clients:
        client.close()
    wait_for(lambda: others.issuperset(server.server.server_state.connections))
    server.wait_idle()
    # who is gone at once may not have been heard at all, and some requests may have been faster
    assert NUM_CLIENTS // 2 < len(ends) <= NUM_CLIENTS
    assert ends.count(FinishReason.CANCELLED) > NUM_CLIENTS // 2
    audit = server.engine.manager.audit()
    assert audit.ok
    wait_for(lambda: not server.engine._calls)
    wait_for(lambda: len(asyncio.all_tasks(server.loop)) < 5)


def test_a_client_that_reads_gets_all(client, ends):
    response = client.post("/test/stream", json={"length": 30})
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.content.split(b"\n\n")
    assert frames[-2:] == [DONE.strip(), b""]
    whole = client.post("/test/whole", json={"length": 30}).json()["tokens"]
    assert sum((httpx_json(frame) for frame in frames[:-2]), []) == whole and len(whole) == 30


def httpx_json(frame):
    import orjson

    return orjson.loads(frame.removeprefix(b"data: "))["tokens"]


def test_a_refusal_comes_before_the_first_event(client, ends):
    response = client.post("/test/stream", json={"length": 4000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_failure_in_the_midst_is_the_last_event(client, ends):
    frames = client.post("/test/stream", json={"fails": True}).content.split(b"\n\n")
    assert b'"it broke"' in frames[-3] and frames[-2] == DONE.strip()


def test_a_client_that_does_not_read_delays_no_other_and_its_stream_is_not_buffered(
    server, client, ends
):
    """Its socket takes a few bytes; the request runs on, and its events are not written ahead."""
    ends.clear()
    slow = [connect(server, "/test/stream", b'{"length": 400}') for _ in range(8)]
    try:
        assert len(client.post("/test/whole", json={"length": 50}).json()["tokens"]) == 50
        wait_for(lambda: ends.count(FinishReason.LENGTH) == 9)  # earlier tests' are cancelled
    finally:
        for one in slow:
            one.close()
    server.wait_idle()
