"""/openapi.json: describes requests and answers. The tables for requests also validate them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager import __version__
from gptmanager.server.anthropic import messages
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import CONNECTION_STATUSES, STATUSES, described_error
from gptmanager.server.fields import Field, object_schema
from gptmanager.server.http.idempotency import PATHS
from gptmanager.server.http.responses import json_response
from gptmanager.server.openai import chat, completions, models, responses, tokenization
from gptmanager.server.settings import ServerSettings
from gptmanager.server.triton import described

_TEXT = {"type": "string"}
_OPTIONAL = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
# Statuses of every endpoint: errors of the connection, errors of the guards, which run before the
# endpoint, and unexpected errors.
_ERRORS_ANYWHERE = (400, 403, *CONNECTION_STATUSES, 429, 500)


class Endpoint(NamedTuple):
    """One method of a path in the document.

    `fields`: the fields of the request's body, or None if the request has no body. `answer`: the
    properties of the answer's JSON object, or the media type of the answer. `parameter`: the name
    in braces in the path. `link`: a link to an operation that uses values of this answer. `method`:
    by default POST if the request has a body, otherwise GET.
    """

    path: str
    summary: str
    fields: Mapping[str, Field] | None = None
    answer: Mapping[str, Any] | str = "application/json"
    parameter: str = ""
    link: Mapping[str, Any] | None = None
    method: str = ""


def _link(path: str, method: str = "post", **values: Any) -> dict[str, Any]:
    place = path.replace("~", "~0").replace("/", "~1")
    return {"operationRef": f"#/paths/{place}/{method}", **values}


def _counts(*names: str) -> dict[str, Any]:
    return {"type": "object", "required": [*names], "properties": dict.fromkeys(names, _COUNT)}


_COMPLETION = {
    "id": _TEXT,
    "object": _TEXT,
    "created": _COUNT,
    "model": _TEXT,
    "choices": {"type": "array", "items": {"type": "object"}},
    "usage": {
        "type": "object",
        "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
        "properties": {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _counts("cached_tokens", "audio_tokens"),
            "completion_tokens_details": _counts(
                "reasoning_tokens",
                "audio_tokens",
                "accepted_prediction_tokens",
                "rejected_prediction_tokens",
            ),
        },
    },
}
_LIST = {"type": "array", "items": {"type": "object"}}
_RESPONSE = {"id": _TEXT, "object": _TEXT, "status": _TEXT, "model": _TEXT, "output": _LIST}
_MESSAGE = {"id": _TEXT, "type": _TEXT, "role": _TEXT, "model": _TEXT, "content": _LIST}
_STORED = "/v1/responses/{response_id}"
_MODEL = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "max_model_len": _COUNT}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": _TEXT, "error": {"type": "object", "required": ["type", "message"]}},
}
ENDPOINTS = (
    Endpoint("/v1/completions", "complete prompts", completions.FIELDS, _COMPLETION),
    Endpoint("/v1/chat/completions", "answer a chat", chat.FIELDS, _COMPLETION),
    Endpoint("/v1/responses", "answer items", responses.FIELDS, _RESPONSE),
    Endpoint(
        "/v1/responses/input_tokens",
        "count the tokens of items",
        responses.FIELDS,
        {"object": _TEXT, "input_tokens": _COUNT},
    ),
    Endpoint(_STORED, "return a stored response", None, _RESPONSE, "response_id"),
    Endpoint(_STORED, "forget a response", None, {"id": _TEXT}, "response_id", method="delete"),
    Endpoint(
        f"{_STORED}/input_items",
        "list the input of a stored response",
        None,
        {"data": {}},
        "response_id",
    ),
    Endpoint(
        f"{_STORED}/cancel",
        "always refused: a stored response has ended",
        None,
        {},
        "response_id",
        method="post",
    ),
    Endpoint("/v1/messages", "answer a chat", messages.FIELDS, _MESSAGE),
    Endpoint(
        "/v1/messages/count_tokens",
        "count the tokens of a chat",
        messages.COUNT_FIELDS,
        {"input_tokens": _COUNT},
    ),
    Endpoint(
        "/v1/models",
        "list the model and its adapters",
        None,
        {"object": _TEXT, "data": {}},
        link=_link("/v1/models/{name}", "get", parameters={"name": "$response.body#/data/0/id"}),
    ),
    Endpoint("/v1/models/{name}", "describe the model or an adapter", None, _MODEL, "name"),
    Endpoint(
        "/v1/load_lora_adapter",
        "load an adapter under a name",
        models.LOAD,
        _MODEL,
        link=_link("/v1/unload_lora_adapter", requestBody={"lora_name": "$response.body#/id"}),
    ),
    Endpoint("/v1/unload_lora_adapter", "unload an adapter", models.UNLOAD, {"id": _TEXT}),
    Endpoint(
        "/tokenize",
        "convert a text into tokens",
        tokenization.TOKENIZE,
        {"count": _COUNT, "tokens": {}},
        link=_link("/detokenize", requestBody={"tokens": "$response.body#/tokens"}),
    ),
    Endpoint(
        "/detokenize", "convert tokens into a text", tokenization.DETOKENIZE, {"prompt": _TEXT}
    ),
    Endpoint(
        "/tokenizer_info",
        "describe the tokenizer",
        None,
        {
            "model_max_length": _COUNT,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "chat_template"), _OPTIONAL),
        },
    ),
    Endpoint("/health", "check that requests are accepted", None, {"status": _TEXT}),
    Endpoint("/health/live", "check that the loop runs", None, {"status": _TEXT}),
    Endpoint("/health/ready", "check that requests are accepted", None, {"status": _TEXT}),
    Endpoint("/version", "return the version of gptmanager", None, {"version": _TEXT}),
)


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """Return the route of /openapi.json."""
    found = document(
        has_key=settings.has_key,
        lenient=settings.lenient,
        loads_adapters=settings.adapter_dir is not None,
        has_triton=settings.serves_triton,
    )
    if settings.root_path:
        found["servers"] = [{"url": settings.root_path}]

    async def openapi(request: Request) -> Response:
        return json_response(found)

    return [Route("/openapi.json", openapi)]


def document(
    *,
    has_key: bool = False,
    lenient: bool = False,
    loads_adapters: bool = True,
    has_triton: bool = True,
) -> dict[str, Any]:
    """Return the OpenAPI document, version 3.1, of a server with these options."""
    endpoints = [it for it in ENDPOINTS if loads_adapters or "_lora_adapter" not in it.path]
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "integer", "null"]},
                },
            }
        },
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "gptmanager", "version": __version__},
        "paths": {
            **_paths(endpoints, closed=not lenient),
            **(described.paths() if has_triton else {}),
        },
        "components": {
            "schemas": {
                "Error": error,
                "AnthropicError": _ANTHROPIC_ERROR,
                "TritonError": described.ERROR,
            }
        },
    }
    if has_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _paths(endpoints: Sequence[Endpoint], *, closed: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for one in endpoints:
        paths.setdefault(one.path, {}).update(_path(one, closed=closed))
    return paths


def _path(endpoint: Endpoint, *, closed: bool) -> dict[str, Any]:
    is_anthropic = endpoint.path.startswith("/v1/messages")
    schema = "AnthropicError" if is_anthropic else "Error"
    is_check = endpoint.path.startswith("/health")
    statuses = [it for it in STATUSES if it != 405 and (it != 422 or endpoint.path in PATHS)]
    responses: dict[str, Any] = {
        str(status): described_error(status, schema)
        for status in (_ERRORS_ANYWHERE if is_check else statuses)
    }
    if is_check:
        failed = {"description": "the check failed", "content": {"application/json": {}}}
        responses["503"] = failed
    responses["200"] = {"description": endpoint.summary, "content": _answer(endpoint)}
    if endpoint.link is not None:
        responses["200"]["links"] = {"next": endpoint.link}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.parameter:
        operation["parameters"] = [
            {"name": endpoint.parameter, "in": "path", "required": True, "schema": _TEXT}
        ]
    if endpoint.fields is not None:
        content = {"application/json": {"schema": object_schema(endpoint.fields, closed=closed)}}
        operation["requestBody"] = {"required": True, "content": content}
    return {endpoint.method or ("get" if endpoint.fields is None else "post"): operation}


def _answer(endpoint: Endpoint) -> dict[str, Any]:
    if isinstance(endpoint.answer, str):
        return {endpoint.answer: {}}
    schema = {
        "type": "object",
        "required": list(endpoint.answer),
        "properties": dict(endpoint.answer),
    }
    found: dict[str, Any] = {"application/json": {"schema": schema}}
    if endpoint.fields is not None and "stream" in endpoint.fields:
        found["text/event-stream"] = {}
    return found
