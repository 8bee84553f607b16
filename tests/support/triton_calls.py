"""Calls of Triton's protocol, made with the real tritonclient as clients of the backend do."""

from __future__ import annotations

import contextlib
import queue
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from gptmanager.server.triton.datatypes import NUMPY
from gptmanager.server.triton.text_model import BLS_INPUTS
from gptmanager.server.triton.token_model import INPUTS

SPECS = {**BLS_INPUTS, **INPUTS}
TIMEOUT_S = 30
Tensors = Mapping[str, np.ndarray]


def as_arrays(**values: Any) -> dict[str, tuple[str, np.ndarray]]:
    """Datatype and array of each input; a value has no batch dimension, or is one of arrays."""
    found = {}
    for name, value in values.items():
        datatype = SPECS[name].datatype
        array = np.asarray(value, dtype=NUMPY[datatype])
        if array.ndim <= len(SPECS[name].dims):
            array = array.reshape(1, *array.shape) if array.ndim else array.reshape(1, 1)
        found[name] = datatype, array
    return found


def inputs_of(client: Any, **values: Any) -> list[Any]:
    """`client`: the module of HTTP's or of gRPC's client."""
    found = []
    for name, (datatype, array) in as_arrays(**values).items():
        found.append(client.InferInput(name, list(array.shape), datatype))
        found[-1].set_data_from_numpy(array)
    return found


def message_of(model: str = "tensorrt_llm", **values: Any) -> Any:
    """A ModelInferRequest, as the client makes it."""
    found = grpcclient.service_pb2.ModelInferRequest(model_name=model, id="x")
    for tensor in inputs_of(grpcclient, **values):
        found.inputs.append(tensor._get_tensor())
        found.raw_input_contents.append(tensor._get_content())
    return found


def prompt(*tokens: int, new: int = 8, **others: Any) -> dict[str, Any]:
    """The inputs that clients of the C++ backend always send, for one row."""
    always = {
        **{"input_ids": tokens, "input_lengths": len(tokens), "request_output_len": new},
        **{"beam_width": 1, "temperature": 1.0, "streaming": False, "end_id": -1, "pad_id": 1},
        **{"return_log_probs": False, "runtime_top_k": 1, "runtime_top_p": 0.0},
    }
    return {**always, **others}


def arrays_of(result: Any) -> dict[str, np.ndarray]:
    """All outputs of a response."""
    message = result.get_response()
    outputs = message["outputs"] if isinstance(message, dict) else message.outputs
    names = [one["name"] if isinstance(one, dict) else one.name for one in outputs]
    return {name: result.as_numpy(name) for name in names}


@dataclass
class Response:
    """`arrays` of a response, or its `error`."""

    id: str
    arrays: dict[str, np.ndarray]
    is_final: bool
    error: Any = None

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the first beam."""
        length = self.arrays["sequence_length"][0, 0]
        return self.arrays["output_ids"][0, 0, :length].tolist()


@dataclass
class Stream:
    """One bidirectional stream. `next` gives the responses in the order they came."""

    client: Any
    came: queue.Queue[Response] = field(default_factory=queue.Queue)

    def take(self, result: Any, error: Any) -> None:
        if result is None:
            self.came.put(Response("", {}, True, error))
            return
        message = result.get_response()
        is_final = message.parameters["triton_final_response"].bool_param
        self.came.put(Response(message.id, arrays_of(result), is_final))

    def send(self, model: str = "tensorrt_llm", id: str | None = None, **values: Any) -> str:
        parameters = values.pop("parameters", {})
        id = uuid.uuid4().hex if id is None else id
        self.client.async_stream_infer(
            model, inputs_of(grpcclient, **values), request_id=id, **parameters
        )
        return id

    def next(self) -> Response:
        return self.came.get(timeout=TIMEOUT_S)

    def all(self) -> list[Response]:
        """Until the final one of one call."""
        found = [self.next()]
        while not found[-1].is_final:
            found.append(self.next())
        return found

    def stop(self, id: str) -> None:
        """Stop a request with the message of the backend's client."""
        stop = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
        self.send(id=id, **stop)


@contextlib.contextmanager
def streaming(client: Any, headers: Mapping[str, str] | None = None) -> Iterator[Stream]:
    stream = Stream(client)
    client.start_stream(stream.take, headers=headers)
    try:
        yield stream
    finally:
        client.stop_stream(cancel_requests=True)


def tokens_of(responses: Sequence[Response]) -> list[int]:
    return [token for response in responses for token in response.tokens]
