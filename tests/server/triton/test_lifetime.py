"""The gRPC front from the server's start to its end."""

import contextlib
import os
import re
import signal
import socket
import sys

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from outside_server import Outside
from running_server import MODEL, settings_of, wait_for
from triton_calls import inputs_of, prompt
from tritonclient.utils import InferenceServerException

from gptmanager import cli
from gptmanager.environment.distribution import install_command
from gptmanager.errors import ConfigError
from gptmanager.server.settings import ServerSettings

pb, service = grpcclient.service_pb2, grpcclient.service_pb2_grpc
NEW = 400


def long_call():
    """Its responses are more than the sockets hold, so that it lasts until it is read."""
    call = pb.ModelInferRequest(model_name="tensorrt_llm", id="x")
    asked = {"streaming": True, "return_generation_logits": True}
    for tensor in inputs_of(grpcclient, **prompt(9, 30, 71, new=NEW, **asked)):
        call.inputs.append(tensor._get_tensor())
        call.raw_input_contents.append(tensor._get_content())
    return call


class OutsideOfGrpc(Outside):
    """`act` gets a stub of the service, too."""

    def __init__(self, act):
        super().__init__(self.connect)
        self.use = act

    def tell(self, line):
        self.address = re.search(r"gRPC +(\S+),", line).group(1)
        super().tell(line)

    def connect(self, outside):
        with grpc.insecure_channel(self.address) as channel:
            self.use(self, service.GRPCInferenceServiceStub(channel))


def test_a_signal_lets_calls_end_and_takes_no_new_ones(monkeypatch):
    seen = []

    def act(outside, stub):
        responses = stub.ModelStreamInfer(iter([long_call()]), timeout=30)
        seen.append(next(responses))
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: outside.engine.is_draining)
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
        assert not stub.ModelReady(pb.ModelReadyRequest(name="ensemble")).ready
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        with httpclient.InferenceServerClient(outside.url.removeprefix("http://")) as http:
            assert http.is_server_live() and not http.is_server_ready()
            assert not http.is_model_ready("ensemble") and not http.is_model_ready("other")
            with pytest.raises(InferenceServerException, match="is shutting down") as refused:
                http.infer("tensorrt_llm", inputs_of(httpclient, **prompt(9, 30, 71)))
            assert refused.value.status() == "503"
        with pytest.raises(grpc.RpcError, match="is shutting down") as error:
            stub.ModelInfer(long_call_at_once(), timeout=30)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        seen.extend(responses)

    def long_call_at_once():
        call = long_call()
        index = [tensor.name for tensor in call.inputs].index("streaming")
        call.raw_input_contents[index] = np.array([False]).tobytes()
        return call

    OutsideOfGrpc(act).serve(monkeypatch, grpc_port=0)
    assert len(seen) == NEW and not any(response.error_message for response in seen)
    assert seen[-1].infer_response.parameters["triton_final_response"].bool_param


def test_what_runs_too_long_does_not_hold_up_the_end(monkeypatch):
    seen = []

    def act(outside, stub):
        responses = stub.ModelStreamInfer(iter([long_call()]), timeout=30)
        seen.append(next(responses))
        seen.append(next(responses))
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(grpc.RpcError):  # a slow reader is cut off
            seen.extend(responses)

    OutsideOfGrpc(act).serve(monkeypatch, grpc_port=0, shutdown_timeout=0.0)
    assert len(seen) >= 2


def told(capsys, *arguments):
    code = cli.main(["serve", "--model", str(MODEL), "--threads", "1", "--port", "0", *arguments])
    return code, capsys.readouterr().err


def test_an_occupied_port_is_one_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, error = told(capsys, "--grpc-port", port)
    assert code == 2 and error == (
        f"gptmanager: --host 127.0.0.1 --grpc-port {port} cannot be used: Address already in use\n"
    )


@pytest.mark.parametrize("package", ["grpc", "tritonclient.grpc"])
def test_a_missing_extra_is_one_sentence(capsys, monkeypatch, package):
    for name in [it for it in sys.modules if it.startswith("gptmanager.server.triton.grpc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, error = told(capsys, "--grpc-port", "0")
    assert code == 2 and error.count("\n") == 1
    assert install_command("triton") in error and package in error


def test_two_ports_are_two():
    with pytest.raises(ConfigError, match="port and grpc_port are both 8001"):
        ServerSettings(model=MODEL, port=8001, grpc_port=8001)
    assert settings_of(grpc_port=0).port == 0
