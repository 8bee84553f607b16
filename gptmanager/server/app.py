"""`create_app`: all endpoints of the server as one ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from gptmanager.errors import GptManagerError
from gptmanager.server import health, live_page, openapi
from gptmanager.server.anthropic import messages
from gptmanager.server.chat.chat_call import ChatCalls
from gptmanager.server.engine import metrics
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError, api_error
from gptmanager.server.http.connections import AddressLimit
from gptmanager.server.http.hosts import HostGuard, needs_guard
from gptmanager.server.http.idempotency import IdempotencyGuard
from gptmanager.server.http.keys import KeyGuard
from gptmanager.server.http.request_log import CLIENT_GONE, RECORD
from gptmanager.server.http.responses import DIRECT_SEND, IS_WHOLE, error_response, is_of_ollama
from gptmanager.server.openai import chat, completions, models, responses, tokenization
from gptmanager.server.settings import ServerSettings
from gptmanager.server.triton import http as triton

Routes = Callable[[Engine, ServerSettings], list[BaseRoute]]
# Paths that exist only with an option -> the option.
_ASKED_FOR = {
    "/v2": "--triton",
    "/v1/load_lora_adapter": "--adapter-dir",
    "/v1/unload_lora_adapter": "--adapter-dir",
}
_OF_LLAMA_CPP = {"/apply-template", "/completion", "/infill", "/lora-adapters", "/props", "/slots"}
# First parts of paths, also below /v1, that are for models of another kind.
_OTHER_MODELS = {"embeddings", "rerank", "score", "moderations", "audio", "images"}
_LONGEST_PATH = 4  # parts of a path that is looked for in a wrong one
_LONGEST_MISSPELLED = 64  # characters of a path that is compared with all others
_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST", "DELETE"),
    "allow_headers": ("*",),
    "expose_headers": ("Request-Id", "Retry-After", "Warning", "X-Request-Id"),
}


def _chat_routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes of all protocols with chats, which share one `ChatCalls`."""
    calls = ChatCalls(engine, settings)
    calls.log_formats()
    return [*chat.routes(calls), *responses.routes(calls), *messages.routes(calls)]


_FRONTS: Sequence[Routes] = (
    health.routes,
    metrics.routes,
    models.routes,
    tokenization.routes,
    completions.routes,
    _chat_routes,
    triton.routes,
    openapi.routes,
    live_page.routes,
)


class _App(Starlette):
    """The application. Each path is also served below `root_path`.

    Only the head of a streamed response passes through the middleware. Streams send their events
    directly to the HTTP server, because each wrapper costs time per token.

    If a response starts before the whole request has arrived, the connection is closed after the
    response: a client without a key cannot make the server read the rest of a body.
    """

    root_path = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self.root_path and scope["path"].startswith(self.root_path + "/"):
            scope = {**scope, "path": scope["path"][len(self.root_path) :]}
        is_whole = scope.get(IS_WHOLE)
        record = self.state.request_log.begin(scope)

        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = record.start(message)
                if is_whole and not is_whole():
                    headers = [*message["headers"], (b"connection", b"close")]
                    message = {**message, "headers": headers}
            await send(message)

        try:
            await super().__call__({**scope, DIRECT_SEND: send, RECORD: record}, receive, start)
        finally:
            self.state.request_log.end(record)


def create_app(engine: Engine, settings: ServerSettings) -> Starlette:
    """Return the application with all endpoints, and with the guards that `settings` require.

    Every error of an endpoint is answered with an error object.
    """
    guards = []
    if settings.max_connections_per_address is not None:
        guards.append(Middleware(AddressLimit, most=settings.max_connections_per_address))
    if needs_guard(settings.host, settings):
        origins = settings.cors_origins
        guards.append(Middleware(HostGuard, allowed=settings.allowed_hosts, origins=origins))
    if settings.has_key:
        guards.append(Middleware(KeyGuard, keys=engine.keys))
    guards.append(Middleware(IdempotencyGuard, keys=engine.keys, current=engine.kept.current))
    if settings.cors_origins:  # outermost: it answers a browser's preflight, which has no key
        guards.insert(0, Middleware(CORSMiddleware, **_CORS, allow_origins=settings.cors_origins))
    app = _App(
        routes=[route for routes in _FRONTS for route in routes(engine, settings)],
        middleware=guards,
        exception_handlers={
            ApiError: _refuse,
            GptManagerError: _refuse,
            HTTPException: _refuse_http,
            ClientDisconnect: _client_gone,
            Exception: _refuse,
        },
    )
    app.router.redirect_slashes = False  # a 404 with a message is clearer than a redirect
    app.root_path = settings.root_path
    app.state.settings = settings
    app.state.engine = engine
    app.state.request_log = engine.metrics.request_log
    app.state.body_budget = engine.body_budget
    app.state.huge_bodies = asyncio.Semaphore(1)
    return app


def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, (ApiError, GptManagerError)):
        return error_response(api_error(error), request.url.path)
    refusal = ApiError(500, "the server failed; its log has the details")
    return error_response(refusal, request.url.path)


def _refuse_http(request: Request, error: Exception) -> Response:
    """Answer an error of the router itself, which is a 404 or a 405."""
    assert isinstance(error, HTTPException)
    allowed = ", ".join(_methods(request))
    headers = {"Allow": allowed} if error.status_code == 405 else error.headers
    messages = {
        404: f"there is nothing at {request.url.path}{_hint(request)}",
        405: f"{request.method} is not allowed at {request.url.path}: use {allowed}",
    }
    message = messages.get(error.status_code, error.detail)
    refusal = ApiError(error.status_code, message, headers=headers)
    return error_response(refusal, request.url.path)


def _methods(request: Request) -> list[str]:
    """Return the methods of all routes of the requested path; a path may have several routes."""
    routes = [it for it in request.app.routes if it.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods})


def _hint(request: Request) -> str:
    """Return a hint that ends the message of a 404, or ''.

    The hint names the option that would enable the requested path, or a path that was probably
    meant, or it says that the path is for models of another kind.
    """
    path, settings = request.url.path, request.app.state.settings
    if is_of_ollama(path):
        return ": this server does not have Ollama's API; use a client of OpenAI's, and /v1"
    if path in _OF_LLAMA_CPP:
        return ": this server does not have llama.cpp's own API; use a client of OpenAI's, and /v1"
    if _OTHER_MODELS.intersection(path.removeprefix("/v1").split("/")[1:2]):
        return ": the model of this server generates text and has no other use"
    option = _ASKED_FOR.get("/v2" if path.startswith("/v2/") else path)
    is_on = settings.serves_triton if option == "--triton" else settings.adapter_dir is not None
    if option is not None and not is_on:
        return f": the server was started without {option}"
    known = {getattr(route, "path", "") for route in request.app.routes}
    parts = [part for part in path.split("/") if part][-_LONGEST_PATH:]
    for start in range(len(parts)):  # /v1 missing, or too many parts, such as Azure's
        for prefix in ("/", "/v1/"):
            found = prefix + "/".join(parts[start:])
            if found in known:
                return f": {found} was probably meant; check the base URL of the client"
    similar = get_close_matches(path[:_LONGEST_MISSPELLED], known, n=1, cutoff=0.85)
    return f": {similar[0]} was probably meant" if similar else ""


def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
