"""Describes the paths below /v2 for the OpenAPI document, from tables of the models' tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptmanager.server.errors import STATUSES, described_error
from gptmanager.server.triton import text_model, token_model
from gptmanager.server.triton.inference import VERSION
from gptmanager.server.triton.tensors import TensorSpec

_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": _TEXT}}
_DATATYPE_SCHEMAS: dict[str, dict[str, Any]] = {
    "BYTES": _TEXT,
    "BOOL": {"type": "boolean"},
    "INT32": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "UINT64": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    "UINT8": {"type": "integer", "minimum": 0, "maximum": 255},
    "FP32": {"type": "number"},
    "FP16": {"type": "number"},
}
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": _TEXT,
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": _TEXT,
        "data": {"type": "array"},
        "parameters": _OBJECT,
    },
}
_INFER = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": _TEXT,
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": _TEXT, "parameters": _OBJECT},
            },
        },
        "parameters": _OBJECT,
    },
}


def paths() -> dict[str, Any]:
    """Return the path items below /v2, by path."""
    generate = {"anyOf": [_generate(token_model.INPUTS), _generate(text_model.BLS_INPUTS)]}
    found = {
        "/v2": {"get": _operation("return the server's name and version")},
        "/v2/health/live": {"get": _operation("check that the loop runs", answer=None)},
        "/v2/health/ready": {"get": _operation("check that calls are accepted", answer=None)},
        "/v2/repository/index": {"post": _operation("list the models")},
        "/v2/models/stats": {"get": _operation("return the call statistics of all models")},
    }
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        found[path] = {"get": _operation("list a model's tensors", path=path)}
        found[f"{path}/ready"] = {
            "get": _operation("check that a model accepts calls", answer=None, path=path)
        }
        found[f"{path}/config"] = {"get": _operation("return a model's configuration", path=path)}
        found[f"{path}/stats"] = {"get": _operation("return a model's statistics", path=path)}
        found[f"{path}/infer"] = {"post": _operation("run a call", body=_INFER, path=path)}
        found[f"{path}/generate"] = {"post": _operation("run a call", body=generate, path=path)}
        found[f"{path}/generate_stream"] = {
            "post": _operation(
                "stream the responses of a call",
                body=generate,
                answer="text/event-stream",
                path=path,
            )
        }
    return found


def _operation(
    summary: str,
    *,
    path: str = "",
    body: Mapping[str, Any] | None = None,
    answer: str | None = "application/json",
) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(status): described_error(status, "TritonError")
        for status in STATUSES
        # 405: the path lacks the method. 422: a reused Idempotency-Key, a header that /v2 ignores.
        if status not in (405, 422)
    }
    if answer is None:
        responses["503"] = {"description": "the check failed"}
    responses["200"] = {"description": summary, **({"content": {answer: {}}} if answer else {})}
    if body is _INFER:
        responses["200"]["content"]["application/octet-stream"] = {}
    found: dict[str, Any] = {"summary": summary, "responses": responses}
    values = {"name": ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"], "version": [VERSION]}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {**_TEXT, "enum": known}}
        for name, known in values.items()
        if f"{{{name}}}" in path
    ]
    if parameters:
        found["parameters"] = parameters
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found


def _generate(inputs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the schema of a `generate` body, which has each input under its name."""
    return {
        "type": "object",
        "required": [spec.name for spec in inputs.values() if not spec.is_optional],
        "properties": {
            "id": _TEXT,
            "parameters": _OBJECT,
            **{spec.name: _tensor(spec) for spec in inputs.values()},
        },
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    """Return the schema of an input; a vector may also be given as a single element."""
    element = _DATATYPE_SCHEMAS[spec.datatype]
    if spec.dims == (1,):
        return element
    schema: dict[str, Any] = element
    for size in reversed(spec.dims):
        schema = {"type": "array", "items": schema}
        if size >= 0:
            schema.update(minItems=size, maxItems=size)
    return {"anyOf": [schema, element]} if len(spec.dims) == 1 else schema
