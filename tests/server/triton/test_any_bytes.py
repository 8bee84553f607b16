"""Any bytes, over HTTP and over gRPC, are answered or refused: never a failure of the server."""

import json
import logging

import grpc as grpc_package
import httpx
import pytest
import tritonclient.grpc as grpcclient
from fuzz import FUZZ
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_calls import message_of, prompt

from gptmanager.server.triton.datatypes import NUMPY
from gptmanager.server.triton.text_model import BLS_INPUTS
from gptmanager.server.triton.token_model import INPUTS, OUTPUTS

pb = grpcclient.service_pb2
CODES = grpc_package.StatusCode
METHOD = "/inference.GRPCInferenceService/ModelInfer"
REFUSED = (CODES.INVALID_ARGUMENT, CODES.NOT_FOUND, CODES.UNIMPLEMENTED)
MODELS = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")
NAMES = sorted({*INPUTS, *BLS_INPUTS})
HEADER = "inference-header-content-length"
any_settings = settings(
    max_examples=15 * FUZZ, deadline=None, suppress_health_check=list(HealthCheck)
)

texts = st.one_of(st.sampled_from([*NAMES, *NUMPY, ""]), st.text(max_size=5))
scalars = st.one_of(
    *(st.none(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False), texts),
    *(st.integers(-3, 9), st.sampled_from([2**31, 2**62, 2**64 - 1, -(2**63)])),
)
trees = st.recursive(
    scalars, lambda one: st.lists(one, max_size=3) | st.dictionaries(texts, one, max_size=3)
)
sizes = st.one_of(st.integers(0, 3), st.sampled_from([-1, 2**31, 2**40, 2**62, 2**63 - 1]))
tensors = st.fixed_dictionaries(
    {"name": texts},
    optional={
        "datatype": st.sampled_from(sorted(NUMPY)) | trees,
        "shape": st.lists(sizes, max_size=4) | trees,
        "data": trees,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "a"]), scalars) | trees,
    },
)
calls = st.fixed_dictionaries(
    {"inputs": st.lists(tensors | trees, max_size=3)},
    optional={
        **{"id": trees, "parameters": trees},
        "outputs": st.lists(st.fixed_dictionaries({"name": st.sampled_from(sorted(OUTPUTS))}))
        | trees,
    },
)


@pytest.fixture
def nothing_fails(caplog, server):
    """No traceback in the log."""
    with caplog.at_level(logging.ERROR):
        yield
        server.wait_idle()
    assert not caplog.records


@any_settings
@given(body=calls | trees, tail=st.binary(max_size=9), cut=st.integers(-3, 30), data=st.data())
def test_bodies_of_infer(client, nothing_fails, body, tail, cut, data):
    model = data.draw(st.sampled_from(MODELS))
    head = json.dumps(body).encode()
    content = (head + tail)[: len(head) + len(tail) - max(cut - 20, 0)]
    headers = {} if cut < 0 else {HEADER: str(len(head) + (cut % 3 == 0))}
    response = client.post(f"/v2/models/{model}/infer", content=content, headers=headers)
    check(response)


@any_settings
@given(
    known=st.dictionaries(st.sampled_from(NAMES), trees, max_size=4),
    other=st.dictionaries(st.sampled_from(["id", "parameters", "priority", "timeout", "a"]), trees),
    good=st.booleans(),
    data=st.data(),
)
def test_bodies_of_generate(client, nothing_fails, known, other, good, data):
    model = data.draw(st.sampled_from(MODELS))
    path = data.draw(st.sampled_from(["generate", "generate_stream"]))
    text = {"text_input": "Tom", "max_tokens": 2}
    tokens = {"input_ids": [9, 30], "input_lengths": 2, "request_output_len": 2}
    always = (tokens if model == "tensorrt_llm" else text) if good else {}
    body = {**always, **known, **other}
    check(client.post(f"/v2/models/{model}/{path}", content=json.dumps(body).encode()))


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 501, 504), response.text
    if response.status_code != 200:
        assert isinstance(response.json()["error"], str)


@pytest.fixture(scope="module")
def raw(front):
    """One unary call of these bytes."""
    with grpc_package.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        call = channel.unary_unary(METHOD, response_deserializer=pb.ModelInferResponse.FromString)

        def raw(message):
            try:
                call(message, timeout=20)
            except grpc_package.RpcError as error:
                return error.code(), error.details()
            return None

        yield raw


wire_tensors = st.builds(
    lambda name, datatype, shape, fields: pb.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=pb.InferTensorContents(**fields)
    ),
    texts,
    st.sampled_from(sorted(NUMPY)) | texts,
    st.lists(sizes, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "int_contents": st.lists(st.integers(-3, 9), max_size=3),
            "bool_contents": st.lists(st.booleans(), max_size=2),
            "bytes_contents": st.lists(st.binary(max_size=3), max_size=2),
            "fp32_contents": st.lists(st.floats(width=32), max_size=2),
            "uint64_contents": st.lists(st.integers(0, 2**64 - 1), max_size=2),
        },
    ),
)


@any_settings
@given(
    tensors=st.lists(wire_tensors, max_size=3),
    contents=st.lists(st.binary(max_size=12), max_size=3),
    starts_good=st.booleans(),
    data=st.data(),
)
def test_messages(raw, nothing_fails, tensors, contents, starts_good, data):
    call = pb.ModelInferRequest(model_name=data.draw(st.sampled_from(MODELS)))
    if starts_good:
        call = message_of(**prompt(9, 30, 71, new=2))
        for tensor, content in zip(tensors, contents, strict=False):
            index = data.draw(st.integers(0, len(call.inputs) - 1))
            tensor.name = data.draw(st.sampled_from([call.inputs[index].name, tensor.name]))
            call.inputs[index].CopyFrom(tensor)
            call.raw_input_contents[index] = content
    else:
        call.inputs.extend(tensors)
        call.raw_input_contents.extend(contents)
    for name in data.draw(st.lists(texts, max_size=2)):
        call.outputs.add(name=name)
    for name in data.draw(st.lists(st.sampled_from(["priority", "timeout", "a"]), max_size=2)):
        kind = data.draw(st.sampled_from(["int64_param", "string_param", "double_param"]))
        value = {"int64_param": -1, "string_param": "1", "double_param": float("nan")}[kind]
        setattr(call.parameters[name], kind, value)
    refused = raw(call.SerializeToString())
    if refused is not None:
        code, details = refused
        assert code in REFUSED and details and "the server failed" not in details, refused


@any_settings
@given(message=st.binary(max_size=40))
def test_bytes_that_are_not_a_message(raw, nothing_fails, message):
    code, details = raw(message)
    assert code in REFUSED, details
