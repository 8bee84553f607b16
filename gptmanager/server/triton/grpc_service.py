"""Serves Triton's protocol over gRPC, with the generated code of the package tritonclient."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gptmanager.errors import ConfigError
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.http.body import BodyBudget, run_in_thread
from gptmanager.server.http.connections import default_max_connections
from gptmanager.server.http.keys import ServerKeys, bearer
from gptmanager.server.http.request_log import RequestLog, RequestRecord
from gptmanager.server.settings import ServerSettings
from gptmanager.server.triton import repository
from gptmanager.server.triton.errors import invalid, unsupported_extension
from gptmanager.server.triton.grpc_log import CallLog
from gptmanager.server.triton.grpc_messages import (
    StreamedResponses,
    read_request,
    refused_response,
    write_response,
)
from gptmanager.server.triton.inference import Inference, Model
from gptmanager.server.triton.messages import MAX_ID, InferRequest
from gptmanager.server.triton.wire import small_problem, wire_problem

_logger = logging.getLogger(__name__)
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_OPEN = ("ServerLive", "ServerReady", "Check")  # health checks need no key
_HEALTH_OF = ("", "inference.GRPCInferenceService")  # "" is the whole server
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # messages grpc.health.v1.HealthCheckResponse
_UNSUPPORTED = {
    **dict.fromkeys(
        [f"SystemSharedMemory{does}" for does in ("Status", "Register", "Unregister")],
        "system shared memory",
    ),
    **dict.fromkeys(
        [f"CudaSharedMemory{does}" for does in ("Status", "Register", "Unregister")],
        "CUDA shared memory",
    ),
    "RepositoryModelLoad": "loading of models",
    "RepositoryModelUnload": "unloading of models",
    "TraceSetting": "tracing",
    "LogSettings": "changing what is logged",
}
_EXTRA_CALLS = 16  # calls of one stream beyond those that the engine runs or queues
_MAX_STREAMS = 1024  # concurrent gRPC calls per connection
_LARGE = 1 << 14  # from this size of an input's dimension on, a worker thread reads the call
_CALLS = ("ModelInfer", "ModelStreamInfer")  # methods with messages that may be large


class GrpcFront:
    """The gRPC server at `port`, on the event loop of the HTTP server."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    @classmethod
    async def start(cls, engine: Engine, settings: ServerSettings) -> GrpcFront:
        """Start the server. Raises ConfigError if the port cannot be used."""
        log = engine.metrics.request_log
        keys = [KeyInterceptor(engine.keys, log)] if settings.has_key else []
        server = grpc.aio.server(
            interceptors=[*keys, BadMessages()],
            options=[
                ("grpc.max_receive_message_length", settings.body_limit(carries_tensors=True)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                (
                    "grpc.max_allowed_incoming_connections",
                    settings.max_connections or default_max_connections(),
                ),
                ("grpc.so_reuseport", 0),  # otherwise a second server could share the port
            ],
        )
        inference = Inference.of(engine, settings)
        service = TritonService(inference, settings, engine.body_budget, CallLog(engine.keys, log))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
        server.add_generic_rpc_handlers((_health_service(inference),))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address, credentials = f"{host}:{settings.grpc_port}", _credentials(settings)
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(
                f"--host {settings.host} --grpc-port {settings.grpc_port} cannot be used: {error}"
            ) from error
        await server.start()
        return cls(server, port)

    async def stop(self, grace_s: float) -> None:
        """Stop the server; calls that still run after `grace_s` are cancelled."""
        await self._server.stop(grace_s)


def _credentials(settings: ServerSettings) -> Any:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return grpc.ssl_server_credentials(
        [(settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())]
    )


def _health_service(inference: Inference) -> grpc.GenericRpcHandler:
    """Return the standard health service of gRPC, which probes of Kubernetes call.

    A message has at most one field, so it is compared as bytes, and no package has to parse it.
    """
    known = [b"\n%c%b" % (len(name), name.encode()) if name else b"" for name in _HEALTH_OF]

    async def check(request: Any, context: grpc.aio.ServicerContext) -> bytes:
        if request not in known:
            names = " and ".join(map(repr, _HEALTH_OF))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the services are {names}")
        return _SERVING if inference.is_ready else _NOT_SERVING

    method = grpc.unary_unary_rpc_method_handler(check, request_deserializer=bytes)
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method})


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks the API key, which clients send in the metadata `authorization` as "Bearer KEY"."""

    def __init__(self, keys: ServerKeys, log: RequestLog) -> None:
        self._keys = keys

        async def refuse(messages: Any, context: grpc.aio.ServicerContext) -> None:
            log.count(401, "invalid_api_key")
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the key is missing or wrong: send the metadata 'authorization: Bearer KEY'",
            )

        # A stream handler can refuse a call of any method before its message is received. grpcio
        # calls other handlers only after it has received the message.
        self._refuse = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        method = details.method.rpartition("/")[2]
        given = dict(details.invocation_metadata or ()).get("authorization")
        key = self._keys.find(bearer(given))
        if key is not None:
            self._keys.enter(key)
        return await continuation(details) if key or method in _OPEN else self._refuse


class _Call(NamedTuple):
    """An inference request: the message (an ApiError if it was bad), and its raw size in bytes."""

    message: Any
    size: int


class BadMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Replaces a message by an ApiError if it is malformed or too expensive to parse.

    If the deserializer raised an exception instead, grpcio would log a traceback, and its answer
    would not give the reason.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        read, is_call = handler.request_deserializer, details.method.rpartition("/")[2] in _CALLS

        def call_of(raw: bytes) -> _Call:
            return _Call(request_of(raw), len(raw))

        def request_of(raw: bytes) -> Any:
            problem = wire_problem(raw) if is_call else small_problem(raw)
            if problem is not None:
                return invalid(None, problem)
            try:
                return read(raw)
            except DecodeError as error:
                return invalid(None, f"the message does not match the service definition: {error}")

        return handler._replace(request_deserializer=call_of if is_call else request_of)


def _check_message(message: Any) -> None:
    if isinstance(message, ApiError):
        raise message


def _ends_with_status(
    work: Callable[..., Coroutine[Any, Any, Any]], name: str = ""
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Decorate a method of the service: an ApiError ends the call with the matching gRPC status.

    `name` is the method's name in the request log; empty means the name of the function `work`.
    """

    async def method(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            with self._log.record(name or work.__name__, context) as record:
                _check_message(request)
                return await work(self, request, record)
        except ApiError as refused:
            await context.abort(status_of(refused), refused.message)

    return method


def status_of(refused: ApiError) -> grpc.StatusCode:
    """Return the gRPC status of an error; INTERNAL if its HTTP status has no counterpart."""
    return _CODES.get(refused.status, grpc.StatusCode.INTERNAL)


class TritonService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The methods of the gRPC service."""

    def __init__(
        self,
        inference: Inference,
        settings: ServerSettings,
        body_budget: BodyBudget,
        log: CallLog,
    ) -> None:
        self._log = log
        self._inference = inference
        self._body_budget = body_budget
        self._settings = settings
        self._most_calls = settings.concurrency + settings.max_queued_requests + _EXTRA_CALLS

    @_ends_with_status
    async def ServerLive(self, request: Any, _: RequestRecord) -> Any:
        return pb.ServerLiveResponse(live=self._inference.is_live)

    @_ends_with_status
    async def ServerReady(self, request: Any, _: RequestRecord) -> Any:
        return pb.ServerReadyResponse(ready=self._inference.is_ready)

    @_ends_with_status
    async def ModelReady(self, request: Any, _: RequestRecord) -> Any:
        has = request.name in self._inference.models and request.version in ("", "1")
        return pb.ModelReadyResponse(ready=has and self._inference.is_ready)

    @_ends_with_status
    async def ServerMetadata(self, request: Any, _: RequestRecord) -> Any:
        return pb.ServerMetadataResponse(**repository.server_metadata())

    @_ends_with_status
    async def ModelMetadata(self, request: Any, _: RequestRecord) -> Any:
        model = self._inference.find(request.name, request.version)
        return pb.ModelMetadataResponse(**repository.model_metadata(model))

    @_ends_with_status
    async def ModelConfig(self, request: Any, _: RequestRecord) -> Any:
        model = self._inference.find(request.name, request.version)
        config = repository.model_config(model, self._inference, self._settings)
        message = json_format.ParseDict(config, model_config_pb2.ModelConfig())
        return pb.ModelConfigResponse(config=message)

    @_ends_with_status
    async def RepositoryIndex(self, request: Any, _: RequestRecord) -> Any:
        return pb.RepositoryIndexResponse(models=repository.index(self._inference))

    @_ends_with_status
    async def ModelStatistics(self, request: Any, _: RequestRecord) -> Any:
        found = repository.statistics(self._inference, request.name, request.version)
        return pb.ModelStatisticsResponse(**found)

    @_ends_with_status
    async def ModelInfer(self, call: _Call, record: RequestRecord) -> Any:
        with self._body_budget.reserved(call.size):
            model, request = await self._read(call.message, may_have_many=False)
            record.details = request.log_fields
            return write_response(await self._inference.one_response(request), model)

    async def _read(self, message: Any, *, may_have_many: bool) -> tuple[Model, InferRequest]:
        _check_message(message)
        model = self._inference.find(message.model_name, message.model_version)
        read = functools.partial(read_request, message, model, may_have_many=may_have_many)
        is_large = any(max(tensor.shape, default=0) >= _LARGE for tensor in message.inputs)
        return model, await run_in_thread(read) if is_large else read()

    async def ModelStreamInfer(
        self, messages: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> None:
        """Run the calls of a stream concurrently, and send their responses as they become ready.

        If the client does not read responses, its calls wait. While `_most_calls` calls of the
        stream are unfinished, no further call is started.
        """
        writing, free_slots = asyncio.Lock(), asyncio.Semaphore(self._most_calls)
        calls: set[asyncio.Task[None]] = set()

        async def write(answer: Any) -> None:
            async with writing:
                await context.write(answer)

        def end(call: asyncio.Task[None]) -> None:
            calls.discard(call)
            free_slots.release()

        try:
            async for message in messages:
                await free_slots.acquire()
                call = asyncio.create_task(self._answer(message, write, context))
                calls.add(call)
                call.add_done_callback(end)
            await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*calls, return_exceptions=True)

    async def _answer(
        self, call: _Call, write: Callable[[Any], Coroutine[Any, Any, None]], context: Any
    ) -> None:
        try:
            try:
                with (
                    self._log.record("ModelStreamInfer", context) as record,
                    self._body_budget.reserved(call.size),
                ):
                    model, request = await self._read(call.message, may_have_many=True)
                    record.details = request.log_fields
                    found = StreamedResponses(model)
                    async with contextlib.aclosing(self._inference.responses(request)) as responses:
                        async for response in responses:
                            await write(found.write(response))
            except ApiError as refused:
                request_id = getattr(call.message, "id", "")[:MAX_ID]
                await write(refused_response(request_id, refused))
        except grpc.aio.BaseError as error:
            _logger.debug("the client of a stream has disconnected", exc_info=error)


def _refuses(name: str, what: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def method(self: Any, request: Any, _: RequestRecord) -> Any:
        raise unsupported_extension(what)

    return _ends_with_status(method, name)


for _name, _what in _UNSUPPORTED.items():
    setattr(TritonService, _name, _refuses(_name, _what))
