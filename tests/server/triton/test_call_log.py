"""Lines of the log for calls of Triton's protocol, over HTTP and gRPC."""

import logging

import httpx
import pytest
import tritonclient.grpc as grpcclient
from running_server import wait_for
from triton_calls import inputs_of, prompt, streaming
from tritonclient.utils import InferenceServerException

from gptmanager.server.http.request_log import logger
from gptmanager.server.triton import repository

TOKENS = [3, 4, 5]
OURS = {"x-request-id": "mine-2"}


@pytest.fixture
def lines(caplog):
    """The fields of each line of our id, once there are `number`: they follow the answers."""
    caplog.set_level(logging.INFO, logger.name)

    def ours():
        fields = [it.fields for it in caplog.records if it.name == logger.name]
        return [it for it in fields if it["id"] == "mine-2"]

    def found(number=1):
        wait_for(lambda: len(ours()) >= number)
        return ours()

    return found


def check(line, model="tensorrt_llm"):
    assert (line["status"], line["model"], line["prompt_tokens"]) == (200, model, 3)
    assert line["generated_tokens"] == 2 and line["finish"] == "length"
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"]


def test_a_line_for_a_call_over_grpc(grpc, lines):
    inputs = inputs_of(grpcclient, **prompt(*TOKENS, new=2))
    grpc.infer("tensorrt_llm", inputs, request_id="call", headers=OURS)
    (line,) = lines()
    check(line)
    assert (line["id"], line["method"], line["answer"]) == ("mine-2", "gRPC", "call")
    assert line["route"] == "/inference.GRPCInferenceService/ModelInfer"


def test_a_line_for_each_call_of_a_stream(grpc, lines):
    with streaming(grpc, headers=OURS) as stream:
        for name in ("a", "b"):
            stream.send("tensorrt_llm", id=name, **prompt(*TOKENS, new=2))
            stream.next()
        found = lines(2)
    assert [line["answer"] for line in found] == ["a", "b"]
    for line in found:
        check(line)
        assert line["route"].endswith("/ModelStreamInfer")


def test_refusals_over_grpc_are_logged_and_counted(grpc, server, lines):
    count = server.engine.metrics.request_log.refusals
    before = count["404", "model_not_found"]
    with pytest.raises(InferenceServerException):
        grpc.infer("none", inputs_of(grpcclient, **prompt(*TOKENS, new=2)), headers=OURS)
    with pytest.raises(InferenceServerException):
        grpc.get_model_config("none", headers=OURS)
    found = lines(2)
    assert [(line["status"], line["code"]) for line in found] == [(404, "model_not_found")] * 2
    assert found[1]["route"].endswith("/ModelConfig")
    assert count["404", "model_not_found"] >= before + 2


def test_an_unexpected_error_over_grpc_is_the_server_s(grpc, server, lines, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr(repository, "model_config", fail)
    with pytest.raises(InferenceServerException, match="the server failed") as refused:
        grpc.get_model_config("tensorrt_llm", headers=OURS)
    (line,) = lines()
    assert line["status"] == 500 and "deep inside" not in str(refused.value)


def test_probes_over_grpc_leave_no_line(grpc, lines):
    assert grpc.is_server_live(headers=OURS) and grpc.is_server_ready(headers=OURS)
    grpc.get_server_metadata(headers=OURS)
    (line,) = lines()
    assert line["route"].endswith("/ServerMetadata")


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_a_line_for_a_call_over_http(server, lines, path):
    body = {"input_ids": TOKENS, "input_lengths": 3, "request_output_len": 2, "id": "call"}
    url = f"{server.url}/v2/models/tensorrt_llm/{path}"
    assert httpx.post(url, json=body, headers=OURS, timeout=20).status_code == 200
    (line,) = lines()
    check(line)
    assert line["answer"] == "call"
