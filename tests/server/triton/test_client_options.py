"""tritonclient's other clients, asyncio's among them, and what they can be told."""

import asyncio

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as httpclient
import tritonclient.http.aio as http_aio
from triton_calls import inputs_of, prompt, streaming

TOKENS = [9, 30, 71, 5, 12]
# what clients may add to any call; nothing here changes an output
BESIDES = {
    "sequence_id": 5,
    "sequence_start": True,
    "sequence_end": True,
    "priority": 1,
    "timeout": 10**9,
    "headers": {"x-one": "1"},
    "parameters": {"one": "1", "two": 2},
}
PACKED = [None, "gzip", "deflate"]


@pytest.fixture
def wanted(expected):
    return list(expected(TOKENS, 8).output_ids[0])


def ids(result):
    return result.as_numpy("output_ids")[0, 0].tolist()


@pytest.mark.parametrize("packed", PACKED)
def test_grpc(front, wanted, packed):
    alive = grpcclient.KeepAliveOptions(
        keepalive_time_ms=10_000, keepalive_permit_without_calls=True
    )
    url = f"127.0.0.1:{front.port}"
    with grpcclient.InferenceServerClient(url, keepalive_options=alive) as client:
        inputs = inputs_of(grpcclient, **prompt(*TOKENS))
        result = client.infer("tensorrt_llm", inputs, compression_algorithm=packed, **BESIDES)
        assert ids(result) == wanted
        assert result.get_response(as_json=True)["model_version"] == "1"
        config = client.get_model_config("tensorrt_llm", as_json=True)["config"]
        assert config["model_transaction_policy"]["decoupled"] is True
        with streaming(client) as stream:
            parameters = {"enable_empty_final_response": True}
            stream.send(**prompt(*TOKENS, streaming=True), parameters=parameters)
            assert [token for one in stream.all() for token in one.tokens] == wanted[5:]


def test_grpc_of_asyncio(front, wanted, server):
    async def requests():
        for id in "abc":
            inputs = inputs_of(grpcclient, **prompt(*TOKENS, streaming=True))
            yield {"model_name": "tensorrt_llm", "inputs": inputs, "request_id": id}

    async def main():
        async with grpc_aio.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
            assert await client.is_server_ready() and await client.is_model_ready("ensemble")
            inputs = inputs_of(grpcclient, **prompt(*TOKENS))
            assert ids(await client.infer("tensorrt_llm", inputs, **BESIDES)) == wanted
            came = {}
            async for result, error in client.stream_infer(requests()):
                assert error is None
                came.setdefault(result.get_response().id, []).extend(ids(result))
            assert came == dict.fromkeys("abc", wanted[5:])

    server.run(main())  # grpcio wants one event loop in a process
    server.wait_idle()


def test_http_of_asyncio(server, wanted):
    url = server.url.removeprefix("http://")
    inputs = inputs_of(httpclient, **prompt(*TOKENS))

    async def main():
        async with http_aio.InferenceServerClient(url) as client:
            assert await client.is_server_ready()
            return await asyncio.gather(
                *(
                    client.infer(
                        "tensorrt_llm",
                        inputs,
                        request_compression_algorithm=sent,
                        response_compression_algorithm=asked,
                        query_params={"one": "1"},
                        **BESIDES,
                    )
                    for sent in PACKED
                    for asked in PACKED
                )
            )

    assert all(ids(result) == wanted for result in server.run(main()))
