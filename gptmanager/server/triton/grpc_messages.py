"""Converts gRPC messages into `InferRequest`s, and `InferResponse`s into gRPC messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError
from gptmanager.server.triton.datatypes import from_bytes, from_values, to_bytes
from gptmanager.server.triton.errors import invalid, unsupported
from gptmanager.server.triton.inference import VERSION, Model, check_outputs
from gptmanager.server.triton.messages import (
    PARAMETERS,
    InferRequest,
    InferResponse,
    InputTensor,
    Parameter,
)

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def read_request(message: Any, model: Model, *, may_have_many: bool) -> InferRequest:
    """Return the InferRequest for a ModelInferRequest. Raises ApiError at the first fault."""
    raw = message.raw_input_contents
    model.reader.check_number(len(message.inputs))
    check_outputs(len(message.outputs), model)
    if raw and len(raw) != len(message.inputs):
        raise invalid(
            None,
            f"expected {len(message.inputs)} raw_input_contents, one for each input, "
            f"got {len(raw)}",
        )
    inputs: dict[str, InputTensor] = {}
    for index, tensor in enumerate(message.inputs):
        if tensor.name in inputs:
            raise invalid(tensor.name, f"the input {quoted(tensor.name)} is given twice")
        _check_in_message(tensor)
        model.reader.check(tensor.name, tensor.datatype, tensor.shape)
        array = (
            from_bytes(tensor.name, tensor.datatype, tensor.shape, raw[index])
            if raw
            else _typed(tensor)
        )
        inputs[tensor.name] = InputTensor(tensor.datatype, array)
    for tensor in message.outputs:
        _check_in_message(tensor)
        if "classification" in tensor.parameters:
            raise unsupported(f"output {quoted(tensor.name)}: classification is not supported")
    return InferRequest(
        message.model_name,
        inputs,
        message.model_version,
        message.id,
        [tensor.name for tensor in message.outputs] or None,
        {
            name: _parameter(message.parameters[name])
            for name in PARAMETERS
            if name in message.parameters
        },
        may_have_many,
    )


def _check_in_message(tensor: Any) -> None:
    if "shared_memory_region" in tensor.parameters:
        raise unsupported(f"{quoted(tensor.name)}: shared memory is not supported")


def _typed(tensor: Any) -> np.ndarray:
    name = tensor.name
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise invalid(name, f"input {quoted(name)}: {tensor.datatype} needs raw_input_contents")
    values, count = getattr(tensor.contents, field), math.prod(tensor.shape)
    if len(values) > count:
        raise invalid(
            name, f"input {quoted(name)} has {len(values)} elements, expected {count} by its shape"
        )
    return from_values(name, tensor.datatype, tensor.shape, list(values))


def _parameter(value: Any) -> Parameter:
    kind = value.WhichOneof("parameter_choice")
    found: Parameter = getattr(value, kind) if kind else False
    return found


def write_response(response: InferResponse, model: Model) -> Any:
    """Return `response` as a ModelInferResponse."""
    request = response.request
    message = pb.ModelInferResponse(model_name=model.name, model_version=VERSION, id=request.id)
    for name, array in response.outputs.items():
        datatype = model.outputs[name].datatype
        message.outputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_output_contents.append(to_bytes(array))
    return message


class StreamedResponses:
    """Converts the responses of a streamed call.

    The responses of a call differ little, so all `write` calls change and return the same message.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._message = pb.ModelStreamInferResponse()
        self._outputs: dict[str, np.ndarray] = {}

    def write(self, response: InferResponse) -> Any:
        """Return `response` as a ModelStreamInferResponse, valid until the next `write`."""
        old, new = self._outputs, dict(response.outputs)
        message = self._message.infer_response
        if not old or _shapes(old) != _shapes(new):
            message.CopyFrom(write_response(response, self._model))
        else:
            for index, (name, array) in enumerate(new.items()):
                if array is not old[name]:
                    message.raw_output_contents[index] = to_bytes(array)
        self._outputs = new
        message.parameters["triton_final_response"].bool_param = response.is_final
        error = response.error
        self._message.error_message = "" if error is None else error.message
        return self._message


def _shapes(outputs: Mapping[str, np.ndarray]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, array.shape) for name, array in outputs.items()]


def refused_response(request_id: str, error: ApiError) -> Any:
    """Return the ModelStreamInferResponse for a refused call. The call has no other response."""
    response = pb.ModelInferResponse(id=request_id)
    response.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(error_message=error.message, infer_response=response)
