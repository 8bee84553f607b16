"""Calls that end early: stopped by their ids, cancelled, past a deadline, at the server's end."""

import asyncio
import copy
import gc
import queue
import threading
import weakref
from dataclasses import replace

import httpx
import pytest
import tritonclient.grpc as grpcclient
from running_server import running_server, settings_of, wait_for
from triton_calls import TIMEOUT_S, inputs_of, prompt, streaming, tokens_of
from tritonclient.utils import InferenceServerException

from gptmanager.server.triton.grpc_service import GrpcFront
from gptmanager.server.triton.inference import Inference

LONG = 480  # new tokens, of which all tests but one stop the last ones
STOP = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}


def long(**others):
    return prompt(9, 30, 71, new=LONG, **others)


@pytest.fixture
def held(server):
    """Let no long call end before it is stopped."""
    with server.held():
        yield


def cancelled(server):
    text = httpx.get(server.url + "/metrics").text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("gptmanager_requests_finished_total") and '"cancelled"' in line
    )


def test_a_stop_by_id_ends_a_stream_early(stream, server, held):
    id = stream.send(**long(streaming=True))
    first = [stream.next() for _ in range(3)]
    stream.stop(id)
    rest = []
    while not (rest and any(one.is_final and one.arrays for one in rest)):
        rest.append(stream.next())
    answers = [one for one in rest if not one.arrays]
    rest = [one for one in rest if one.arrays]
    answers = answers or [stream.next()]
    assert [one.id for one in answers] == [id] and answers[0].is_final
    assert 3 <= len(tokens_of(first + rest)) < LONG and rest[-1].is_final
    server.wait_idle()


def test_a_stop_comes_from_anywhere(stream, server, grpc, expected):
    """Over another connection; and every call of that id ends, with what it has."""
    wanted = expected([9, 30, 71], LONG).output_ids[0]
    for send in (
        lambda: grpc.infer("tensorrt_llm", inputs_of(grpcclient, **STOP), request_id="mine"),
        lambda: httpx.post(
            f"{server.url}/v2/models/tensorrt_llm/generate", json={**STOP, "id": "mine"}
        ).raise_for_status(),
    ):
        with server.held(num_requests=3):
            stream.send(id="mine", **long())
            stream.send(id="mine", **long(streaming=True))
            stream.send(id="other", **long())
            assert stream.next().id == "mine"  # so they run
            send()
            came = []
            while sum(one.is_final for one in came) < 2:
                came.append(stream.next())
            assert {one.id for one in came} == {"mine"}
            whole = next(one for one in came if one.arrays["output_ids"].shape[2] > 1)
            assert whole.tokens == list(wanted[: len(whole.tokens)]) and len(whole.tokens) < LONG
            stream.stop("other")
            came = [stream.next(), stream.next()]
            assert {one.id for one in came} == {"other"} and all(one.is_final for one in came)
            server.wait_idle()


def test_what_the_fronts_share_ends_with_them(server):
    engine = copy.copy(server.engine)
    shared = Inference.of(engine, server.settings)
    assert Inference.of(engine, server.settings) is shared
    gone = weakref.ref(engine)
    del engine, shared
    gc.collect()
    assert gone() is None


def test_a_stop_right_after_its_call_finds_it(stream, server):
    for model, call in (
        ("tensorrt_llm", long()),
        ("ensemble", {"text_input": [b"Tom " * 100], "max_tokens": 8, "end_id": -1}),
    ):
        id = stream.send(model, **call)
        stream.stop(id)
        came = [stream.next(), stream.next()]
        assert {one.id for one in came} == {id}
        whole = next(one for one in came if one.arrays)
        assert model == "ensemble" or len(whole.tokens) < LONG
    server.wait_idle()


def test_a_stop_of_nothing(grpc):
    inputs = inputs_of(grpcclient, **STOP)
    answer = grpc.infer("tensorrt_llm", inputs, request_id="nobody").get_response()
    assert answer.id == "nobody" and not answer.outputs
    with pytest.raises(InferenceServerException, match="without specifying a request_id") as error:
        grpc.infer("tensorrt_llm", inputs)
    assert "INVALID_ARGUMENT" in error.value.status()


def test_the_requests_of_a_cancelled_stream_end(grpc, server, held):
    before = cancelled(server)
    with streaming(grpc) as stream:
        stream.send(**long(streaming=True))
        stream.send(**long(streaming=True))
        stream.next()
        grpc.stop_stream(cancel_requests=True)
        errors = []
        while not errors:
            response = stream.next()
            errors += [response.error] if response.error is not None else []
        assert "CANCELLED" in errors[0].status()
    server.wait_idle()
    wait_for(lambda: cancelled(server) == before + 2)


def test_the_request_of_a_cancelled_call_ends(grpc, server, held):
    before, came = cancelled(server), queue.Queue()
    call = grpc.async_infer(
        "tensorrt_llm",
        inputs_of(grpcclient, **long()),
        callback=lambda result, error: came.put(error),
    )
    wait_for(lambda: server.engine.counts.running)
    call.cancel()
    assert "CANCELLED" in came.get(timeout=TIMEOUT_S).status()
    server.wait_idle()
    wait_for(lambda: cancelled(server) == before + 1)


def test_a_client_that_closes_its_side_gets_all_answers(grpc, server):
    with streaming(grpc) as stream:
        stream.send(**prompt(9, 30, new=30, streaming=True))
        grpc.stop_stream()  # returns when the stream has ended
        assert len(tokens_of([stream.came.get_nowait() for _ in range(30)])) == 30
    server.wait_idle()


def test_a_timeout_ends_a_call(grpc, server, held):
    with pytest.raises(InferenceServerException, match="the request timed out") as error:
        grpc.infer("tensorrt_llm", inputs_of(grpcclient, **long()), timeout=1000)  # microseconds
    assert "DEADLINE_EXCEEDED" in error.value.status()
    with pytest.raises(InferenceServerException):
        grpc.infer("tensorrt_llm", inputs_of(grpcclient, **long()), client_timeout=0.05)
    server.wait_idle()


def test_priorities_order_what_waits():
    """1 is the highest; what gives none is as 2."""
    with running_server(settings_of(max_concurrency=1)) as server:
        front = server.run(GrpcFront.start(server.engine, replace(server.settings, grpc_port=0)))
        with grpcclient.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
            is_full = threading.Event()
            with streaming(client) as stream, server.held(is_full.is_set, after=1):
                stream.send(**prompt(9, 30, 71, new=100, streaming=True))
                stream.next()
                order = {"low": 3, "middle": None, "high": 1}
                for id, priority in order.items():
                    given = {} if priority is None else {"parameters": {"priority": priority}}
                    stream.send(id=id, **prompt(9, 30, new=2), **given)
                wait_for(lambda: server.engine.counts.waiting == 3)
                is_full.set()
                finals = []
                while len(finals) < 4:
                    response = stream.next()
                    finals += [response.id] if response.is_final else []
        server.run(front.stop(0))
    # the first one's last tokens may still wait for the reader when the next has ended
    assert [id for id in finals if id in order] == ["high", "middle", "low"]


def test_slow_readers_hold_up_themselves_alone(front, server, grpc, expected):
    """Nothing is kept for them but a few responses."""
    pb, service = grpcclient.service_pb2, grpcclient.service_pb2_grpc
    message = pb.ModelInferRequest(model_name="tensorrt_llm", id="slow")
    for given in inputs_of(grpcclient, **long(streaming=True, return_generation_logits=True)):
        message.inputs.append(given._get_tensor())
        message.raw_input_contents.append(given._get_content())

    async def main():
        import grpc as grpc_package

        async with grpc_package.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            call = service.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await call.write(message)
            await call.done_writing()
            first = await call.read()
            while server.engine.counts.running:  # the engine waits for no reader
                await asyncio.sleep(0.01)
            count = 1
            while (answer := await call.read()) is not grpc_package.aio.EOF:
                count += 1
                assert not answer.error_message
            return first.infer_response.id, count

    assert asyncio.run(main()) == ("slow", LONG)
