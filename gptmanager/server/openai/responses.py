"""/v1/responses: answers input items, with one object or a stream of events; stores the answers."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.errors import quoted
from gptmanager.server.chat.chat_call import ChatCalls, fields_renamed
from gptmanager.server.chat.chat_prompt import TEMPLATE_FIELDS
from gptmanager.server.chat.event_answer import EventAnswer
from gptmanager.server.chat.tools import MAX_TOOLS
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import (
    AsItIs,
    Field,
    Flag,
    Integer,
    Kind,
    ListOf,
    Object,
    OneOf,
    Text,
    bad_request,
    by_name,
    field_error,
    must_be,
)
from gptmanager.server.http.body import read_json, until_disconnected
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.responses import json_response
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.openai.item_references import resolved
from gptmanager.server.openai.json_answer import respond
from gptmanager.server.openai.models import check_model
from gptmanager.server.openai.response_input import (
    RENAMED,
    SAME,
    chat_fields,
    items_of,
    listed,
    messages_of,
    outputs_renamed,
    own_tools,
)
from gptmanager.server.openai.response_store import ResponseStore
from gptmanager.server.openai.response_writer import ResponseWriter
from gptmanager.server.request_fields import NotSupported, read_request
from gptmanager.server.text.generation_fields import (
    MAX_TOP_LOG_PROBS,
    SAMPLING,
    SERVING,
    STREAM_OPTIONS,
    NewTokens,
)
from gptmanager.server.text.log_probs import TokenLogProb, chat_shape

_TEXT = {"type": "string"}
_ITEMS = {"type": "array", "items": {"type": "object"}, "minItems": 1}
# Fields that clients expect in a response. They are null, but `completed_at` is set at the end.
_NULL = ("completed_at", "conversation", "moderation", "prompt", "prompt_cache_diagnostics")
_ECHOED = ("user", "safety_identifier", "max_tool_calls", "prompt_cache_key")
# Fields with nested values, which are returned in a response or in the list of its input items.
_RETURNED = ("input", "tools", "tool_choice", "text")
_IGNORED: dict[str, Kind] = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), Text(0, 1024)),
    **dict.fromkeys(("service_tier", "prompt_cache_options", "prompt_cache_retention"), AsItIs()),
    **dict.fromkeys(
        ("client_metadata", "access_programs", "background_options", "image"), AsItIs()
    ),
    "max_tool_calls": Integer(0, 2**31 - 1),
    "metadata": Object(),
}
_NOT_SUPPORTED = ("context_management", "moderation", "personality")
_LOG_PROBS = "message.output_text.logprobs"
_INCLUDED = (
    _LOG_PROBS,
    # without effect: no thought is encrypted, and the tool for searches is left out
    *("reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results"),
)
_MAX_METADATA = (16, 512)  # maximum number of keys, and of characters in each key and value


class Input:
    """The field `input`: a string, or a list of items, which `messages_of` reads."""

    def read(self, where: str, value: Any) -> Any:
        if not isinstance(value, str | list) or not value:
            raise must_be(where, "a string or a list of items, with at least one", value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{**_TEXT, "minLength": 1}, _ITEMS]}


_BODY = by_name(
    [
        Field("input", Input(), "a string, or items: messages, calls and their results, reasoning"),
        Field("instructions", Text(), "a system message before the input"),
        Field("previous_response_id", Text(1, 256), "the stored response that this continues"),
        Field(
            "max_output_tokens",
            NewTokens(1),
            "maximum number of new tokens; absent: as many as fit into the context",
        ),
        Field("tools", ListOf(AsItIs({"type": "object"}), longest=MAX_TOOLS), "functions"),
        Field("tool_choice", AsItIs(), "none, auto, required, or a function by its name"),
        Field("parallel_tool_calls", Flag(), "false: at most one call"),
        Field("text", Object(by_name([
            Field("format", AsItIs({"type": "object"}), "text, json_object, or json_schema"),
            Field("verbosity", Text(0, 64), "without effect"),
        ]))),
        Field("reasoning", Object(by_name([
            Field("effort", Text(0, 64), "a variable of the chat template"),
            Field("summary", Text(0, 64), "without effect: reasoning is returned in full"),
        ]))),
        Field("store", Flag(), "absent: true; keep the response, for reading or continuing it"),
        Field("stream_options", STREAM_OPTIONS),
        Field("truncation", OneOf(("auto", "disabled")), "without effect: nothing is ever cut"),
        Field("include", ListOf(Text(0, 64), longest=16), " or ".join(_INCLUDED)),
        Field("background", Flag(), "must be false"),
        Field(
            "top_logprobs",
            Integer(0, MAX_TOP_LOG_PROBS),
            "number of most likely tokens to return for each token of the output text",
        ),
    ],
    [Field(name, kind, "accepted; has no effect on the answer") for name, kind in _IGNORED.items()],
    [
        Field(
            name, NotSupported(), "not supported: ignored, and reported in the header Warning"
        )
        for name in _NOT_SUPPORTED
    ],
)  # fmt: skip
FIELDS = _BODY | {
    name: one for name, one in by_name(SAMPLING, SERVING, TEMPLATE_FIELDS).items() if name in SAME
}


def routes(calls: ChatCalls) -> list[BaseRoute]:
    """Return the routes of /v1/responses and of the stored responses."""
    own = _Responses(calls)
    path = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", own.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", own.count, methods=["POST"]),
        Route(path, own.read, methods=["GET"]),
        Route(path, own.delete, methods=["DELETE"]),
        Route(f"{path}/input_items", own.input_items, methods=["GET"]),
        Route(f"{path}/cancel", own.cancel, methods=["POST"]),
    ]


class _Responses:
    """The endpoints, and the stored responses."""

    def __init__(self, calls: ChatCalls) -> None:
        self._calls = calls
        self._store = None if calls.settings.no_store else ResponseStore()

    async def create(self, request: Request) -> Response:
        given, warnings = await self._read(request)
        preparing = self._prepare(given, warnings, request.scope[RECORD].key)
        return await respond(request, preparing, warnings, streams=given.get("stream", False))

    async def count(self, request: Request) -> Response:
        given, warnings = await self._read(request)
        counting = self._count(given, warnings, request.scope[RECORD].key)
        num_tokens = await until_disconnected(request, counting)
        found = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return json_response(found, headers=warnings.headers())

    async def _read(self, request: Request) -> tuple[dict[str, Any], Warnings]:
        lenient = self._calls.settings.lenient
        given, warnings = await read_json(
            request, functools.partial(read_request, fields=FIELDS, lenient=lenient)
        )
        check_model(self._calls.engine, given.get("model"))
        _check_supported(given)
        return given, warnings

    def _items(self, given: dict[str, Any], owner: str) -> tuple[list[Any], list[Any]]:
        """Return the items of the responses that a request continues, and its own items."""
        items = resolved(items_of(given.get("input", [])), self._store, owner)
        name = given.get("previous_response_id")
        earlier = [] if name is None else self._earlier(owner, name)
        if not items and not earlier:
            raise bad_request("input", "input is missing")
        self._calls.check_number("input", [*earlier, *items])
        return earlier, items

    async def _count(self, given: dict[str, Any], warnings: Warnings, owner: str) -> int:
        earlier, items = self._items(given, owner)
        messages, places = messages_of(items, earlier, given.get("instructions"))
        with _fields_renamed(given, messages, places):
            fields = {**chat_fields(given, warnings), "messages": messages}
            prompt, _ = await self._calls.prompt(fields, warnings)
        return len(prompt.tokens)

    async def _prepare(self, given: dict[str, Any], warnings: Warnings, owner: str) -> EventAnswer:
        earlier, items = self._items(given, owner)
        messages, places = messages_of(items, earlier, given.get("instructions"))
        with _fields_renamed(given, messages, places):
            fields = {**chat_fields(given, warnings), "messages": messages}
            if _lists_tokens(given):
                fields |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
            chat = await self._calls.prepare(fields, warnings, where="input")
        model = given.get("model") or self._calls.engine.card.name
        stores = given.get("store", True) and self._store is not None
        head = {**_echoed(given), "model": model, "store": stores}
        writer = ResponseWriter(f"resp_{uuid.uuid4().hex}", head, chat.usage)

        def keep(response: dict[str, Any]) -> None:
            if self._store is not None and stores:
                self._store.add(owner, response, [*earlier, *items])

        def list_tokens(listed: list[TokenLogProb]) -> Any:
            return chat_shape(listed, given.get("top_logprobs", 0), self._calls.texts)["content"]

        return EventAnswer(chat, writer, model, keep, list_tokens)

    def _earlier(self, owner: str, name: str) -> list[Any]:
        """Return the items of a stored response: its input, and then its output."""
        where, code = "previous_response_id", "previous_response_not_found"
        if self._store is None:
            raise bad_request(where, f"{where}: the server was started with --no-store", code=code)
        stored = self._store.find(owner, name)
        if stored is None:
            text = f"{where}: no response of this id is stored: {quoted(name)}"
            raise bad_request(where, text, code=code)
        found: list[Any] = orjson.loads(stored.items)
        return found + list(orjson.loads(stored.response)["output"])

    async def read(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise field_error("stream", "a stored response is returned in one piece only")
        found = None if self._store is None else self._store.find(*_place(request))
        if found is None:
            raise _missing(request)
        return Response(found.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        if self._store is None or not self._store.delete(*_place(request)):
            raise _missing(request)
        name = request.path_params["response_id"]
        return json_response({"id": name, "object": "response.deleted", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        found = None if self._store is None else self._store.find(*_place(request))
        if found is None:
            raise _missing(request)
        items = [
            {"id": f"item_{index}", **listed(one)}
            for index, one in enumerate(orjson.loads(found.items))
        ]
        query = request.query_params
        if query.get("order") != "asc":
            items.reverse()
        ids, after = [one["id"] for one in items], query.get("after")
        begin = ids.index(after) + 1 if after in ids else 0
        most = query.get("limit", "20")
        number = int(most) if most.isascii() and most.isdecimal() and len(most) < 4 else 20
        page = items[begin : begin + min(max(number, 1), 100)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        has_more = begin + len(page) < len(items)
        return json_response({"object": "list", "data": page, **ends, "has_more": has_more})

    async def cancel(self, request: Request) -> Response:
        """Raise ApiError: only background responses can be canceled, and the server has none."""
        if self._store is None or self._store.find(*_place(request)) is None:
            raise _missing(request)
        raise ApiError(400, "the response has ended: only background responses can be canceled")


@contextmanager
def _fields_renamed(
    given: Mapping[str, Any], messages: list[dict[str, Any]], places: dict[int, str]
) -> Iterator[None]:
    """Rename the fields of chats in ApiErrors that the block raises."""
    outputs = fields_renamed(outputs_renamed(messages, places))
    with outputs, fields_renamed(RENAMED, places, own_tools(given), "input"):
        yield


def _place(request: Request) -> tuple[str, str]:
    return request.scope[RECORD].key, request.path_params["response_id"]


def _missing(request: Request) -> ApiError:
    name = request.path_params["response_id"]
    return ApiError(404, f"no response {name!r} is stored", param="response_id", code="not_found")


def _check_supported(given: Mapping[str, Any]) -> None:
    for name in _RETURNED:
        try:
            orjson.dumps([[[[[[[[given.get(name)]]]]]]]])
        except TypeError:
            raise field_error(name, "is nested too deeply") from None
    metadata, (most, longest) = given.get("metadata", {}), _MAX_METADATA
    texts = [*metadata, *metadata.values()]
    if len(metadata) > most or any(not _is_short(one, longest) for one in texts):
        need = f"at most {most} keys, and strings of at most {longest} characters"
        raise field_error("metadata", f"{quoted(metadata)} must have {need}")
    if given.get("background"):
        raise field_error("background", "is not supported: leave it out, or send false")
    for one in given.get("include", ()):
        if one not in _INCLUDED:
            what = f"{quoted(one)} is not supported; supported: {', '.join(_INCLUDED)}"
            raise field_error("include", what)


def _lists_tokens(given: Mapping[str, Any]) -> bool:
    """Return whether a request asks for log probabilities of its output text."""
    return _LOG_PROBS in given.get("include", ()) or given.get("top_logprobs", 0) > 0


def _is_short(value: Any, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest


def _with_nulls(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool of a request with the keys that every function of a response has."""
    is_function = tool.get("type") == "function"
    return {"parameters": None, "strict": None, **tool} if is_function else tool


def _echoed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    optional = ("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p")
    return {
        **dict.fromkeys(_NULL),
        **{name: given.get(name) for name in (*optional, *_ECHOED)},
        "background": False,
        "metadata": given.get("metadata") or {},
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "reasoning": given.get("reasoning", {}),
        "service_tier": "default",
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [_with_nulls(tool) for tool in given.get("tools", [])],
        "top_logprobs": given.get("top_logprobs", 0),
        "truncation": given.get("truncation", "disabled"),
    }
