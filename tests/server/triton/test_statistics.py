"""How many calls each model has answered: what load generators ask for before and after a run."""

import pytest
import tritonclient.grpc as grpcclient
from google.protobuf import json_format
from running_server import wait_for
from triton_calls import inputs_of, prompt
from tritonclient.utils import InferenceServerException

TOKENS = [9, 30, 71]


@pytest.fixture
def stats(grpc, http, server):
    """Return a function for the statistics of one model, which are the same over gRPC and HTTP."""

    def stats(name="tensorrt_llm"):
        server.wait_idle()
        (found,) = http.get_inference_statistics(name)["model_stats"]
        (message,) = grpc.get_inference_statistics(name).model_stats
        assert json_format.ParseDict(found, type(message)()) == message
        return message

    return stats


def counts(message):
    found = message.inference_stats
    return [
        found.success.count,
        found.fail.count,
        message.inference_count,
        message.execution_count,
    ]


def test_calls_that_succeed_and_that_fail(infer, stats, stream, grpc):
    before = stats()
    infer(**prompt(*TOKENS))
    stream.send(**prompt(*TOKENS, streaming=True))
    stream.all()
    with pytest.raises(InferenceServerException):
        infer(**prompt(*TOKENS, new=0))
    with pytest.raises(InferenceServerException):
        infer(**prompt(*TOKENS, temperature=-1.0))
    stop = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    with pytest.raises(InferenceServerException):
        infer(**stop)  # without an id
    grpc.infer("tensorrt_llm", inputs_of(grpcclient, **stop), request_id="1")
    expected = [old + 3 for old in counts(before)]
    wait_for(lambda: counts(stats()) == expected)  # a stream's call ends after its last response
    after = stats()
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    assert after.inference_stats.fail.ns > before.inference_stats.fail.ns
    assert after.last_inference >= before.last_inference and after.last_inference > 10**12


def test_rows_and_cancelled_calls(stream, stats, grpc, infer):
    infer(**prompt(*TOKENS))
    before = counts(stats())
    row = {name: [[value]] * 2 for name, value in prompt(new=4, input_lengths=3).items()}
    stream.send(**{**row, "input_ids": [TOKENS] * 2})
    stream.all()
    bad = {**row, "input_ids": [TOKENS] * 2, "temperature": [[1.0], [-1.0]]}
    stream.send(**bad)
    assert sum(stream.next().error is not None for _ in range(2)) == 1
    stream.send(**prompt(*TOKENS, new=480, streaming=True))
    stream.next()
    grpc.stop_stream(cancel_requests=True)
    expected = [old + more for old, more in zip(before, (1, 2, 2, 1), strict=True)]
    wait_for(lambda: counts(stats()) == expected)


def test_of_all_models_and_of_none(http, grpc):
    told = http.get_inference_statistics()["model_stats"]
    assert [one["name"] for one in told] == ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"]
    assert len(grpc.get_inference_statistics().model_stats) == 3
    assert "statistics" in grpc.get_server_metadata().extensions
    for client in (grpc, http):
        with pytest.raises(InferenceServerException, match="unknown model"):
            client.get_inference_statistics("other")
        assert client.get_inference_statistics("ensemble", "1")
