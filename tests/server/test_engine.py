"""`Engine` and `Call`: what is refused before it runs, and how requests end with their calls."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
from call_results import results_of
from running_server import running_server, settings_of

from gptmanager import FinishReason
from gptmanager.callbacks import AsyncRequestQueue
from gptmanager.callbacks.queue.result import error_of
from gptmanager.errors import CapacityError, response_text
from gptmanager.executor.out_of_memory import failures
from gptmanager.journal.journaled_host import _FULL
from gptmanager.server.engine.call import Call, EngineRequest
from gptmanager.server.errors import ApiError, api_error
from gptmanager.server.http import request_log

ENDLESS = {"end_id": -1}  # no token ends it


def a_request(length=400, prompt=(5, 6, 7), **by_name):
    return EngineRequest(list(prompt), length, **ENDLESS, **by_name)


@pytest.fixture(scope="module")
def narrow():
    """Two requests run, two may wait."""
    settings = settings_of(max_concurrency=2, max_queued_requests=2, max_queued_tokens=10)
    with running_server(settings) as server:
        yield server


def refused(engine, *requests):
    with pytest.raises(ApiError) as caught:
        engine.submit(requests)
    return caught.value


async def results(engine, *requests):
    async with engine.submit(requests) as call:
        return await results_of(call)


def test_parts_of_all_requests_come_as_they_are(server):
    async def main():
        tokens, ended = {0: [], 1: []}, {}
        requests = [a_request(20, is_streaming=True), a_request(5, [9], is_streaming=True)]
        async with server.engine.submit(requests) as call:
            async for index, part in call.parts():
                assert part.tokens or part.result
                tokens[index] += part.tokens
                if part.result is not None:
                    ended[index] = part.result
        return tokens, ended

    tokens, ended = server.run(main())
    assert [len(tokens[0]), len(tokens[1])] == [20, 5]
    for index, result in ended.items():
        assert result.generated_ids[0] == tuple(tokens[index])
        assert result.finish_reasons == (FinishReason.LENGTH,)
    server.wait_idle()


def test_parts_have_their_own_tensors(server):
    async def main():
        parts = []
        request = a_request(12, is_streaming=True, return_log_probs=True)
        async with server.engine.submit([request]) as call:
            async for _, part in call.parts():
                parts.append(part)
        return parts

    parts = server.run(main())
    for part in parts:
        if part.tokens:
            assert part.tensors["output_log_probs"].shape == (1, 1, len(part.tokens))
    joined = np.concatenate(
        [part.tensors["output_log_probs"][0, 0] for part in parts if part.tokens]
    )
    whole = parts[-1].result.tensors["output_log_probs"][0, 0]
    assert joined.tolist() == whole.tolist() and len(joined) == 12


def test_results_come_in_the_order_of_the_requests(server):
    found = server.run(results(server.engine, a_request(9), a_request(3), a_request(6)))
    assert [len(result.generated_ids[0]) for result in found] == [9, 3, 6]


def test_what_can_never_run_is_refused_with_its_limit(server):
    long = refused(server.engine, a_request(8), a_request(500, range(2, 15)))
    assert long.status == 400 and long.code == "context_length_exceeded"
    assert "513" in long.message and "512" in long.message and long.param == "max_tokens"
    assert refused(server.engine, a_request(1, [5] * 512)).param == "prompt"
    assert refused(server.engine, a_request(1, [])).status == 400
    assert refused(server.engine, a_request(0)).param == "max_tokens"
    assert refused(server.engine, a_request(3, adapter="none")).status == 404
    assert server.engine.counts == (0, 0)


def test_an_error_of_the_manager_is_one_of_the_api(server):
    with pytest.raises(ApiError, match="vocabulary|640") as caught:
        server.run(results(server.engine, a_request(3, [10**6])))
    assert caught.value.status == 400
    server.wait_idle()


def test_a_call_that_is_left_stops_what_runs(server):
    async def main():
        requests = [a_request(is_streaming=True) for _ in range(3)]
        async with server.engine.submit(requests) as call:
            async for _ in call.parts():
                assert server.engine.counts != (0, 0)
                return call

    call = server.run(main())
    server.wait_idle()
    reasons = {it.generation.result(20).finish_reasons for it in call._running}
    assert reasons == {(FinishReason.CANCELLED,)}
    assert server.engine.manager.audit().ok


def test_a_request_past_its_deadline_is_timed_out(server):
    async def parts():
        request = a_request(is_streaming=True, deadline_s=0.03)
        async with server.engine.submit([request]) as call:
            return [part async for _, part in call.parts()]

    last = server.run(parts())[-1]
    assert last.result.finish_reasons == (FinishReason.TIMED_OUT,)
    with pytest.raises(ApiError) as caught:
        server.run(results(server.engine, a_request(deadline_s=0.0)))
    assert caught.value.status == 504


def test_a_deadline_counts_from_the_arrival_of_a_request(server, client, monkeypatch):
    """Not from when its prompt is prepared: it may have waited for a thread, or for a grammar."""
    body = {"prompt": "a", "max_tokens": 1, "deadline_s": 99}
    assert client.post("/v1/completions", json=body).status_code == 200
    earlier = SimpleNamespace(monotonic=lambda: time.monotonic() - 100)
    monkeypatch.setattr(request_log, "time", earlier)
    body |= {"max_tokens": 400, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 504


@pytest.fixture
def evicted():
    """`evicted(again)`: a kept call whose request has failed for lack of its adapter; `again`
    answers the request that is sent again. Also the ends that the call has reported.
    """

    def call(again):
        queue, ends = AsyncRequestQueue(), []

        def submit(error):
            generation = queue.submit([5], 1, request_id=1, timeout=0.0)
            if error:
                queue.get_inference_requests(-1)
                queue.send_response(1, [], True, error)
            return generation

        given = [submit("")], [lambda: submit(again)], [None]
        found = Call(*given, lambda *_: None, lambda _: None, 1, is_kept=True)
        found.on_last_end(lambda: ends.append(found.has_ended))
        queue.get_inference_requests(-1)
        queue.send_response(1, [], True, "AdapterError: it was evicted")
        return queue, found, ends

    return call


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_kept_call_ends_with_the_request_that_was_sent_again(evicted, has_reader):
    async def main():
        queue, call, ends = evicted("")
        if has_reader:  # before the event loop hears of the end
            assert call._take(call._running[0]) is None
        await asyncio.sleep(0)
        assert queue.num_pending == 1 and not call.has_ended and not ends
        queue.get_inference_requests(-1)
        queue.send_response(1, [], True, "CapacityError: too large")
        await asyncio.sleep(0)
        assert ends == [True]
        [(_, error)] = [part async for part in call.outcomes()]
        assert error.message == "too large"

    asyncio.run(main())


def test_a_late_reader_leaves_the_metrics_of_a_repeated_call_alone():
    """After its end, a call of the same key has requests of the same ids."""

    async def main():
        queue, reasons = AsyncRequestQueue(), []
        generation = queue.submit([5], 1, request_id=1, timeout=0.0)
        call = Call(
            [generation],
            [None],
            [None],
            lambda *it: reasons.append(it[1]),
            lambda _: None,
            1,
            is_kept=True,
        )
        reader = call.joined()
        reader.stop(0)
        call.end()
        reader.stop(0)
        generation.cancel()
        return reasons

    assert asyncio.run(main()) == ["stop", "cancelled", None]


def test_a_request_that_fails_at_once_when_it_is_sent_again_has_an_error_of_the_api(evicted):
    async def main():
        _, call, _ = evicted("CapacityError: too large")
        return [part async for part in call.outcomes()]

    [(_, error)] = asyncio.run(main())
    assert error.status == 400 and error.message == "too large"


def test_a_second_attempt_that_is_refused_ends_the_call_for_every_reader(evicted):
    def refuse():
        raise ApiError(429, "the queue is full")

    async def main():
        _, call, ends = evicted("")
        call._submitted[0].send_again = refuse
        one, other = call, call.joined()
        await asyncio.sleep(0)
        assert ends == [True]
        return [part async for part in one.outcomes()], [part async for part in other.outcomes()]

    assert [error.status for [(_, error)] in asyncio.run(main())] == [429, 429]


def test_no_more_wait_than_may(narrow):
    engine = narrow.engine

    async def main():
        calls = [engine.submit([a_request(is_streaming=True)]) for _ in range(2)]  # these run
        while engine.counts.waiting:
            await asyncio.sleep(0)
        calls.append(engine.submit([a_request(prompt=[5] * 3), a_request(prompt=[5] * 3)]))
        error = refused(engine, a_request())
        assert error.status == 429 and int(error.headers["Retry-After"]) >= 1
        assert "--max-queued-requests" in error.message
        assert sum(engine.counts) == 4
        for call in calls:
            async with call:
                pass

    with narrow.held():
        narrow.run(main())
        narrow.wait_idle()


def test_a_call_that_does_not_fit_as_a_whole_runs_not_at_all(narrow):
    async def main():
        async with narrow.engine.submit([a_request()]):
            error = refused(narrow.engine, *[a_request(3) for _ in range(4)])
            assert error.status == 429 and sum(narrow.engine.counts) == 1
        await asyncio.to_thread(narrow.wait_idle)
        found = await results(narrow.engine, *[a_request(3, [5]) for _ in range(4)])
        assert len(found) == 4

    narrow.run(main())


def test_more_at_once_than_ever_fits_is_not_to_be_tried_again(narrow):
    many = refused(narrow.engine, *[a_request(3, [5]) for _ in range(5)])
    assert many.status == 400 and "5 requests" in many.message and "4 may run" in many.message
    long = refused(narrow.engine, *[a_request(3, [5] * 4) for _ in range(3)])
    assert long.status == 400 and "12 tokens" in long.message
    assert "--max-queued-tokens = 10" in long.message
    assert narrow.engine.counts == (0, 0)


def test_prompts_that_wait_are_counted_in_tokens(narrow):
    async def main():
        engine = narrow.engine
        async with engine.submit([a_request(), a_request()]):
            while engine.counts.waiting:
                await asyncio.sleep(0)
            error = refused(engine, a_request(prompt=[5] * 11))
            assert error.status == 429 and "--max-queued-tokens = 10" in error.message
            async with engine.submit([a_request(prompt=[5] * 10)]):
                assert engine.counts == (2, 1)

    with narrow.held():
        narrow.run(main())
        narrow.wait_idle()


def test_the_end_of_a_server_times_out_what_still_runs(caplog):
    caplog.set_level("INFO")
    with running_server(settings_of()) as server:

        async def main():
            async with server.engine.submit([a_request(is_streaming=True)]) as call:
                draining = asyncio.ensure_future(server.engine.drain(0.0))
                parts = [part async for _, part in call.parts()]
                assert refused(server.engine, a_request()).status == 503
            await draining
            return parts

        assert server.run(main())[-1].result.finish_reasons == (FinishReason.TIMED_OUT,)
    assert "new requests are refused; calls that still run, for at most 0 s: 1" in caplog.messages


def test_a_dead_manager_fails_all_calls():
    with running_server(settings_of()) as server:

        async def main():
            async with server.engine.submit([a_request(is_streaming=True)]) as call:
                async for _ in call.parts():
                    asyncio.get_running_loop().run_in_executor(
                        None, lambda: server.engine.manager.shutdown(drain=False)
                    )
                    break
                with pytest.raises(ApiError) as caught:
                    async for _ in call.parts():
                        pass
                assert caught.value.status == 503
            while server.engine.is_ready:
                await asyncio.sleep(0)
            server.engine.manager.wait()
            while not server.engine.queue._closed_by:
                await asyncio.sleep(0)
            assert refused(server.engine, a_request()).status == 503

        server.run(main())


def test_a_shortage_that_may_pass_is_not_an_error_of_the_request():
    rows = SimpleNamespace(rows=[SimpleNamespace(request_id=1, slot=2)])
    lost = SimpleNamespace(lost=[(2, "2 GiB")])
    [failure] = failures(SimpleNamespace(slot_of=lambda line: line), rows, lost)
    for error in (failure.error, CapacityError(_FULL)):
        found = api_error(error_of(response_text(error)))
        assert (found.status, found.headers["Retry-After"]) == (503, "1") and found.is_transient
    assert api_error(CapacityError("300 tokens exceed max_seq_len = 200")).status == 400
