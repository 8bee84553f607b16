"""Calls over gRPC that cannot be: each is refused by name, and harms nothing else."""

import base64
import functools
import threading
from dataclasses import replace

import grpc as grpc_package
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from fuzz import FUZZ
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import running_server, settings_of
from triton_calls import SPECS, inputs_of, message_of, prompt, streaming
from tritonclient.utils import InferenceServerException

from gptmanager.errors import ConfigError
from gptmanager.server.triton.grpc_service import GrpcFront
from gptmanager.server.triton.token_model import INPUTS

pb, service = grpcclient.service_pb2, grpcclient.service_pb2_grpc
TOKENS = [9, 30, 71, 5, 12]
CODES = grpc_package.StatusCode
_CUDA = {"name": "r", "raw_handle": base64.b64encode(b"r"), "device_id": 0, "byte_size": 4}


@pytest.fixture(scope="module")
def stub(front):
    with grpc_package.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        yield service.GRPCInferenceServiceStub(channel)


def refused(stub, call):
    with pytest.raises(grpc_package.RpcError) as error:
        stub.ModelInfer(call, timeout=20)
    return error.value.code(), error.value.details()


@pytest.mark.parametrize(
    "values, code, told",
    [
        ({"stop_words_list": [[1]]}, CODES.INVALID_ARGUMENT, "Expected [-1, 2, -1], got [1, 1, 1]"),
        ({"input_lengths": 0}, CODES.INVALID_ARGUMENT, "input_lengths = 0 is outside 1..5"),
        (
            {"request_output_len": 0},
            CODES.INVALID_ARGUMENT,
            "request_output_len = 0 must be at least 1",
        ),
        ({"input_ids": [1, 2, 3, 4, 640]}, CODES.INVALID_ARGUMENT, "input_ids[4] = 640"),
        ({"temperature": -1.0}, CODES.INVALID_ARGUMENT, "temperature = -1"),
        ({"beam_width": 99}, CODES.INVALID_ARGUMENT, "beam_width = 99"),
        (
            {"beam_width": 2, "streaming": True},
            CODES.INVALID_ARGUMENT,
            "beams cannot be streamed",
        ),
        (
            {"num_return_sequences": 0},
            CODES.INVALID_ARGUMENT,
            "num_return_sequences = 0 is outside 1..128",
        ),
        (
            {"runtime_top_p_decay": 0.5},
            CODES.INVALID_ARGUMENT,
            "runtime_top_p_decay is not supported except with the value 1",
        ),
        (
            {"beam_search_diversity_rate": 1.0},
            CODES.INVALID_ARGUMENT,
            "diversity_rate is not supported",
        ),
        ({"decoder_input_ids": [1]}, CODES.INVALID_ARGUMENT, "decoder_input_ids is not supported"),
        (
            {"context_phase_params": [1, 2]},
            CODES.INVALID_ARGUMENT,
            "context_phase_params is not supported",
        ),
        (
            {"draft_acceptance_threshold": 0.5},
            CODES.INVALID_ARGUMENT,
            "draft_acceptance_threshold is not",
        ),
        ({"streaming": True}, CODES.INVALID_ARGUMENT, "use ModelStreamInfer"),
        ({"num_return_sequences": 2}, CODES.INVALID_ARGUMENT, "use ModelStreamInfer"),
        ({"lora_task_id": 404}, CODES.INVALID_ARGUMENT, "404"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refusals_name_field_value_and_limit(stub, server, values, code, told):
    found, details = refused(stub, message_of(**prompt(*TOKENS, **values)))
    assert found is code and told in details
    server.wait_idle()


def test_messages_that_contradict_themselves(stub):
    good = message_of(**prompt(*TOKENS))

    def bad_request(**changes):
        call = pb.ModelInferRequest()
        call.CopyFrom(good)
        for name, value in changes.items():
            if name == "raw":
                call.raw_input_contents[0] = value
            elif name == "shape":
                call.inputs[0].shape[:] = value
            elif name == "fewer":
                del call.raw_input_contents[value:]
            elif name == "region":
                call.inputs[0].parameters["shared_memory_region"].string_param = value
            elif name == "classes":
                call.outputs.add(name="output_ids").parameters["classification"].int64_param = value
            elif name == "model":
                call.model_name = value
            elif name == "twice":
                call.inputs[1].CopyFrom(call.inputs[0])
            else:
                setattr(call.inputs[0], name, value)
        return refused(stub, call)

    assert (
        bad_request(shape=[1, 2**62])[0]
        is bad_request(shape=[0, 2**62])[0]
        is CODES.INVALID_ARGUMENT
    )
    assert bad_request(raw=b"123") == (
        CODES.INVALID_ARGUMENT,
        "unexpected total byte size 3 for input 'input_ids', expecting 20",
    )
    assert "raw_input_contents, one for each input, got 2" in bad_request(fewer=2)[1]
    assert (
        "has 0 elements in" in bad_request(fewer=0)[1]
        or "elements, expected" in bad_request(fewer=0)[1]
    )
    assert "data-type is 'INT9', but model" in bad_request(datatype="INT9")[1]
    assert "unexpected inference input 'a'" in bad_request(name="a")[1]
    assert "'input_ids' is given twice" in bad_request(twice=True)[1]
    assert bad_request(region="r")[0] is bad_request(classes=2)[0] is CODES.UNIMPLEMENTED
    assert bad_request(model="none")[0] is CODES.NOT_FOUND
    assert bad_request(model="")[0] is CODES.NOT_FOUND


@pytest.mark.parametrize(
    "shape, raw, told",
    [
        ([1, 2**62], b"", f"Expected [-1, 1], got [1, {2**62}]"),
        ([1, 1], b"", "expected 1 string elements for input 'text_input', got 0"),
        ([0, 2**62], b"", f"Expected [-1, 1], got [0, {2**62}]"),
        ([2**31, 1], b"", "batch-size must be from 1 to 32 for model 'ensemble', got 2147483648"),
        ([0, 1], b"\1\0\0\0a", "expected 0 string elements for input 'text_input', got more"),
        ([1, 1], b"\0\0\0\0" * 9, "expected 1 string elements for input 'text_input', got more"),
        ([1, 1], b"\2\0\0\0a", "incomplete string data"),
        ([1, 1], b"\xff\xff\xff\xffa", "incomplete string data"),
        ([1, 1], b"\1\0", "incomplete string data"),
    ],
    ids=str,
)
def test_texts_with_wrong_sizes(stub, shape, raw, told):
    """No memory is taken for what a shape says alone."""
    call = message_of("ensemble", text_input=[b"Tom"], max_tokens=4)
    call.inputs[0].shape[:], call.raw_input_contents[0] = shape, raw
    code, details = refused(stub, call)
    assert code is CODES.INVALID_ARGUMENT and told in details


def test_a_refusal_in_a_stream_leaves_the_stream(stream):
    bad = stream.send(**prompt(*TOKENS, request_output_len=0))
    assert bad and "request_output_len = 0" in str(stream.next().error)
    good = stream.send(**prompt(*TOKENS, new=3))
    response = stream.next()
    assert response.id == good and len(response.tokens) == 8


@pytest.mark.parametrize(
    "method, given",
    [
        ("get_system_shared_memory_status", {}),
        ("get_system_shared_memory_status", {"region_name": "r"}),
        ("register_system_shared_memory", {"name": "r", "key": "/r", "byte_size": 4}),
        ("unregister_system_shared_memory", {}),
        ("get_cuda_shared_memory_status", {}),
        ("register_cuda_shared_memory", _CUDA),
        ("unregister_cuda_shared_memory", {"name": "r"}),
        ("load_model", {"model_name": "ensemble"}),
        ("unload_model", {"model_name": "ensemble"}),
        ("get_trace_settings", {"model_name": "ensemble"}),
        ("update_trace_settings", {"settings": {"trace_level": ["TIMESTAMPS"]}}),
        ("get_log_settings", {}),
        ("update_log_settings", {"settings": {"log_verbose_level": 1}}),
    ],
    ids=str,
)
def test_what_is_not_here_says_so(grpc, http, method, given):
    for client, status in ((grpc, "StatusCode.UNIMPLEMENTED"), (http, "501")):
        with pytest.raises(InferenceServerException, match="this server does not support") as error:
            getattr(client, method)(**given)
        assert error.value.status() == status


@pytest.mark.parametrize("version", ["2", "01", "0", "latest", "-1"])
def test_there_is_version_1_alone(grpc, http, stream, version):
    called = {"model_name": "ensemble", "model_version": version}
    told = f"'ensemble' version '{version}' is not found; this server has tensorrt_llm.*, version 1"
    for client, module in ((grpc, grpcclient), (http, httpclient)):
        inputs = inputs_of(module, text_input=[b"Tom"], max_tokens=1)
        assert not client.is_model_ready(**called)
        for call in (
            client.get_model_metadata,
            client.get_model_config,
            client.get_inference_statistics,
            functools.partial(client.infer, inputs=inputs),
        ):
            with pytest.raises(InferenceServerException, match=told) as error:
                call(**called)
            assert error.value.status() in ("404", "StatusCode.NOT_FOUND")
        assert client.infer("ensemble", inputs, model_version="1").get_response()
    stream.send("ensemble", parameters={"model_version": version}, text_input=[b"Tom"])
    assert f"version '{version}' is not found" in str(stream.next().error)


numbers = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.sampled_from([0, 1, -1]), st.floats(width=32)
)


@settings(max_examples=60 * FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tensors_are_answered_or_refused(stub, server, expected, data):
    """With values, shapes and datatypes that clients do not send, alone and beside each other."""
    call = message_of(**prompt(*TOKENS, new=2))
    for name in data.draw(st.lists(st.sampled_from(sorted(INPUTS)), max_size=3, unique=True)):
        spec = SPECS[name]
        dims = [1, *(data.draw(st.integers(0, 3)) if size < 0 else size for size in spec.dims)]
        values = data.draw(
            st.lists(numbers, min_size=int(np.prod(dims)), max_size=int(np.prod(dims)))
        )
        dtypes = {"INT32": "<i4", "FP32": "<f4", "FP16": "<f2", "UINT64": "<u8"}
        with np.errstate(all="ignore"):
            array = np.nan_to_num(np.array(values, dtype=np.float64), posinf=9, neginf=-9)
            raw = array.astype(dtypes.get(spec.datatype, "u1")).tobytes()
        if data.draw(st.booleans()) and spec.datatype == "FP32":
            raw = np.array(values, dtype="<f4").tobytes()  # NaN and infinity, too
        old = [index for index, tensor in enumerate(call.inputs) if tensor.name == name]
        for index in old:
            del call.inputs[index], call.raw_input_contents[index]
        call.inputs.add(name=name, datatype=spec.datatype, shape=dims)
        call.raw_input_contents.append(raw)
    try:
        answer = stub.ModelInfer(call, timeout=20)
        assert answer.id == "x"
    except grpc_package.RpcError as error:
        assert error.code() is CODES.INVALID_ARGUMENT, error
        assert error.details() and "Traceback" not in error.details()
        assert "the server failed" not in error.details()


def test_nothing_is_left_of_them(server, stub, expected):
    server.wait_idle()
    answer = stub.ModelInfer(message_of(**prompt(*TOKENS, new=2)), timeout=20)
    raw = answer.raw_output_contents[0]
    assert np.frombuffer(raw, dtype="<i4").tolist() == list(expected(TOKENS, 2).output_ids[0])


KEY = "secret"


def test_probes_of_kubernetes_need_no_key(tmp_path):
    """Messages are those of grpc/health/v1/health.proto: a service's name, a status."""
    file = tmp_path / "keys"
    file.write_text(KEY)
    with running_server(settings_of(api_key_file=file, grpc_port=0)) as server:
        front = server.run(GrpcFront.start(server.engine, server.settings))
        with grpc_package.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            serving, not_serving = b"\x08\x01", b"\x08\x02"
            named = b"\n\x1einference.GRPCInferenceService"
            assert check(b"", timeout=20) == check(named, timeout=20) == serving
            for other in (b"\n\x05other", named[:-1], b"\xff" * 100):
                with pytest.raises(grpc_package.RpcError, match="GRPCInferenceService") as refusal:
                    check(other, timeout=20)
                assert refusal.value.code() == CODES.NOT_FOUND
            server.run(server.engine.drain(1.0))
            assert check(b"", timeout=20) == not_serving
        server.run(front.stop(0))


def test_the_key_comes_as_metadata(tmp_path, monkeypatch):
    file, counted = tmp_path / "keys", []
    file.write_text(f"me {KEY} 8")
    with running_server(settings_of(api_key_file=file, grpc_port=0)) as server:
        keys = server.engine.keys
        monkeypatch.setattr(keys, "release", lambda name, number: counted.append((name, number)))
        front = server.run(GrpcFront.start(server.engine, server.settings))
        headers = {"authorization": f"Bearer {KEY}"}
        inputs = inputs_of(grpcclient, **prompt(*TOKENS, new=2))
        with grpcclient.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
            assert client.is_server_live() and client.is_server_ready()
            assert client.is_model_ready("ensemble", headers=headers)
            assert client.infer("tensorrt_llm", inputs, headers=headers)
            for wrong in ({}, {"authorization": "Bearer other"}, {"authorization": KEY}):
                for call in (
                    lambda: client.infer("tensorrt_llm", inputs, headers=wrong),  # noqa: B023
                    lambda: client.get_model_config("ensemble", headers=wrong),  # noqa: B023
                    lambda: client.is_model_ready("ensemble", headers=wrong),  # noqa: B023
                ):
                    with pytest.raises(InferenceServerException, match="key is missing") as error:
                        call()
                    assert "UNAUTHENTICATED" in error.value.status()
            with streaming(client) as stream:
                assert "key is missing" in str(stream.next().error)
        assert counted == [("me", 1)]  # in the key's quota
        assert server.engine.metrics.request_log.refusals["401", "invalid_api_key"] >= 9
        with grpc_package.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            for method in ("ModelInfer", "ModelConfig", "ModelStreamInfer"):
                unsent = threading.Event()  # a message that does not arrive
                path = f"/inference.GRPCInferenceService/{method}"
                call = channel.stream_stream(path)(iter(unsent.wait, None), timeout=20)
                with pytest.raises(grpc_package.RpcError) as refusal:
                    next(call)
                assert refusal.value.code() == CODES.UNAUTHENTICATED
                unsent.set()
        for path, status in (
            ("/v2", 401),
            ("/v2/models/ensemble", 401),
            ("/v2/health/live", 200),
            ("/v2/health/ready", 200),
        ):
            response = httpx.get(server.url + path)
            assert response.status_code == status
            assert status == 200 or isinstance(response.json()["error"], str)
        server.run(front.stop(0))


def test_a_port_in_use(front, server):
    taken = replace(server.settings, grpc_port=front.port)
    with pytest.raises(ConfigError, match=f"--grpc-port {front.port} cannot be used"):
        server.run(GrpcFront.start(server.engine, taken))


def test_large_messages_are_refused(stub, server):
    limit = server.settings.body_limit(carries_tensors=True)
    call = message_of(**prompt(*TOKENS))
    call.raw_input_contents[0] = b"0" * limit
    code, _ = refused(stub, call)
    assert code is CODES.RESOURCE_EXHAUSTED
