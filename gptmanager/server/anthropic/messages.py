"""/v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.callbacks.text.stop_strings import MAX_STOPS
from gptmanager.server.anthropic.message_input import (
    PASSED_ON,
    chat_fields,
    messages_of,
    renamed,
)
from gptmanager.server.anthropic.message_writer import MessageWriter
from gptmanager.server.chat.chat_call import ChatCalls, Place, fields_renamed
from gptmanager.server.chat.chat_prompt import TEMPLATE_FIELDS
from gptmanager.server.chat.event_answer import EventAnswer
from gptmanager.server.chat.tools import MAX_TOOLS
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import AsItIs, Field, ListOf, Object, Text, by_name
from gptmanager.server.http.body import read_json, until_disconnected
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.responses import json_response
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.openai.json_answer import respond
from gptmanager.server.openai.models import check_model
from gptmanager.server.request_fields import NotSupported, read_request
from gptmanager.server.text.generation_fields import SAMPLING, SERVING, NewTokens

_OBJECT = {"type": "object"}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _OBJECT}]}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXTS},
}


class _NoThread:
    """A conversation that the server holds. It is refused, and so clients send all messages."""

    def read(self, where: str, value: Any) -> Any:
        refused = {"error_code": "thread_unsupported_request", "unsupported": [where]}
        message = f"{where} is not supported: leave it out, and send all messages"
        raise ApiError(400, message, param=where, details=refused)

    def schema(self) -> dict[str, Any]:
        return {"type": "null"}


_PROMPT = (
    Field("messages", ListOf(AsItIs(_MESSAGE), 1), "messages of user and assistant", required=True),
    Field("system", AsItIs(_TEXTS), "the system message: a string, or text blocks"),
    Field("tools", ListOf(AsItIs(_OBJECT), longest=MAX_TOOLS), "tools that may be called"),
    Field("tool_choice", Object(), "auto, any, none, or a tool by its name"),
    Field(
        "thinking", Object(), "enabled, disabled or adaptive, for enable_thinking of the template"
    ),
    Field("output_config", Object(), "effort, and format: a JSON schema"),
    Field("output_format", Object(), "the older name of the format in output_config"),
    Field("thread", _NoThread(), "not supported: the client sends all messages"),
)
_GENERATION = (
    Field(
        "max_tokens", NewTokens(1, is_limited=True), "maximum number of new tokens", required=True
    ),
    Field("stop_sequences", ListOf(Text(1), longest=MAX_STOPS), "texts that end an output"),
)
_IGNORED = tuple(
    Field(name, AsItIs(), "accepted; has no effect on the answer")
    for name in (
        *("metadata", "service_tier", "cache_control", "inference_geo", "betas", "speed"),
        *("billing_policy", "fallbacks", "fallback_credit_token"),
        *("user_profile_id", "workspace_id"),
    )
)
_NOT_SUPPORTED = tuple(
    Field(name, NotSupported(neutral), "not supported: ignored, and reported in the header Warning")
    for name, neutral in (
        *(("container", ()), ("mcp_servers", ([],)), ("context_management", ())),
        *(("diagnostics", ()), ("compaction", ())),
    )
)
_SHARED = by_name(SAMPLING, SERVING, TEMPLATE_FIELDS)
_OTHER = {name: _SHARED[name] for name in PASSED_ON if name in _SHARED}
FIELDS = by_name(_PROMPT, _GENERATION, _IGNORED, _NOT_SUPPORTED) | _OTHER
# Clients count the tokens of a message by the body that they send next.
COUNT_FIELDS = FIELDS | {"max_tokens": FIELDS["max_tokens"]._replace(required=False)}


def routes(calls: ChatCalls) -> list[BaseRoute]:
    """Return the routes of Anthropic's API."""
    own = _Messages(calls)
    return [
        Route("/v1/messages", own.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", own.count, methods=["POST"]),
    ]


class _Messages:
    def __init__(self, calls: ChatCalls) -> None:
        self._calls = calls

    async def create(self, request: Request) -> Response:
        given, warnings = await self._read(request, FIELDS)
        preparing = self._prepare(given, warnings, request.scope[RECORD].id)
        return await respond(request, preparing, warnings, streams=given.get("stream", False))

    async def count(self, request: Request) -> Response:
        given, warnings = await self._read(request, COUNT_FIELDS)
        count = await until_disconnected(request, self._count(given, warnings))
        return json_response({"input_tokens": count}, headers=warnings.headers())

    async def _read(
        self, request: Request, fields: dict[str, Field]
    ) -> tuple[dict[str, Any], Warnings]:
        lenient = self._calls.settings.lenient
        read = functools.partial(read_request, fields=fields, lenient=lenient)
        given, warnings = await read_json(request, read)
        check_model(self._calls.engine, given.get("model"))
        return given, warnings

    async def _prepare(
        self, given: dict[str, Any], warnings: Warnings, request_id: str
    ) -> EventAnswer:
        messages, places = self._messages(given)
        with fields_renamed(renamed(given), places):
            fields = {**chat_fields(given), "messages": messages}
            # `max_tokens` is mandatory, and clients set it to the most of Anthropic's models
            chat = await self._calls.prepare(fields, warnings, clamps=True)
        model = given.get("model") or self._calls.engine.card.name
        is_clamped = chat.max_new_tokens < given["max_tokens"]
        writer = MessageWriter(f"msg_{request_id}", model, chat.usage, is_clamped=is_clamped)
        return EventAnswer(chat, writer, model)

    def _messages(self, given: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, Place]]:
        system = given.get("system")
        self._calls.check_number("messages", [*given["messages"], {"content": system}])
        return messages_of(given["messages"], system)

    async def _count(self, given: dict[str, Any], warnings: Warnings) -> int:
        messages, places = self._messages(given)
        with fields_renamed(renamed(given), places):
            fields = {**chat_fields(given), "messages": messages}
            prompt, _ = await self._calls.prompt(fields, warnings)
        return len(prompt.tokens)
