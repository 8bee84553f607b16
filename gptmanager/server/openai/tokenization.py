"""/tokenize and /detokenize: convert text into tokens and back; /tokenizer_info."""

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
from gptmanager.server.chat.tools import read_tools
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import (
    Field,
    Flag,
    Text,
    TokenIds,
    bad_request,
    by_name,
    check_token_ids,
)
from gptmanager.server.http.body import read_json, run_in_thread, until_disconnected
from gptmanager.server.http.responses import json_response
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.openai.models import check_model
from gptmanager.server.request_fields import read_request
from gptmanager.server.settings import ServerSettings

_MODEL = Field("model", Text(), "the model's name, or an adapter's")
TOKENIZE = by_name(
    [
        _MODEL,
        Field("prompt", Text(), "a text; instead of messages"),
        Field("messages", MESSAGES, "a chat, which the chat template writes; instead of prompt"),
        Field("add_special_tokens", Flag(), "absent: true for a prompt, false for messages"),
        Field("return_token_strs", Flag(), "also return the tokens as strings"),
        Field("tools", OBJECTS, "functions for the template"),
        *TEMPLATE_FIELDS,
    ]
)
_ONLY_CHAT = ("tools", *(field.name for field in TEMPLATE_FIELDS))
DETOKENIZE = by_name([_MODEL, Field("tokens", TokenIds(), "token ids", required=True)])


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes /tokenize, /detokenize and /tokenizer_info."""
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
            raise ApiError(400, "the model has no tokenizer", param="tokens")
        limit = engine.card.max_model_len
        if len(ids) > limit:
            raise bad_request("tokens", f"tokens has {len(ids)} items, at most {limit} are allowed")
        check_token_ids("tokens", ids, engine.card.vocab_size)
        text = await run_in_thread(lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return json_response({"prompt": text}, headers=warnings.headers())

    async def describe(request: Request) -> Response:
        """Return what lm-eval needs to use the tokenizer of a server: the names are those of vLLM,
        and of the files of Hugging Face's tokenizers.
        """
        card = engine.card
        if card.tokenizer is None:
            raise ApiError(404, "the model has no tokenizer")
        found = {
            **dict.fromkeys(("bos_token", "eos_token", "pad_token")),
            **card.special_tokens,
            "model_max_length": card.max_model_len,
            "chat_template": chats.template,
        }
        return json_response(found)

    return [
        Route("/tokenizer_info", describe, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _names(engine: Engine, ids: list[int]) -> list[str | None]:
    assert engine.card.tokenizer is not None
    return [engine.card.tokenizer.id_to_token(token) for token in ids]


def _check_one(given: dict[str, Any]) -> None:
    """Raise ApiError (400) unless the request has either a prompt or messages.

    Also raise if a request with a prompt has a field that is valid only with messages.
    """
    if "messages" in given:
        if "prompt" in given:
            raise bad_request("prompt", "pass either prompt or messages, not both")
        return
    if "prompt" not in given:
        raise bad_request("prompt", "pass either prompt or messages")
    for name in _ONLY_CHAT:
        if name in given:
            raise bad_request(name, f"{name} needs messages")
