"""Endpoints that list the model and its adapters, and that load and unload adapters."""

from __future__ import annotations

import functools
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.environment.machine.loopback import is_loopback
from gptmanager.errors import quoted
from gptmanager.server.engine.adapters import Adapter
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import Field, Text, by_name
from gptmanager.server.http.body import read_json, until_disconnected
from gptmanager.server.http.hosts import is_foreign_origin
from gptmanager.server.http.responses import json_response
from gptmanager.server.request_fields import read_request
from gptmanager.server.settings import ServerSettings

_NAME = Field("lora_name", Text(1, 256), "the name of the adapter for clients", required=True)
LOAD = by_name(
    [
        _NAME,
        Field("lora_path", Text(1, 4096), "the adapter's folder, as PEFT saves it", required=True),
    ]
)
UNLOAD = by_name([_NAME])


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes /v1/models and /v1/models/{name}.

    If the settings name a folder of adapters, also return /v1/load_lora_adapter and
    /v1/unload_lora_adapter.
    """

    async def models(request: Request) -> Response:
        own = [_model(engine, name) for name in engine.card.names]
        data = [*own, *(_adapter(engine, it) for it in engine.adapters)]
        ends = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return json_response({"object": "list", "data": data, **ends})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if not name:  # some clients end the path of the list with a slash
            return await models(request)
        if name in engine.card.names:
            return json_response(_model(engine, name))
        if name in engine.adapters:
            return json_response(_adapter(engine, engine.adapters.find(name)))
        raise _unknown_model(engine, name)

    async def load(request: Request) -> Response:
        _check_caller(request, settings)
        read = functools.partial(read_request, fields=LOAD, lenient=settings.lenient)
        given, warnings = await read_json(request, read)
        loading = engine.load_adapter(given["lora_name"], given["lora_path"])
        adapter = await until_disconnected(request, loading)
        return json_response(_adapter(engine, adapter), headers=warnings.headers())

    async def unload(request: Request) -> Response:
        _check_caller(request, settings)
        read = functools.partial(read_request, fields=UNLOAD, lenient=settings.lenient)
        given, warnings = await read_json(request, read)
        name = given["lora_name"]
        engine.unload_adapter(name)
        found = {"id": name, "object": "model", "deleted": True}
        return json_response(found, headers=warnings.headers())

    found: list[BaseRoute] = [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]
    if settings.adapter_dir is None:
        return found
    return [
        *found,
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def check_model(engine: Engine, name: str | None) -> None:
    """Raise ApiError (404) for a name that neither the model nor an adapter has.

    The empty string means the model, as None does.
    """
    if name and name not in engine.card.names and name not in engine.adapters:
        raise _unknown_model(engine, name)


def _unknown_model(engine: Engine, name: str) -> ApiError:
    """Return the error (404) for a name that neither the model nor an adapter has."""
    own = quoted(engine.card.name)
    text = f"the model {quoted(name)} does not exist: use {own}, or another name at /v1/models"
    return ApiError(404, text, param="model", code="model_not_found")


def _model(engine: Engine, name: str) -> dict[str, Any]:
    card = engine.card
    return _entry(name, card.created, engine) | {"root": str(card.folder), "parent": None}


def _adapter(engine: Engine, adapter: Adapter) -> dict[str, Any]:
    found = _entry(adapter.name, adapter.created, engine)
    return found | {"root": str(adapter.folder), "parent": engine.card.name}


def _entry(name: str, created: int, engine: Engine) -> dict[str, Any]:
    """Return the keys of OpenAI's API and of Anthropic's: both have clients that ask here."""
    length = engine.card.max_model_len
    at = datetime.fromtimestamp(created, timezone.utc)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "gptmanager",
        "max_model_len": length,
        "type": "model",
        "display_name": name,
        "created_at": at.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": length,
        "max_tokens": length,
    }


def _check_caller(request: Request, settings: ServerSettings) -> None:
    """Raise ApiError (403) for a request from another machine or a foreign web page.

    If the server has a key, such requests are accepted here.
    """
    host = request.client.host if request.client is not None else ""
    origin = request.headers.get("origin", "")
    is_foreign = not is_loopback(host) or (origin and is_foreign_origin(origin))
    if is_foreign and not settings.has_key:
        raise ApiError(
            403, "without --api-key, adapters can be loaded and unloaded only from this machine"
        )
