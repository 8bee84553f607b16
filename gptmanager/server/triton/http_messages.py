"""Bodies of HTTP's infer call: JSON, and tensors as bytes behind it (the binary extension)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import orjson

from gptmanager.memory.checkpoint_files import shown
from gptmanager.server.errors import ApiError
from gptmanager.server.triton.datatypes import from_bytes, from_values, to_bytes, to_values
from gptmanager.server.triton.errors import invalid, unsupported
from gptmanager.server.triton.inference import VERSION, Model
from gptmanager.server.triton.messages import InferRequest, InferResponse, InputTensor

HEADER = "inference-header-content-length"  # bytes of JSON before the tensors


def unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    """A body as it was before `Content-Encoding`; at most `limit` bytes of it."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise ApiError(400, f"Content-Encoding {shown(encoding)} is none of gzip, deflate")
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32)  # of either
    try:
        found = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is no {encoding}: {error}") from None
    if len(found) > limit:
        raise ApiError(413, f"the body has more bytes than --max-body-bytes = {limit}")
    if not reader.eof:
        raise ApiError(400, f"the body is no {encoding}: its end is missing")
    return found


def read_request(
    body: bytes, header_length: str | None, name: str, version: str
) -> tuple[InferRequest, set[str] | None]:
    """The call, and the outputs that are wanted as bytes (None: all). ApiError 400."""
    length = _header_length(header_length, len(body))
    try:
        given = orjson.loads(body[:length])
    except orjson.JSONDecodeError as error:
        raise invalid(None, f"failed to parse the request JSON: {error}") from None
    fields = _Object("the request", given)
    rest = _Rest(body[length:])
    inputs: dict[str, InputTensor] = {}
    for tensor in fields.objects("inputs"):
        one = tensor.text("name")
        if one in inputs:
            raise invalid(one, f"the input {shown(one)} is given twice")
        inputs[one] = _input(tensor, one, rest)
    rest.check_end()
    outputs, binary = _outputs(fields)
    parameters = fields.parameters()
    if parameters.get("binary_data_output") is True and not outputs:
        binary = None
    request = InferRequest(
        name, inputs, version, fields.text("id", ""), outputs or None, parameters
    )
    return request, binary


def _header_length(given: str | None, size: int) -> int:
    if given is None:
        return size
    if not (given.isascii() and given.isdecimal() and len(given) < 20 and int(given) <= size):
        raise invalid(None, f"{HEADER} = {shown(given)} is outside 0..{size}, that of the body")
    return int(given)


def _input(tensor: _Object, name: str, rest: _Rest) -> InputTensor:
    datatype, shape, parameters = tensor.text("datatype"), tensor.shape(), tensor.parameters()
    _check_parameters(name, parameters)
    size = parameters.get("binary_data_size")
    if size is not None:
        if "data" in tensor.given:
            raise invalid(
                name, f"input {shown(name)} has data and binary_data_size: one is possible"
            )
        return InputTensor(datatype, from_bytes(name, datatype, shape, rest.take(name, size)))
    if "data" not in tensor.given:
        raise invalid(name, f"input {shown(name)} has neither data nor binary_data_size")
    return InputTensor(datatype, from_values(name, datatype, shape, tensor.given["data"]))


def _outputs(fields: _Object) -> tuple[list[str], set[str] | None]:
    names, binary = [], set()
    for tensor in fields.objects("outputs", ()):
        name, parameters = tensor.text("name"), tensor.parameters()
        _check_parameters(name, parameters)
        names.append(name)
        if parameters.get("binary_data") is True:
            binary.add(name)
    return names, binary


def _check_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    if "shared_memory_region" in parameters:
        raise unsupported(f"{shown(name)}: shared memory is not supported")
    if parameters.get("classification"):
        raise unsupported(f"output {shown(name)}: classification is not supported")


class _Rest:
    """The bytes behind the JSON, tensor by tensor."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    def take(self, name: str, size: Any) -> bytes:
        left = len(self._raw) - self._at
        if type(size) is not int or not 0 <= size <= left:
            raise invalid(
                name,
                f"input {shown(name)}: binary_data_size = {shown(size)} is outside 0..{left}, "
                "what is left of the body",
            )
        self._at += size
        return self._raw[self._at - size : self._at]

    def check_end(self) -> None:
        left = len(self._raw) - self._at
        if left:
            raise invalid(None, f"{left} bytes of the body belong to no input")


class _Object:
    """A JSON object of a call; its parts are read as what they must be. `where`: for errors."""

    def __init__(self, where: str, given: Any) -> None:
        if not isinstance(given, dict):
            raise invalid(None, f"{where} = {shown(given)} is no JSON object")
        self.given = given
        self._where = where

    def text(self, key: str, absent: str | None = None) -> str:
        found = self.given.get(key, absent)
        if not isinstance(found, str):
            raise invalid(key, f"{self._where}: {key} = {shown(found)} is no text")
        return found

    def objects(self, key: str, absent: Any = None) -> list[_Object]:
        found = self.given.get(key, absent)
        if not isinstance(found, (list, tuple)):
            raise invalid(key, f"{self._where}: {key} = {shown(found)} is no list")
        return [_Object(f"{key}[{index}]", one) for index, one in enumerate(found)]

    def shape(self) -> list[int]:
        found = self.given.get("shape")
        if not isinstance(found, list) or any(type(size) is not int for size in found):
            raise invalid("shape", f"{self._where}: shape = {shown(found)} is no list of integers")
        return found

    def parameters(self) -> dict[str, Any]:
        found = self.given.get("parameters", {})
        if not isinstance(found, dict):
            raise invalid("parameters", f"{self._where}: parameters = {shown(found)} is no object")
        return found


def write_response(
    response: InferResponse, model: Model, binary: set[str] | None
) -> tuple[bytes, dict[str, str]]:
    """The body, and its headers."""
    outputs, raw = [], []
    for name, array in response.outputs.items():
        told: dict[str, Any] = {
            "name": name,
            "datatype": model.outputs[name].datatype,
            "shape": list(array.shape),
        }
        if binary is None or name in binary:
            raw.append(to_bytes(array))
            told["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            told["data"] = to_values(array)
        outputs.append(told)
    head = orjson.dumps(
        {
            **({"id": response.request.id} if response.request.id else {}),
            "model_name": model.name,
            "model_version": VERSION,
            "outputs": outputs,
        }
    )
    if not raw:
        return head, {"content-type": "application/json"}
    return b"".join([head, *raw]), {
        "content-type": "application/octet-stream",
        HEADER: str(len(head)),
    }
