"""/v2 over HTTP: infer with JSON and bytes, generate, generate_stream, what is told of models."""

import gzip
import json
import zlib

import httpx
import numpy as np
import pytest
import tritonclient.http as httpclient
from triton_calls import arrays_of, inputs_of, prompt
from tritonclient.utils import InferenceServerException

TOKENS = [9, 30, 71, 5, 12]
JSON = [
    {"name": "input_ids", "shape": [1, 5], "datatype": "INT32", "data": [TOKENS]},
    {"name": "input_lengths", "shape": [1, 1], "datatype": "INT32", "data": [5]},
    {"name": "request_output_len", "shape": [1, 1], "datatype": "INT32", "data": [[[4]]]},
]
GENERATE = {"input_ids": TOKENS, "input_lengths": 5, "request_output_len": 4}
TEXT = {"text_input": "Tom had", "max_tokens": 6, "bad_words": "", "stop_words": ""}


@pytest.fixture
def post(server):
    def post(path, body, model="tensorrt_llm", **options):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{server.url}/v2/models/{model}/{path}", content=data, **options)

    return post


def ids(tokens):
    return [[list(tokens)]]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_infer_with_the_real_client(http, expected, binary, packed):
    inputs = inputs_of(httpclient, **prompt(*TOKENS, return_log_probs=True))
    if not binary:
        for tensor in inputs:
            data = np.array([TOKENS]) if tensor.name() == "input_ids" else None
            if data is not None:
                tensor.set_data_from_numpy(data.astype(np.int32), binary_data=False)
    outputs = [
        httpclient.InferRequestedOutput(name, binary_data=binary)
        for name in ("output_ids", "sequence_length", "output_log_probs")
    ]
    options = {"outputs": outputs, "request_id": "17", "request_compression_algorithm": packed}
    result = http.infer("tensorrt_llm", inputs, **options)
    wanted = expected(TOKENS, 8, return_log_probs=True)
    assert result.get_response()["id"] == "17"
    assert result.as_numpy("output_ids").tolist() == ids(wanted.output_ids[0])
    np.testing.assert_allclose(
        result.as_numpy("output_log_probs"), wanted.tensors["output_log_probs"], rtol=1e-6
    )
    assert len(result.get_response()["outputs"]) == 3


def test_all_outputs_come_as_json_or_as_bytes(http, post, expected):
    wanted = ids(expected(TOKENS, 4).output_ids[0])
    response = post("infer", {"id": "x", "inputs": JSON}).json()
    assert response["id"] == "x" and response["model_version"] == "1"
    found = {one["name"]: one for one in response["outputs"]}
    assert found["output_ids"]["data"] == wanted[0][0]
    assert found["output_ids"]["shape"] == [1, 1, 9] and len(found) == 8
    result = http.infer("tensorrt_llm", inputs_of(httpclient, **prompt(*TOKENS, new=4)))
    assert arrays_of(result)["output_ids"].tolist() == wanted  # all of them, as bytes
    parameters = {"parameters": {"binary_data_output": True}}
    response = post("versions/1/infer", {"inputs": JSON, **parameters})
    length = int(response.headers["inference-header-content-length"])
    assert "id" not in json.loads(response.content[:length])
    assert (
        np.frombuffer(response.content[length : length + 36], dtype=np.int32).tolist()
        == (wanted[0][0])
    )


def test_text_as_bytes_and_as_json(http, post):
    asked = {"text_input": [b"Tom had"], "max_tokens": 6}
    result = http.infer("ensemble", inputs_of(httpclient, **asked))
    whole = result.as_numpy("text_output")[0, 0].decode()
    inputs = [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["Tom had"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [6]},
    ]
    response = post("infer", {"inputs": inputs, "outputs": [{"name": "text_output"}]}, "ensemble")
    (output,) = response.json()["outputs"]
    assert output["data"] == [whole] and output["datatype"] == "BYTES"
    assert whole.startswith("Tom had")


def test_generate_takes_and_gives_plain_json(post, expected):
    told = post("generate", {**GENERATE, "id": "7", "parameters": {"a": 1}, "unknown": []}).json()
    assert told["output_ids"] == list(expected(TOKENS, 4).output_ids[0])
    assert told["id"] == "7" and told["model_name"] == "tensorrt_llm"
    assert told["sequence_length"] == 9 and told["batch_index"] == 0
    told = post("generate", {"text_input": "Tom had", "parameters": TEXT}, "ensemble").json()
    assert told == post("generate", TEXT, "ensemble").json()
    assert told["text_output"].startswith("Tom had") and told["model_version"] == "1"
    assert told["cum_log_probs"] == 0.0
    beams = post("generate", {**TEXT, "beam_width": 2}, "tensorrt_llm_bls").json()["text_output"]
    assert len(beams) == 2 and beams[0] != beams[1]


@pytest.mark.parametrize(
    "given, told",
    [
        ({"id": None, "parameters": None, "timeout": None, "stop_words": None}, None),
        ({"temperature": 1, "stream": 0, "return_log_probs": 1, "max_tokens": [6]}, None),
        ({"stop_words": []}, None),
        ({"stop": ["a"]}, None),
        ({"stop": False}, None),
        ({"stop": True, "id": "mine"}, "stop is an input of 'tensorrt_llm'"),
        ({"parameters": {"stop": True}}, "stop is an input of 'tensorrt_llm'"),
        ({"stream": 2}, "'stream'[0] = 2 must be of datatype BOOL"),
        ({"max_tokens": 6.0}, "'max_tokens'[0] = 6.0 must be of datatype INT32"),
        ({"max_tokens": [[6]]}, "'max_tokens' has lists deeper than 1"),
        ({"text_input": None}, "'text_input' is missing"),
        ({"text_input": ["a", "b"]}, "Expected [-1, 1], got [1, 2]"),
        ({"text_input": "a " * 500_000}, "exceeds maximum input length (511)."),
        ({"stop_words": [["a"], ["b", "c"]]}, "'stop_words' has lists deeper than 1"),
        ({"stop_words": [["a"], "b"]}, "'stop_words' has lists deeper than 1"),
        ({"lora_config": [[1, 2], [3], [4, 5, 6]]}, "lists of different lengths"),
        ({"stop_words": [[[[[[[[[["a"]]]]]]]]]]}, "'stop_words' has lists deeper than 1"),
        ({"temperature": 10**400}, "the body is not JSON"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_generate_takes_values_in_json_of_any_shape(post, given, told):
    given = {**TEXT, "top_k": 1, **given}
    response = post("generate", given, "ensemble")
    if told is None:
        wanted = post("generate", {**TEXT, "top_k": 1}, "ensemble").json()["text_output"]
        assert response.json()["text_output"] == wanted
    else:
        assert response.status_code == 400 and told in response.json()["error"]


def test_generate_takes_one_response_alone(post):
    for given in ({"stream": True}, {"num_return_sequences": 2}):
        response = post("generate", {**TEXT, **given}, "ensemble")
        assert response.status_code == 400 and "generate_stream" in response.json()["error"]


def events(response):
    """Return the events of a stream of server-sent events."""
    *found, end = response.text.split("\n\n")
    assert end == "" and all(one.startswith("data: {") for one in found)
    return [json.loads(one[6:]) for one in found]


def test_generate_stream_has_an_event_for_each_response(post):
    whole = post("generate", {**TEXT, "exclude_input_in_output": True}, "ensemble").json()
    response = post("generate_stream", {**TEXT, "stream": True, "id": "7"}, "ensemble")
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = events(response)
    assert len(parts) > 2 and {one["id"] for one in parts} == {"7"}
    assert "".join(one["text_output"] for one in parts) == whole["text_output"]
    (one,) = events(post("generate_stream", TEXT, "ensemble"))
    assert one["text_output"] == "Tom had" + whole["text_output"]


def test_a_failure_in_a_stream_is_its_last_event(post, server):
    long = {"max_tokens": 480, "end_id": -1, "stream": True, "timeout": 400_000}
    with server.held():  # the timeout comes while tokens are still to come
        parts = events(post("generate_stream", {**TEXT, **long}, "ensemble"))
    assert "the request timed out" in parts[-1]["error"] and len(parts) > 1
    response = post("generate_stream", {**TEXT, "top_p": 3.0}, "ensemble")
    assert response.status_code == 400 and "top_p" in response.json()["error"]
    server.wait_idle()


def test_a_client_that_goes_away_is_stopped(server):
    asked = {**TEXT, "max_tokens": 480, "end_id": -1, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v2/models/ensemble/generate_stream", json=asked
    ) as response:
        next(response.iter_lines())
    server.wait_idle()


def test_server_and_models_describe_themselves(http, server):
    assert http.is_server_live() and http.is_server_ready()
    assert http.is_model_ready("ensemble") and http.is_model_ready("tensorrt_llm", "1")
    assert not http.is_model_ready("other") and not http.is_model_ready("ensemble", "2")
    assert http.get_server_metadata()["name"] == "gptmanager"
    names = [one["name"] for one in http.get_model_repository_index()]
    assert names == ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"]
    config = http.get_model_config("tensorrt_llm")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["max_batch_size"] == server.settings.concurrency
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    by_name = {one["name"]: one for one in config["input"]}
    assert by_name["input_ids"]["data_type"] == "TYPE_INT32" and "optional" in by_name["stop"]
    assert by_name["input_ids"]["allow_ragged_batch"] is True  # prompts have any length
    assert by_name["random_seed"]["data_type"] == "TYPE_UINT64"
    metadata = http.get_model_metadata("ensemble")
    assert {one["name"]: one["datatype"] for one in metadata["inputs"]}["text_input"] == "BYTES"
    assert {"name": "text_output", "datatype": "BYTES", "shape": [-1, -1]} in metadata["outputs"]


def changed(index, **fields):
    return {"inputs": [{**one, **fields} if i == index else one for i, one in enumerate(JSON)]}


@pytest.mark.parametrize(
    "body, told",
    [
        (b"{", "the body is not JSON"),
        (b"[1]", "the request must be an object, got [1]"),
        ({}, "inputs must be a list, got None"),
        ({"inputs": [1]}, "inputs[0] must be an object, got 1"),
        ({"inputs": JSON, "id": 5}, "id must be a string, got 5"),
        ({"inputs": JSON, "outputs": {}}, "outputs must be a list, got {}"),
        ({"inputs": [*JSON, JSON[0]]}, "'input_ids' is given twice"),
        ({"inputs": JSON[:2]}, "input 'request_output_len' is missing"),
        (changed(0, datatype="INT33"), "data-type is 'INT33', but model"),
        (changed(0, datatype="FP32"), "data-type is 'FP32', but model 'tensorrt_llm' expects"),
        (changed(0, shape=[5]), "Expected [-1, -1], got [5]"),
        (changed(0, shape=[1, -5]), "Expected [-1, -1], got [1, -5]"),
        (changed(0, shape="15"), "shape must be a list of at most 8 integers, got '15'"),
        (
            changed(0, shape=[1, 2**40]),
            f"Prompt length ({2**40}) exceeds maximum input length (511).",
        ),
        (changed(0, shape=[1, 511]), "has 5 elements, expected 511"),
        (changed(0, shape=[0, 2**62], data=[]), f"Prompt length ({2**62}) exceeds"),
        (changed(0, shape=[2**64 - 1], data=[]), "got [18446744073709551615]"),
        (changed(0, data=[[[[[[[[[[9]]]]]]]]]]), "has lists deeper than 8"),
        (changed(0, data=TOKENS[1:]), "has 4 elements, expected 5"),
        (changed(0, data=[1, 2, 3, 4, 2**31]), "[4] = 2147483648 must be of datatype INT32"),
        (changed(0, data=[1, 2, 3, 4, 5.5]), "[4] = 5.5 must be of datatype INT32"),
        (changed(0, data=[1, 2, 3, 4, True]), "[4] = True must be of datatype INT32"),
        (changed(0, data=[1, 2, 3, 4, None]), "[4] = None must be of datatype INT32"),
        (changed(0, data=None), "has 1 elements, expected 5"),
        (changed(0, name="input_idz"), "unexpected inference input 'input_idz'"),
        (changed(0, parameters={"binary_data_size": 20}), "data and binary_data_size"),
        (changed(0, parameters=[]), "parameters must be an object, got []"),
        (changed(1, shape=[2, 1], data=[5, 5]), "'input_lengths' has batch size 2"),
        (changed(1, shape=[0, 1], data=[]), "has batch size 0"),
        (changed(1, data=[6]), "input_lengths = 6 is outside 1..5"),
        (changed(2, data=[-1]), "request_output_len = -1 must be at least 1"),
        ({"inputs": JSON, "parameters": {"priority": -1}}, "parameter priority = -1"),
        ({"inputs": JSON, "parameters": {"timeout": "1"}}, "parameter timeout = '1'"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(post, server, body, told):
    response = post("infer", body)
    assert response.status_code == 400 and told in response.json()["error"]
    server.wait_idle()


@pytest.mark.parametrize("length", ["-1", "x", "1000000", "9" * 30, "\u0665".encode()])
def test_the_length_of_the_json_is_checked(post, length):
    headers = {"Inference-Header-Content-Length": length}
    response = post("infer", {"inputs": JSON}, headers=headers)
    assert response.status_code == 400 and "outside 0.." in response.json()["error"]


def test_the_json_may_be_the_whole_body(post):
    body, name = json.dumps({"inputs": JSON}).encode(), "Inference-Header-Content-Length"
    found = [post("infer", body, headers={name: str(len(body) + more)}) for more in (0, 1)]
    assert [response.status_code for response in found] == [200, 400]


def test_bytes_are_counted(post, expected):
    head = json.dumps(changed(0, parameters={"binary_data_size": 20}, data=0)).encode()
    head = head.replace(b', "data": 0', b"", 1)
    raw = np.array(TOKENS, dtype=np.int32).tobytes()
    for tail, told in (
        (raw, None),
        (raw[1:], "binary_data_size = 20 is outside 0..19"),
        (raw + b"x", "1 bytes of the body belong to no input"),
    ):
        headers = {"Inference-Header-Content-Length": str(len(head))}
        response = post("infer", head + tail, headers=headers)
        if told is None:
            outputs = {one["name"]: one for one in response.json()["outputs"]}
            assert outputs["output_ids"]["data"] == list(expected(TOKENS, 4).output_ids[0])
        else:
            assert response.status_code == 400 and told in response.json()["error"]


def test_packed_bodies_have_limits(post, server):
    body = json.dumps({"inputs": JSON}).encode()
    for packed, encoding, status in (
        (gzip.compress(body), "gzip", 200),
        (zlib.compress(body), "deflate", 200),
        (gzip.compress(body)[:-9], "gzip", 400),
        (body, "gzip", 400),
        (body, "br", 400),
        (gzip.compress(b" " * (server.settings.body_limit(carries_tensors=True) + 1)), "gzip", 413),
    ):
        response = post("infer", packed, headers={"Content-Encoding": encoding})
        assert response.status_code == status, response.text
        assert status == 200 or isinstance(response.json()["error"], str)


def test_errors_are_as_tritons_clients_read_them(http, server):
    with pytest.raises(InferenceServerException, match="unknown model: 'other' is not found"):
        http.infer("other", inputs_of(httpclient, **prompt(*TOKENS)))
    with pytest.raises(InferenceServerException, match="shared memory is not supported"):
        tensor = httpclient.InferInput("input_ids", [1, 1], "INT32")
        tensor.set_shared_memory("region", 4)
        http.infer("tensorrt_llm", [tensor])
    for method, path, status in (
        ("GET", "/v2/models/ensemble/infer", 405),
        ("GET", "/v2/nothing", 404),
        ("POST", "/v2/models/ensemble/versions/2/generate", 404),
    ):
        response = httpx.request(method, server.url + path, json={})
        assert response.status_code == status and isinstance(response.json()["error"], str)
