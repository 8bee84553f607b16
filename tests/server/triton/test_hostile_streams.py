"""Streams over gRPC of clients that do not read, and of those that send what is no message."""

import asyncio
from dataclasses import replace

import grpc as grpc_package
import tritonclient.grpc as grpcclient
from triton_calls import TIMEOUT_S, message_of, prompt

from gptmanager.server.triton.grpc_log import CallLog
from gptmanager.server.triton.grpc_service import TritonService, _Call
from gptmanager.server.triton.inference import Inference

pb = grpcclient.service_pb2
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


class Unread:
    """The context of a call whose client reads nothing before `reads` is set."""

    def __init__(self):
        self.reads = asyncio.Event()
        self.answers = []

    def invocation_metadata(self):
        return (("x-request-id", "mine"), ("data-bin", b"\xff"))

    async def write(self, answer):
        await self.reads.wait()
        self.answers.append(answer)


def service_of(server, **limits):
    settings = replace(server.settings, **limits)
    log = CallLog(server.engine.keys, server.engine.metrics.request_log)
    inference = Inference.of(server.engine, server.settings)
    return TritonService(inference, settings, server.engine.body_budget, log)


def test_the_errors_of_a_disconnected_client_fail_no_task(server):
    async def gone(answer):
        written.append(answer.error_message)
        raise grpc_package.aio.UsageError("the call has ended")

    written, call = [], _Call(pb.ModelInferRequest(model_name="none"), 10)
    server.run(service_of(server)._answer(call, gone, Unread()))
    assert len(written) == 1 and "'none' is not found" in written[0]


def test_a_flood_of_calls_with_unread_answers_is_not_taken_in(server):
    taken = 0

    async def flood():
        nonlocal taken
        for taken in range(1, 401):  # noqa: B007
            yield _Call(pb.ModelInferRequest(model_name="none", id=str(taken)), 10)

    async def main():
        client = Unread()
        service = service_of(server, max_concurrency=2, max_queued_requests=3)
        stream = asyncio.create_task(service.ModelStreamInfer(flood(), client))
        for _ in range(2000):
            await asyncio.sleep(0)
        assert 5 < taken < 40 and not client.answers
        client.reads.set()
        await stream
        return client.answers

    answers = server.run(main())
    assert [one.infer_response.id for one in answers] == [str(index + 1) for index in range(400)]
    assert all("'none' is not found" in one.error_message for one in answers)


def test_an_invalid_message_leaves_the_stream(server, front):
    async def main():
        async with grpc_package.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            call = channel.stream_stream(
                METHOD,
                request_serializer=bytes,
                response_deserializer=pb.ModelStreamInferResponse.FromString,
            )(timeout=TIMEOUT_S)
            good = message_of(**prompt(9, 30, 71, new=2)).SerializeToString()
            answers = []
            for raw in (good, b"\xff\xff\xff\xff", good):
                await call.write(raw)
                answers.append(await call.read())
            await call.done_writing()
            assert await call.read() is grpc_package.aio.EOF
            return [one.error_message for one in answers]

    before, told, after = server.run(main())
    assert before == after == "" and "does not match the service definition" in told
    server.wait_idle()
