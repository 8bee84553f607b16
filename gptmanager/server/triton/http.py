"""Serves Triton's protocol over HTTP at /v2/..., with the generate extension.

Errors are `{"error": "text"}`, the format that Triton's clients expect.
"""

from __future__ import annotations

import contextlib
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.errors import quoted
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import api_error
from gptmanager.server.http.body import (
    body_of,
    parsed,
    read_json,
    start_stream,
    until_disconnected,
)
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.responses import EventStream, event, json_response
from gptmanager.server.settings import ServerSettings
from gptmanager.server.triton import repository
from gptmanager.server.triton.datatypes import from_values, to_values
from gptmanager.server.triton.errors import invalid, unsupported_extension
from gptmanager.server.triton.http_messages import (
    HEADER,
    decompressed,
    read_request,
    write_response,
)
from gptmanager.server.triton.inference import VERSION, Inference, Model
from gptmanager.server.triton.messages import (
    PARAMETERS,
    InferRequest,
    InferResponse,
    InputTensor,
)

_ONE_MODEL = "/v2/models/{name}"
_ONE_VERSION = "/v2/models/{name}/versions/{version}"
# The paths of Triton's extensions that this server does not support, and what each path is for.
UNSUPPORTED_PATHS = {
    "/v2/systemsharedmemory/{rest:path}": "system shared memory",
    "/v2/cudasharedmemory/{rest:path}": "CUDA shared memory",
    "/v2/repository/models/{rest:path}": "loading and unloading of models",
    "/v2/trace/setting": "tracing",
    f"{_ONE_MODEL}/trace/setting": "tracing",
    "/v2/logging": "changing what is logged",
}


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes below /v2, or none if the settings do not enable Triton's protocol."""
    if not settings.serves_triton:
        return []
    front = HttpFront(Inference.of(engine, settings), settings)
    found: list[BaseRoute] = [
        Route("/v2", front.server),
        Route("/v2/health/live", front.live),
        Route("/v2/health/ready", front.ready),
        Route("/v2/repository/index", front.index, methods=["POST"]),
        Route("/v2/models/stats", front.statistics),
    ]
    for path in (_ONE_MODEL, _ONE_VERSION):
        found += [
            Route(path, front.metadata),
            Route(f"{path}/ready", front.model_ready),
            Route(f"{path}/config", front.config),
            Route(f"{path}/stats", front.statistics),
            Route(f"{path}/infer", front.infer, methods=["POST"]),
            Route(f"{path}/generate", front.generate, methods=["POST"]),
            Route(f"{path}/generate_stream", front.generate_stream, methods=["POST"]),
        ]
    found += [
        Route(path, _refuses(what), methods=["GET", "POST"])
        for path, what in UNSUPPORTED_PATHS.items()
    ]
    return found


def _refuses(what: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def refuse(request: Request) -> Response:
        raise unsupported_extension(what)

    return refuse


class HttpFront:
    """The endpoints below /v2."""

    def __init__(self, inference: Inference, settings: ServerSettings) -> None:
        self._inference = inference
        self._settings = settings

    async def server(self, request: Request) -> Response:
        return json_response(repository.server_metadata())

    async def live(self, request: Request) -> Response:
        return Response(status_code=200 if self._inference.is_live else 503)

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._inference.is_ready else 503)

    async def index(self, request: Request) -> Response:
        return json_response(repository.index(self._inference))

    async def metadata(self, request: Request) -> Response:
        return json_response(repository.model_metadata(self._model(request)))

    async def model_ready(self, request: Request) -> Response:
        self._model(request)
        return await self.ready(request)

    async def config(self, request: Request) -> Response:
        model = self._model(request)
        return json_response(repository.model_config(model, self._inference, self._settings))

    async def statistics(self, request: Request) -> Response:
        return json_response(repository.statistics(self._inference, **request.path_params))

    async def infer(self, request: Request) -> Response:
        """Answer a call with one response, with tensors as JSON or as bytes."""
        model = self._model(request)
        async with body_of(request, carries_tensors=True) as body:  # tensors are views of `body`
            return await self._infer(request, model, body)

    async def _infer(self, request: Request, model: Model, body: bytes) -> Response:
        encoding = request.headers.get("content-encoding", "").strip().lower()
        length = request.headers.get(HEADER)
        limit = self._settings.body_limit(carries_tensors=True)

        def read() -> tuple[InferRequest, set[str] | None]:
            return read_request(decompressed(body, encoding, limit), length, model)

        size = len(body) if encoding in ("", "identity") else limit
        call, binary = await parsed(request, size, read)
        request.scope[RECORD].details = call.log_fields
        response = await until_disconnected(request, self._inference.one_response(call))
        content, headers = write_response(response, model, binary)
        return Response(content, headers=headers)

    async def generate(self, request: Request) -> Response:
        """Answer a call with one response. Inputs and outputs are JSON values by name."""
        model = self._model(request)
        call = await _generate_request(request, model)
        request.scope[RECORD].details = call.log_fields
        response = await until_disconnected(request, self._inference.one_response(call))
        return json_response(_as_json(response, model))

    async def generate_stream(self, request: Request) -> Response:
        """Answer a call like `generate`, but with a stream that has an event for each response."""
        model = self._model(request)
        call = await _generate_request(request, model)
        call.may_have_many = True
        request.scope[RECORD].details = call.log_fields
        frames = self._frames(call, model)
        return EventStream(await until_disconnected(request, start_stream(frames)))

    async def _frames(self, call: InferRequest, model: Model) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            async with contextlib.aclosing(self._inference.responses(call)) as responses:
                async for response in responses:
                    if response.error is not None:
                        raise response.error
                    has_begun = True
                    yield event(_as_json(response, model))
        except Exception as error:
            if not has_begun:
                raise
            yield event({"error": api_error(error).message})

    def _model(self, request: Request) -> Model:
        return self._inference.find(**request.path_params)


async def _generate_request(request: Request, model: Model) -> InferRequest:
    return await read_json(request, lambda body: _read_generate(body, model))


def _read_generate(body: Mapping[str, Any], model: Model) -> InferRequest:
    """Return the request in the body of a call of generate or generate_stream.

    As in Triton, the request's parameters may also be top-level keys, and its inputs may also be
    in `parameters`. A null value counts as absent. Unknown keys are ignored, except `stop`: a call
    that shall end others must not run as a call of its own.
    """
    parameters = body.get("parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict):
        raise invalid("parameters", f"parameters must be an object, got {quoted(parameters)}")
    request_id = body.get("id")
    request_id = "" if request_id is None else request_id
    if not isinstance(request_id, (str, int)) or isinstance(request_id, bool):
        raise invalid("id", f"id must be a string, got {quoted(request_id)}")

    def given(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        for name in names:
            value = body.get(name)
            value = parameters.get(name) if value is None else value
            if value is not None:
                yield name, value

    if "stop" not in model.inputs and any(value is True for _, value in given(("stop",))):
        raise invalid("stop", "stop is an input of 'tensorrt_llm': send it there, with the same id")
    inputs = {}
    for name, value in given(model.inputs):
        datatype, shape = model.inputs[name].datatype, model.reader.shape_of(name, value)
        shape = (1, *(shape or (1,)))
        model.reader.check(name, datatype, shape)
        inputs[name] = InputTensor(datatype, from_values(name, datatype, shape, value))
    if not inputs:
        raise invalid(None, f"the request has no input of model {quoted(model.name)}")
    return InferRequest(model.name, inputs, VERSION, str(request_id), None, dict(given(PARAMETERS)))


def _as_json(response: InferResponse, model: Model) -> dict[str, Any]:
    """Return the tensors of a response by name, each as a list, or as its only element."""
    found: dict[str, Any] = {"model_name": model.name, "model_version": VERSION}
    if response.request.id:
        found["id"] = response.request.id
    for name, array in response.outputs.items():
        values = to_values(array)
        found[name] = values[0] if len(values) == 1 else values
    return found
