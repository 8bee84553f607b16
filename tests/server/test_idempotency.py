"""Calls with an Idempotency-Key: sent again, they are joined, also by a new server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import threading

import httpx
import pytest
import torch
from call_results import results_of
from responding import ending, whole
from running_server import running_server, settings_of
from served_process import served_process

from gptmanager import FinishReason, NamedTensor
from gptmanager.callbacks import AsyncRequestQueue
from gptmanager.server.engine import kept_calls, restored_responses
from gptmanager.server.engine.call import Call
from gptmanager.server.engine.engine import Engine
from gptmanager.server.engine.restored_responses import RestoredResponses
from gptmanager.server.errors import ApiError
from gptmanager.server.http.idempotency import PATHS, CallKey

STORY = "Lily had a grey book. Max had a brown coat."
CHAT = {"messages": [{"role": "user", "content": STORY}]}
BODIES = dict(
    zip(
        PATHS,
        (
            {**CHAT, "max_tokens": 40},
            {"prompt": STORY, "max_tokens": 40},
            {"input": STORY, "max_output_tokens": 40, "temperature": 0},
            {**CHAT, "model": "tiny_llama", "max_tokens": 40},
        ),
        strict=True,
    )
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("one secret-1\ntwo secret-2 2\n")
    keys.chmod(0o600)
    folder = tmp_path_factory.mktemp("journal")
    with running_server(settings_of(api_key_file=keys, journal=folder / "own")) as it:
        yield it


def post(server, path, body, key, secret="secret-1", **more):
    headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": key}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60, **more)


def without_times(answer):
    """An answer without its times, and without the random ids of a response."""
    times = ("created", "created_at", "completed_at")
    if answer["object" if "object" in answer else "type"] == "response":
        return answer["output"][0]["content"], answer["usage"]
    return {name: value for name, value in answer.items() if name not in times}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_sent_again_has_the_answer_of_the_first(server, path, stream):
    body = {**BODIES[path], "stream": stream}
    first = post(server, path, body, f"a{path}{stream}")
    before = server.engine.metrics.iterations.iterations
    again = post(server, path, body, f"a{path}{stream}")
    assert first.status_code == again.status_code == 200
    # nothing was computed: an iteration of the first call may be counted after its answer has come
    assert server.engine.metrics.iterations.iterations <= before + 1
    if stream:
        assert len(first.text) > 200 and first.text.count("data:") <= again.text.count("data:") + 45
    else:
        assert without_times(again.json()) == without_times(first.json())


def test_a_key_is_bound_to_its_body_and_to_its_api_key(server):
    body = BODIES["/v1/completions"]
    first = post(server, "/v1/completions", body, "bound").json()
    other = post(server, "/v1/completions", {**body, "max_tokens": 3}, "bound")
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    own = post(server, "/v1/completions", {**body, "max_tokens": 3}, "bound", secret="secret-2")
    assert own.status_code == 200 and own.json()["id"] != first["id"]


def test_a_call_that_names_no_seed_has_that_of_its_key_or_of_the_server(server):
    def seeds(key, number):
        given, settings = server.engine, settings_of(params={"seed": number})
        engine = Engine(given.card, given.manager, given.queue, settings, given.metrics)
        engine.kept.current.set(None if key is None else CallKey("secret", key))
        return [engine.new_seed() for _ in range(2)]

    assert seeds(b"a", 0) == seeds(b"a", 5) != seeds(b"b", 0)
    assert len({*seeds(b"a", 0)}) == 1 and len({*seeds(None, 0)}) == 2
    assert seeds(None, 5) == seeds(None, 5) != seeds(None, 6)
    assert seeds(None, 0) != seeds(None, 0)


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_the_key_of_a_call_is_not_that_of_the_next_one_on_its_connection(server, is_pipelined):
    """The first body is so large that the server stops and resumes reading."""

    def call(prompt, user, more=""):
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "user": user})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: secret-1\r\n"
        return f"{head}{more}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def answer(reader):
        while (line := reader.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return json.loads(reader.read(length))["choices"][0]["text"]

    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        with connection.makefile("rb") as reader:
            connection.sendall(
                call("17 + 25 =", "x" * 200_000, f"Idempotency-Key: {is_pipelined}\r\n")
            )
            first = None if is_pipelined else answer(reader)
            connection.sendall(call(STORY, "x"))
            first = answer(reader) if is_pipelined else first
            assert first == " 42" and answer(reader) != first


@pytest.mark.parametrize("key", ["", "x" * 256, "a b"])
def test_a_key_that_is_none_is_refused(server, key):
    refused = post(server, "/v1/completions", BODIES["/v1/completions"], key)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_idempotency_key"


def test_what_does_not_fit_is_refused_and_what_has_ended_makes_room(server, monkeypatch):
    body = {"prompt": "17 + 25 =", "max_tokens": 2}
    monkeypatch.setattr(kept_calls, "MAX_KEYS", len(server.engine.kept._kept) + 1)
    assert post(server, "/v1/completions", body, "fits").status_code == 200
    assert post(server, "/v1/completions", body, "makes-room").status_code == 200
    monkeypatch.setattr(kept_calls, "MAX_KEYS", 0)
    refused = post(server, "/v1/completions", body, "one-more")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_idempotency_keys"


def test_a_call_that_can_never_be_kept_has_no_retry_after(server, monkeypatch):
    """It does not drop ended calls either, whose room would not be enough."""
    monkeypatch.setattr(kept_calls, "MAX_BYTES", 4000)
    body = {"prompt": "17 + 25 =", "max_tokens": 80}
    kept = dict(server.engine.kept._kept)
    refused = post(server, "/v1/completions", body, "large")
    assert refused.status_code == 400 and "retry-after" not in refused.headers
    error = refused.json()["error"]
    assert error["code"] == "too_large_for_idempotency_key" and "at most 4000" in error["message"]
    assert server.engine.kept._kept == kept


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_whose_step_failed_runs_again_when_it_is_sent_again(server, monkeypatch, stream):
    loop, failed = server.engine.manager._worker.loop, []
    forward = loop.forward

    def fail_once(schedule):
        if failed:
            return forward(schedule)
        failed.append(schedule)
        raise RuntimeError("no memory for this step")

    monkeypatch.setattr(loop, "forward", fail_once)
    body = {**BODIES["/v1/completions"], "stream": stream, "n": 2}
    answers = [post(server, "/v1/completions", body, f"step-{stream}") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500, 200, 200]
    assert "no memory for this step" in answers[0].text


def test_a_call_that_has_timed_out_is_not_kept(server):
    before = [*server.engine.kept._kept]
    body = {**BODIES["/v1/completions"], "deadline_s": 1e-6}
    assert post(server, "/v1/completions", body, "late").status_code == 504
    assert [*server.engine.kept._kept] == before


def test_a_call_that_ended_before_its_timeout_had_an_effect_is_kept():
    async def main():
        queue, kept, key = AsyncRequestQueue(), kept_calls.KeptCalls(), CallKey("", b"a")
        request = queue.submit([5], 1, request_id=1, timeout=0.0)
        call = Call([request], [None], [None], ignore, ignore, 1, is_kept=True)
        kept.add(key, call, 100)
        queue.get_inference_requests(-1)
        call.time_out()
        assert not request.done()
        found = {
            "output_ids": torch.tensor([[[5, 7]]], dtype=torch.int32),
            "sequence_length": torch.tensor([[2]], dtype=torch.int32),
            "finish_reasons": torch.tensor([[FinishReason.LENGTH]], dtype=torch.int32),
        }
        queue.send_response(1, [NamedTensor(*it) for it in found.items()], True, "")
        await asyncio.sleep(0)
        [result] = await results_of(kept.find(key))
        assert result.finish_reasons == (FinishReason.LENGTH,)

    asyncio.run(main())


def ignore(*_):
    pass


async def half_failed(error, *, fails=0):
    """The queue, keeper and key of a call of two requests, one of which has had `error`."""
    queue, kept, key = AsyncRequestQueue(), kept_calls.KeptCalls(), CallKey("", b"a")
    generations = [queue.submit([5], 1, request_id=it, timeout=0.0) for it in (1, 2)]

    def cancel(generation, reason):
        generation.cancel()

    nothing = [None, None]
    call = Call(generations, nothing, nothing, cancel, lambda _: None, 2, is_kept=True)
    kept.add(key, call, 100)
    queue.get_inference_requests(-1)
    queue.send_response(1 + fails, [], True, error)
    await asyncio.sleep(0)
    return queue, kept, key


def test_a_call_that_has_failed_for_now_ends_its_other_requests_before_it_runs_again():
    async def main():
        queue, kept, key = await half_failed("StepError: the device is lost")
        assert queue.poll_stop_signal() == {2}
        with pytest.raises(ApiError) as refused:
            kept.find(key)
        assert refused.value.status == 503 and refused.value.code == "idempotency_key_in_use"
        queue.send_response(2, [], True, "StepError: the device is lost")
        await asyncio.sleep(0)
        assert kept.find(key) is None and kept._num_bytes == 0

    asyncio.run(main())


def test_an_error_that_stays_is_kept():
    async def main():
        queue, kept, key = await half_failed("CapacityError: too large")
        queue.send_response(2, [], True, "CapacityError: too large")
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too large") as refused:
            await results_of(kept.find(key))
        assert refused.value.status == 400

    asyncio.run(main())


@pytest.mark.parametrize("fails", [0, 1])
def test_a_reader_that_joins_gets_the_error_and_no_request_that_it_has_cancelled(fails):
    async def main():
        queue, kept, key = await half_failed("CapacityError: too large", fails=fails)
        other = 2 - fails
        queue.send_response(other, whole([5, 7], reason=FinishReason.CANCELLED), True, "")
        await asyncio.sleep(0)
        told = []
        with pytest.raises(ApiError, match="too large"):
            async for index, part in kept.find(key).parts():
                told.append((index, part.tokens, part.result))
        assert told in ([], [(1 - fails, [7], None)])
        found = dict([it async for it in kept.find(key).outcomes()])
        assert isinstance(found[fails], ApiError)
        assert found[1 - fails].result.finish_reasons == (FinishReason.CANCELLED,)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_new_server_goes_on_and_its_client_joins_from_the_first_token(
    server, tmp_path, monkeypatch, stream
):
    """The journal of the old one is copied while it runs, as if it had died there."""
    path, key = "/v1/completions", f"restored {stream}".replace(" ", "-")
    body = {**BODIES[path], "max_tokens": 200, "temperature": 1.0, "n": 2}
    body |= {"stream": stream, "ignore_eos": True}
    loop, steps = server.engine.manager._worker.loop, itertools.count()
    forward = loop.forward

    def copy_once(schedule):
        if next(steps) == 20:
            shutil.copytree(server.settings.journal, tmp_path / "copy")
        return forward(schedule)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "forward", copy_once)
        whole = post(server, path, body, key)
    keys = server.settings.api_key_file
    with running_server(settings_of(api_key_file=keys, journal=tmp_path / "copy")) as new:
        assert len(new.engine.restored._held) == 2
        other = post(new, path, {**body, "n": 1}, key)
        assert other.status_code == 422
        joined = post(new, path, body, key)
        assert joined.status_code == 200 and not new.engine.restored._held
        if not stream:
            assert joined.json()["choices"] == whole.json()["choices"]
        else:
            assert texts(joined) == texts(whole)
        new.wait_idle()


def texts(response):
    """The text of each choice of a stream."""
    return texts_of(response.text)


def texts_of(stream):
    found = {}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_answers_that_no_client_joins_are_dropped_after_a_time_and_beyond_a_size(monkeypatch):
    now, names = [0.0], [CallKey("", b"%d" % number).request_id(0) for number in range(4)]
    monkeypatch.setattr(restored_responses, "monotonic", lambda: now[0])
    monkeypatch.setattr(restored_responses, "MAX_BYTES", 2000)
    found = RestoredResponses()
    for number in names:
        found.restore(number)
    assert found.restore(7) is None
    part = [NamedTensor("output_ids", torch.zeros(75, dtype=torch.int64))]  # with the rest: 856
    found.hold(names[0], part, True, "")
    found.hold(names[1], part, True, "")
    assert [*found._held] == names
    found.hold(names[2], part, False, "")
    assert [*found._held] == names[1:]
    now[0] = restored_responses.KEEP_S + 1
    assert not found.hold(7, part, True, "")
    assert [*found._held] == names[2:]
    found.hold(names[2], [], True, "")
    now[0] += restored_responses.KEEP_S + 1
    assert found.join(names[2], object, print) is None
    assert [*found._held] == names[3:]
    assert found._num_bytes == 0


def test_a_restored_request_that_has_failed_for_now_is_not_held():
    found, names = RestoredResponses(), [CallKey("", b"%d" % it).request_id(0) for it in range(2)]
    for name, error in zip(names, ("StepError: lost", "CapacityError: too large"), strict=True):
        found.restore(name)
        assert found.hold(name, [], False, "") and found.hold(name, [], True, error)
    told = []
    assert found.join(names[0], object, lambda *given: told.append(given)) is None
    assert found.join(names[1], object, lambda *given: told.append(given)) is not None
    assert [error for *_, error in told] == ["", "CapacityError: too large"]


def test_a_restored_request_that_has_timed_out_runs_again():
    found, names = RestoredResponses(), [CallKey("", b"%d" % it).request_id(0) for it in range(2)]
    for name, reason in zip(names, (FinishReason.TIMED_OUT, FinishReason.LENGTH), strict=True):
        found.restore(name)
        assert found.hold(name, ending(reason), True, "")
    assert found.join(names[0], object, ignore) is None
    assert found.join(names[1], object, ignore) is not None


def test_a_response_that_arrives_during_a_join_comes_after_those_that_were_held():
    found, name, told = RestoredResponses(), CallKey("", b"a").request_id(0), []
    found.restore(name)
    for text in ("first", "second"):
        found.hold(name, [], False, text)
    arrives = threading.Thread(target=lambda: told.append(found.hold(name, [], False, "third")))

    def deliver(request_id, tensors, is_final, text):
        told.append(text)
        if text == "first":
            arrives.start()
            arrives.join(0.05)

    assert found.join(name, object, deliver) is not None
    arrives.join(30)
    assert told == ["first", "second", False]


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_when_it_starts_again(tmp_path):
    journal = ("--journal", str(tmp_path / "journal"), "--journal-sync", "always")
    body = {
        "prompt": STORY,
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
        "temperature": 1,
    }
    headers, seen = {"Idempotency-Key": "killed"}, ""
    with served_process(*journal, "--deterministic") as first, contextlib.suppress(httpx.HTTPError):
        call = httpx.stream(
            "POST", f"{first.url}/v1/completions", json=body, headers=headers, timeout=60
        )
        with call as answer:
            for number, line in enumerate(answer.iter_lines()):
                seen += line + "\n"
                if number == 20:
                    os.kill(first.pid, signal.SIGKILL)
    with served_process(*journal, "--deterministic") as second:
        assert "1 requests continue" in second.log()
        url = f"{second.url}/v1/completions"
        joined = httpx.post(url, json=body, headers=headers, timeout=120)
        again = httpx.post(url, json=body, headers=headers, timeout=120)
    assert joined.status_code == 200 and texts(again) == texts(joined)
    assert texts(joined)[0].startswith(texts_of(seen)[0]) and texts_of(seen)[0]
