"""Streams that wait: comments, refusals, ends. And outputs lowered to what fits."""

import asyncio

import httpx
import pytest
from running_server import running_server, settings_of

from gptmanager.errors import ConfigError
from gptmanager.server.context_length import ContextLength
from gptmanager.server.errors import ApiError
from gptmanager.server.http.body import COMMENT, KeptAlive, StartedStream, start_stream
from gptmanager.server.http.warning_header import Warnings


def test_comments_until_the_first_frame():
    async def run():
        may_begin, ended = asyncio.Event(), []

        async def frames():
            try:
                await may_begin.wait()
                yield b"one"
                yield b"two"
            finally:
                ended.append(True)

        stream = await start_stream(frames(), 1e-3)
        assert isinstance(stream, KeptAlive)
        found = [await anext(stream) for _ in range(3)]
        may_begin.set()
        found += [frame async for frame in stream]
        assert found[:3] == [COMMENT] * 3 and found[-2:] == [b"one", b"two"]
        may_begin.clear()
        stream = await start_stream(frames(), 1e-3)
        assert await anext(stream) == COMMENT
        await stream.aclose()  # its client has disconnected
        assert ended == [True, True]

    asyncio.run(run())


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_of_the_start_is_raised_and_a_later_one_is_in_the_stream(is_late):
    async def frames():
        if is_late:
            await asyncio.sleep(0.01)
        raise ApiError(429, "too many")
        yield

    async def run():
        if not is_late:
            with pytest.raises(ApiError):
                await start_stream(frames(), 10)
            return
        stream = await start_stream(frames(), 10)
        with pytest.raises(ApiError):
            await anext(stream)

    asyncio.run(run())


def test_an_empty_stream_ends():
    async def frames():
        for frame in ():
            yield frame

    async def slow():
        await asyncio.sleep(0.01)
        for frame in ():
            yield frame

    async def run():
        first = await start_stream(frames(), 1)
        assert isinstance(first, StartedStream)
        assert [it async for it in await start_stream(slow(), 1)] == []

    asyncio.run(run())


def waits(server, path, body):
    """The first lines of a stream that waits while the requests of another call run in turn."""
    long = {"prompt": [1, 2], "n": 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    other = httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=60)
    own = httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60)
    with other as running:
        first = running.iter_lines()  # closing it would end the request
        assert next(first)
        with own as waiting:
            lines = waiting.iter_lines()
            return [next(lines), next(lines)]


def test_a_server_with_both_options():
    fields = {"params": {"max_batch_size": 1}, "max_concurrency": 1}
    settings = settings_of(sse_keep_alive=0.02, clamp_max_tokens=True, **fields)
    with running_server(settings) as server:
        asks = [{"role": "user", "content": "a"}]
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": asks}),
            ("/v1/responses", {"input": "a"}),
        ):
            assert waits(server, path, body)[0] == ": keep-alive", path
        messages = {"messages": asks, "max_tokens": 2}
        assert waits(server, "/v1/messages", messages) == ["event: ping", 'data: {"type":"ping"}']
        most = server.engine.card.max_model_len
        body = {"prompt": [1, 2], "max_tokens": 10**12, "ignore_eos": True, "stream": True}
        post = f"{server.url}/v1/completions"
        answer = httpx.post(post, json=body, timeout=60)
        assert (
            f"max_tokens = 1000000000000 does not fit and is lowered to {most - 2}"
            in (answer.headers["Warning"])
        )
        assert answer.text.endswith("data: [DONE]\n\n") and (
            answer.text.replace(COMMENT.decode(), "").startswith("data: {")
        )
        assert httpx.post(post, json={**body, "n": 64, "max_tokens": 1}).status_code == 200
        refused = httpx.post(post, json={**body, "prompt": [1] * most, "max_tokens": 1})
        assert refused.status_code == 400 and "maximum context length" in refused.text


def test_what_is_lowered():
    warnings = Warnings()
    length = ContextLength(100, clamps=True)
    assert [length.clamped(90, n, "max_tokens", warnings) for n in (10, 11)] == [10, 10]
    assert length.clamped(100, 5, "max_tokens", warnings) == 1  # then the prompt is refused
    assert warnings.headers()["Warning"].count("299") == 2
    assert ContextLength(100).clamped(90, 11, "max_tokens", warnings) == 11
    length.check_scored(99)


@pytest.mark.parametrize("value", [0, -1.0])
def test_a_wrong_interval_is_named(value):
    with pytest.raises(ConfigError, match="sse_keep_alive = .* must be more than 0"):
        settings_of(sse_keep_alive=value)
