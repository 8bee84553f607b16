"""Every input and every field of Triton's front, over HTTP and gRPC, with hostile values: each is
answered, or refused by name, and the server grows by no more than a few times what was sent.
"""

import functools
import json

import grpc as grpc_package
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from fuzz import FUZZ
from hostile_values import HOSTILE, MANY, names_for, places, with_value
from served_process import served_process
from triton_calls import message_of

from gptmanager.server.triton.datatypes import NUMPY
from gptmanager.server.triton.text_model import BLS_INPUTS
from gptmanager.server.triton.text_model import INPUTS as TEXT_INPUTS
from gptmanager.server.triton.token_model import INPUTS

pb = grpcclient.service_pb2
CODES = grpc_package.StatusCode
MODELS = {"tensorrt_llm": INPUTS, "tensorrt_llm_bls": BLS_INPUTS}  # which has all of `ensemble`
GOOD = {
    "tensorrt_llm": {"input_ids": [9, 30, 71], "input_lengths": 3, "request_output_len": 2},
    "tensorrt_llm_bls": {"text_input": "Tom had", "max_tokens": 2},
}
TENSORS = [
    (index, model, name)
    for index, (model, name) in enumerate(
        (model, name) for model, inputs in MODELS.items() for name in inputs
    )
]
# what the text models call otherwise than the engine, whose errors name its own tensors
ENGINES = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty"}
LARGEST = max(HOSTILE.values(), key=len)
NUMBERS = (2**31 - 1, 2**63 - 1, -1)


@pytest.fixture(scope="module")
def process():
    options = ["--grpc-port", "0", "--max-beam-width", "2", "--max-batch-size", "8"]
    with served_process(*options, "--max-seq-len", "64", "--kv-cache-tokens", "1024") as process:
        yield process


@pytest.fixture(scope="module")
def post(process):
    with httpx.Client(base_url=f"{process.url}/v2", timeout=60) as client:
        yield lambda path, body: client.post(path, content=body)


@pytest.fixture(scope="module")
def channel(process):
    options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 22)]
    with grpc_package.insecure_channel(process.grpc, options) as channel:
        yield channel


@pytest.fixture(scope="module")
def call(channel):
    """One unary call with these bytes: status, and what is told."""

    def call(method, message):
        path = f"/inference.GRPCInferenceService/{method}"
        try:
            channel.unary_unary(path)(message, timeout=60)
        except grpc_package.RpcError as error:
            return error.code(), error.details()
        return CODES.OK, ""

    return call


def check_named(told, *names):
    """An error says which field is wrong, or that it is the whole text or prompt."""
    general = ("Prompt length (", "is not JSON", "Undefined tensor", "batch-size", "a stream has")
    assert len(told) < 1200
    assert any(name in told for name in (*general, *names)), told


def check_response(response, *names):
    assert response.status_code in (200, 400, 501), response.text[:500]
    if response.status_code != 200:
        check_named(response.json()["error"], *names)


@pytest.mark.parametrize("index, model, name", TENSORS)
@pytest.mark.every(12)
def test_every_tensor_as_json(process, post, index, model, name):
    good, spec = GOOD[model], MODELS[model][name]
    shape = [1, *(1 if size < 0 else size for size in spec.dims)]
    tensor = {"name": name, "datatype": spec.datatype, "shape": shape, "data": []}
    with process.bounded(LARGEST):
        for value in names_for(index):
            body = with_value(good, (name,), HOSTILE[value])
            check_response(post(f"/models/{model}/generate", body), name, ENGINES.get(name, name))
        for axis in range(len(shape)):
            for number in NUMBERS:
                body = with_value(
                    {"inputs": [tensor]}, ("inputs", 0, "shape", axis), b"%d" % number
                )
                check_response(post(f"/models/{model}/infer", body), name)


def hostile_tensors(spec, index):
    """Datatype, shape, and the bytes of an array that claims, or has, too much; of those that have
    it one for the tensor with this number.
    """
    fixed = [1, *(1 if size < 0 else size for size in spec.dims)]
    dtype = NUMPY[spec.datatype]
    is_costly = [FUZZ > 1 or index % 2 == kind for kind in range(2)]
    if spec.datatype == "BYTES":
        if is_costly[0]:
            yield "BYTES", fixed, bytes([64, 66, 15, 0]) + b"a" * MANY  # a million letters
        one = b"\0\0\0\0"
    else:
        one = np.ones(1, dtype).tobytes()
        for number in NUMBERS:
            with np.errstate(all="ignore"):
                value = np.array([number]).astype(dtype)
            yield spec.datatype, fixed, value.tobytes() * int(np.prod(fixed))
        yield "INT64", fixed, np.full(fixed, 2**63 - 1).tobytes()
    for axis in range(len(fixed)):
        for number in NUMBERS:
            claimed = [number if index == axis else size for index, size in enumerate(fixed)]
            yield spec.datatype, claimed, one
    many = [*fixed[:-1], MANY]
    if is_costly[1]:
        yield spec.datatype, many, one * int(np.prod(many))
    yield spec.datatype, [1] * 10_000, one


@pytest.mark.parametrize("index, model, name", TENSORS)
@pytest.mark.every(6)
def test_every_tensor_over_grpc(process, call, index, model, name):
    values = {
        key: [value.encode()] if isinstance(value, str) else value
        for key, value in GOOD[model].items()
    }
    good = message_of(model, **values)
    for index, tensor in enumerate(good.inputs):
        if tensor.name == name:
            del good.inputs[index], good.raw_input_contents[index]
            break
    with process.bounded(LARGEST):
        for datatype, shape, raw in hostile_tensors(MODELS[model][name], index):
            message = pb.ModelInferRequest()
            message.CopyFrom(good)
            message.inputs.add(name=name, datatype=datatype, shape=shape)
            message.raw_input_contents.append(raw)
            code, told = call("ModelInfer", message.SerializeToString())
            assert code in (CODES.OK, CODES.INVALID_ARGUMENT), (code, told)
            if code is not CODES.OK:
                check_named(told, name, ENGINES.get(name, name), "a field of the message has")


def test_the_ensemble_has_no_tensor_of_its_own():
    assert TEXT_INPUTS.items() <= BLS_INPUTS.items()


@pytest.mark.parametrize("model", MODELS)
def test_what_is_more_than_the_room_is_lowered(post, model):
    long = {"request_output_len": 2**31 - 1, "max_tokens": 2**31 - 1, "end_id": -1}
    body = {**GOOD[model], **{key: long[key] for key in long if key in MODELS[model]}}
    told = post(f"/models/{model}/generate", json.dumps(body)).json()
    if model == "tensorrt_llm":
        assert told["sequence_length"] == 64 and len(told["output_ids"]) == 64
    else:
        assert told["text_output"].startswith("Tom had")


WHOLE = {
    "id": "x",
    "parameters": {"priority": 1, "timeout": 10**8, "binary_data_output": False, "other": 1},
    "inputs": [
        {
            "name": name,
            "shape": [1, 3] if name == "input_ids" else [1, 1],
            "datatype": "INT32",
            "data": [9, 30, 71] if name == "input_ids" else [value],
            "parameters": {"other": 1},
        }
        for name, value in GOOD["tensorrt_llm"].items()
    ],
    "outputs": [
        {"name": name, "parameters": {"binary_data": False, "classification": 0}}
        for name in ("output_ids", "sequence_length")
    ],
}


def test_every_field_of_an_http_call(process, post):
    fields = ("id", "parameters", "inputs", "outputs", "name", "shape", "datatype", "data")
    fields += ("priority", "timeout", "element", "unexpected inference", "classification")
    # one input and one output stand for all of them
    found = [it for it in places(WHOLE) if len(it) == 1 or not isinstance(it[1], int) or not it[1]]
    with process.bounded(LARGEST):
        for index, place in enumerate(found):
            for value in names_for(index):
                body = with_value(WHOLE, place, HOSTILE[value])
                check_response(post("/models/tensorrt_llm/infer", body), *fields)
        for index, name in enumerate(("id", "parameters", "priority", "timeout", "unknown")):
            for value in names_for(index):
                body = with_value(GOOD["tensorrt_llm"], (name,), HOSTILE[value])
                check_response(post("/models/tensorrt_llm/generate", body), *fields)


def test_every_http_route(process, post):
    name = "x" * 30_000
    with process.bounded(LARGEST), httpx.Client(base_url=process.url, timeout=60) as client:
        routes = client.get("/openapi.json").json()["paths"]
        for path, methods in routes.items():
            if not path.startswith("/v2"):
                continue
            for raw in (HOSTILE["a million letters"], HOSTILE["lists in lists"], b""):
                url = path.replace("{name}", name).replace("{version}", name)
                response = client.request(next(iter(methods)).upper(), url, content=raw)
                assert response.status_code in (200, 400, 404), (path, response.text[:300])
                assert len(response.content) < 20_000


# Over gRPC: what the service's own description says there is ----------------------------------


def length_of(size):
    found = b""
    while size > 127:
        found, size = found + bytes([size & 127 | 128]), size >> 7
    return found + bytes([size])


def field(number, content):
    """A field with a length: tag, length, content."""
    return length_of(number << 3 | 2) + length_of(len(content)) + content


def hostile_fields(kind, number):
    """The bytes of one field of a message, for its kind of field."""
    if kind.type in (kind.TYPE_STRING, kind.TYPE_BYTES):
        return [field(number, b"a" * MANY), field(number, b"") * MANY, field(number, b"\xff")]
    if kind.type == kind.TYPE_MESSAGE:
        deep = b""
        for _ in range(200):
            deep = field(number, deep)
        return [field(number, b"") * MANY, field(number, b"a" * MANY), deep]
    numbers = (length_of(value % 2**64) for value in NUMBERS)
    return [*(length_of(number << 3) + one for one in numbers), field(number, b"\1" * MANY)]


def fields_of(message, depth=3):
    """(numbers that lead to a field, the field), of a message and of those in it."""
    for one in message.fields:
        yield (one.number,), one
        if one.message_type is not None and depth:
            for numbers, inner in fields_of(one.message_type, depth - 1):
                yield (one.number, *numbers), inner


METHODS = [it.name for it in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ModelStreamInfer"])
def test_every_field_of_every_message(process, call, method):
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    good = message_of(**{"input_ids": [9, 30, 71], "input_lengths": 3, "request_output_len": 2})
    start = good.SerializeToString() if method == "ModelInfer" else b""
    with process.bounded(LARGEST):
        for numbers, kind in fields_of(service.methods_by_name[method].input_type):
            *outer, number = numbers
            for raw in hostile_fields(kind, number):
                message = functools.reduce(lambda inner, one: field(one, inner), outer[::-1], raw)
                code, told = call(method, start + message)
                allowed = [CODES.OK, CODES.INVALID_ARGUMENT, CODES.NOT_FOUND, CODES.UNIMPLEMENTED]
                assert code in allowed, (numbers, code, told)
                assert code is CODES.OK or 0 < len(told) < 1200


def test_metadata_and_messages_have_limits(process, channel, call):
    with process.bounded(LARGEST):
        with pytest.raises(grpc_package.RpcError) as error:
            path = "/inference.GRPCInferenceService/ServerLive"
            channel.unary_unary(path)(b"", metadata=[("a", "x" * MANY)], timeout=60)
        assert error.value.code() is CODES.RESOURCE_EXHAUSTED
        code, told = call("ModelInfer", field(7, b"a" * (80 << 20)))
        assert code is CODES.RESOURCE_EXHAUSTED
