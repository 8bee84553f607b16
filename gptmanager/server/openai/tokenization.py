"""Texts as tokens and back: /tokenize and /detokenize."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.server.chat.chat_prompt import (
    MESSAGES,
    OBJECTS,
    TEMPLATE_FIELDS,
    ChatPrompts,
)
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import (
    Field,
    Flag,
    Text,
    TokenIds,
    by_name,
    check_token_ids,
    wrong,
)
from gptmanager.server.http.body import read_json, run_in_thread, until_disconnected
from gptmanager.server.http.responses import json_response
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.openai.models import check_model
from gptmanager.server.request_fields import read_request
from gptmanager.server.settings import ServerSettings
from gptmanager.server.text.tools import read_tools

_MODEL = Field("model", Text(), "the model's name, or an adapter's")
TOKENIZE = by_name(
    [
        _MODEL,
        Field("prompt", Text(), "a text"),
        Field("messages", MESSAGES, "instead of it: a chat, as the model is given it"),
        Field("add_special_tokens", Flag(), "the tokenizer's own; absent: around a prompt alone"),
        Field("return_token_strs", Flag(), "the tokens' names, too"),
        Field("tools", OBJECTS, "functions that the template shows"),
        *TEMPLATE_FIELDS,
    ]
)
_ONLY_CHAT = ("tools", *(field.name for field in TEMPLATE_FIELDS))
DETOKENIZE = by_name([_MODEL, Field("tokens", TokenIds(), "token ids", required=True)])


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    chats = ChatPrompts(engine, settings)

    async def tokens(given: dict[str, Any], warnings: Warnings) -> list[int]:
        if "messages" not in given:
            special = given.get("add_special_tokens", True)
            return await engine.encode("prompt", given["prompt"], special=special)
        tools = read_tools(given.get("tools"), None, True)
        return (await chats.read(given, tools, warnings)).tokens

    async def tokenize(request: Request) -> Response:
        read = functools.partial(read_request, fields=TOKENIZE, lenient=settings.lenient)
        given, warnings = await read_json(request, read)
        check_model(engine, given.get("model"))
        _check_one(given)
        ids = await until_disconnected(request, tokens(given, warnings))
        found: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": engine.card.max_model_len,
            "tokens": ids,
        }
        if given.get("return_token_strs"):
            found["token_strs"] = await run_in_thread(lambda: _names(engine, ids))
        return json_response(found, headers=warnings.headers())

    async def detokenize(request: Request) -> Response:
        read = functools.partial(read_request, fields=DETOKENIZE, lenient=settings.lenient)
        given, warnings = await read_json(request, read)
        check_model(engine, given.get("model"))
        tokenizer, ids = engine.card.tokenizer, given["tokens"]
        if tokenizer is None:
            raise ApiError(400, "the model folder has no tokenizer.json", param="tokens")
        limit = engine.card.max_model_len
        if len(ids) > limit:
            raise wrong("tokens", f"tokens has {len(ids)} items, the model's texts have {limit}")
        check_token_ids("tokens", ids, engine.card.vocab_size)
        text = await run_in_thread(lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return json_response({"prompt": text}, headers=warnings.headers())

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _names(engine: Engine, ids: list[int]) -> list[str | None]:
    assert engine.card.tokenizer is not None
    return [engine.card.tokenizer.id_to_token(token) for token in ids]


def _check_one(given: dict[str, Any]) -> None:
    """A prompt, or messages with what belongs to them."""
    if "messages" in given:
        if "prompt" in given:
            raise wrong("prompt", "prompt stands beside messages: one is possible")
        return
    if "prompt" not in given:
        raise wrong("prompt", "prompt or messages is needed")
    for name in _ONLY_CHAT:
        if name in given:
            raise wrong(name, f"{name} needs messages")
