"""Bodies of infer calls over HTTP: JSON, then tensors as bytes (the binary data extension)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError
from gptmanager.server.http.json_text import parse_json
from gptmanager.server.triton.datatypes import (
    MAX_DIMS,
    from_bytes,
    from_values,
    to_bytes,
    to_values,
)
from gptmanager.server.triton.errors import invalid, unsupported
from gptmanager.server.triton.inference import VERSION, Model, check_outputs
from gptmanager.server.triton.messages import PARAMETERS, InferRequest, InferResponse, InputTensor

HEADER = "inference-header-content-length"  # number of bytes of JSON, before the tensors
# The maximum size of a decompressed body: a constant, plus some bytes for each compressed byte.
_DECOMPRESSED_BASE, _DECOMPRESSED_PER_BYTE = 16 << 20, 4


def decompressed(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body.

    Raises ApiError: 400 for an unknown `encoding` or a wrong body, 413 if the result exceeds
    `limit` or is many times larger than the body. (A deflated body can expand a thousandfold.)
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise ApiError(400, f"Content-Encoding must be gzip or deflate, got {quoted(encoding)}")
    limit = min(limit, _DECOMPRESSED_BASE + _DECOMPRESSED_PER_BYTE * len(body))
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects gzip and deflate
    try:
        found = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not valid {encoding}: {error}") from None
    if len(found) > limit:
        raise ApiError(
            413,
            f"the body of {len(body)} bytes decompresses to more than {limit} bytes, the limit "
            "for its size or of --max-body-bytes",
        )
    if not reader.eof:
        raise ApiError(400, f"the body is not valid {encoding}: its end is missing")
    return found


def read_request(
    body: bytes, header_length: str | None, model: Model
) -> tuple[InferRequest, set[str] | None]:
    """Return the call, and the names of the outputs to send as bytes (None: all outputs).

    `header_length` is the value of the header HEADER. If it is None, the whole body is JSON. Raises
    ApiError at the first fault, without checking the rest: 400, or 501 for an extension that is not
    supported.
    """
    length = _header_length(header_length, len(body))
    fields = _Object("the request", parse_json(body[:length]))
    rest = _Rest(memoryview(body)[length:])
    inputs: dict[str, InputTensor] = {}
    model.reader.check_number(fields.number("inputs"))
    for tensor in fields.objects("inputs"):
        one = tensor.text("name")
        if one in inputs:
            raise invalid(one, f"the input {quoted(one)} is given twice")
        inputs[one] = _input(tensor, one, rest, model)
    rest.check_end()
    outputs, binary = _outputs(fields, model)
    parameters = fields.parameters()
    if parameters.get("binary_data_output") is True and not outputs:
        binary = None
    request = InferRequest(
        model.name,
        inputs,
        VERSION,
        fields.text("id", ""),
        outputs or None,
        {name: parameters[name] for name in PARAMETERS if name in parameters},
    )
    return request, binary


def _header_length(given: str | None, size: int) -> int:
    if given is None:
        return size
    if not (given.isascii() and given.isdecimal() and len(given) < 20 and int(given) <= size):
        raise invalid(
            None, f"{HEADER} = {quoted(given)} is outside 0..{size}, the size of the body"
        )
    return int(given)


def _input(tensor: _Object, name: str, rest: _Rest, model: Model) -> InputTensor:
    datatype, shape, parameters = tensor.text("datatype"), tensor.shape(), tensor.parameters()
    _check_parameters(name, parameters)
    model.reader.check(name, datatype, shape)
    size = parameters.get("binary_data_size")
    if size is not None:
        if "data" in tensor.given:
            raise invalid(
                name, f"input {quoted(name)} has both data and binary_data_size: pass one of them"
            )
        return InputTensor(datatype, from_bytes(name, datatype, shape, rest.take(name, size)))
    if "data" not in tensor.given:
        raise invalid(name, f"input {quoted(name)} has neither data nor binary_data_size")
    return InputTensor(datatype, from_values(name, datatype, shape, tensor.given["data"]))


def _outputs(fields: _Object, model: Model) -> tuple[list[str], set[str] | None]:
    names, binary = [], set()
    check_outputs(fields.number("outputs", ()), model)
    for tensor in fields.objects("outputs"):
        name, parameters = tensor.text("name"), tensor.parameters()
        _check_parameters(name, parameters)
        names.append(name)
        if parameters.get("binary_data") is True:
            binary.add(name)
    return names, binary


def _check_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    if "shared_memory_region" in parameters:
        raise unsupported(f"{quoted(name)}: shared memory is not supported")
    if parameters.get("classification"):
        raise unsupported(f"output {quoted(name)}: classification is not supported")


class _Rest:
    """The bytes of a body after its JSON. `take` returns the bytes of the next tensor."""

    def __init__(self, raw: memoryview) -> None:
        self._raw = raw
        self._at = 0

    def take(self, name: str, size: Any) -> memoryview:
        left = len(self._raw) - self._at
        if type(size) is not int or not 0 <= size <= left:
            raise invalid(
                name,
                f"input {quoted(name)}: binary_data_size = {quoted(size)} is outside 0..{left}, "
                "the remaining size of the body",
            )
        self._at += size
        return self._raw[self._at - size : self._at]

    def check_end(self) -> None:
        left = len(self._raw) - self._at
        if left:
            raise invalid(None, f"{left} bytes of the body belong to no input")


class _Object:
    """A JSON object of a call, with methods that check types. `where` is its name in errors."""

    def __init__(self, where: str, given: Any) -> None:
        if not isinstance(given, dict):
            raise invalid(None, f"{where} must be an object, got {quoted(given)}")
        self.given = given
        self._where = where

    def text(self, key: str, absent: str | None = None) -> str:
        found = self.given.get(key, absent)
        if not isinstance(found, str):
            raise invalid(key, f"{self._where}: {key} must be a string, got {quoted(found)}")
        return found

    def number(self, key: str, absent: Any = None) -> int:
        """Return the number of objects that `objects(key)` yields; check that they are a list."""
        found = self.given.get(key, absent)
        if not isinstance(found, (list, tuple)):
            raise invalid(key, f"{self._where}: {key} must be a list, got {quoted(found)}")
        return len(found)

    def objects(self, key: str) -> Iterator[_Object]:
        for index, one in enumerate(self.given.get(key, ())):
            yield _Object(f"{key}[{index}]", one)

    def shape(self) -> list[int]:
        found = self.given.get("shape")
        if (
            not isinstance(found, list)
            or len(found) > MAX_DIMS
            or any(type(size) is not int for size in found)
        ):
            raise invalid(
                "shape",
                f"{self._where}: shape must be a list of at most {MAX_DIMS} integers, got "
                f"{quoted(found)}",
            )
        return found

    def parameters(self) -> dict[str, Any]:
        found = self.given.get("parameters", {})
        if not isinstance(found, dict):
            raise invalid(
                "parameters", f"{self._where}: parameters must be an object, got {quoted(found)}"
            )
        return found


def write_response(
    response: InferResponse, model: Model, binary: set[str] | None
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a response.

    The outputs in `binary` are sent as bytes. If `binary` is None, all outputs are sent as bytes.
    """
    outputs, raw = [], []
    for name, array in response.outputs.items():
        output: dict[str, Any] = {
            "name": name,
            "datatype": model.outputs[name].datatype,
            "shape": list(array.shape),
        }
        if binary is None or name in binary:
            raw.append(to_bytes(array))
            output["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            output["data"] = to_values(array)
        outputs.append(output)
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
