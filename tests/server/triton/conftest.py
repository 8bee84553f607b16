"""The server's gRPC front, and tritonclient's clients of it and of HTTP."""

from dataclasses import replace

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from triton_calls import arrays_of, inputs_of, streaming

from gptmanager.server.triton.grpc_service import GrpcFront


@pytest.fixture(scope="package")
def front(server):
    front = server.run(GrpcFront.start(server.engine, replace(server.settings, grpc_port=0)))
    yield front
    server.run(front.stop(0))


@pytest.fixture(scope="package")
def grpc(front):
    with grpcclient.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
        yield client


@pytest.fixture(scope="package")
def http(server):
    with httpclient.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture
def stream(grpc):
    with streaming(grpc) as stream:
        yield stream


@pytest.fixture
def infer(grpc):
    """One call, one response: its outputs by name."""

    def infer(model="tensorrt_llm", call=None, **values):
        return arrays_of(grpc.infer(model, inputs_of(grpcclient, **values), **(call or {})))

    return infer


@pytest.fixture
def expected(server):
    """The result of the same request through the queue: an InferenceRequest's names."""

    def expected(tokens, new, **by_name):
        by_name = {"end_id": -1, **by_name}
        return server.engine.queue.submit(tokens, new, **by_name).result(20)

    return expected
