"""Texts as tokens and back: /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.server.body import read_json
from gptmanager.server.engine import Engine, beside
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import Field, Flag, Integer, ListOf, Text, by_name, read_fields, wrong
from gptmanager.server.models import check_model
from gptmanager.server.responses import json_response
from gptmanager.server.settings import ServerSettings

_MODEL = Field("model", Text(), "the model's name, or an adapter's")
TOKENIZE = by_name(
    [
        _MODEL,
        Field("prompt", Text(), "a text", required=True),
        Field("add_special_tokens", Flag(), "the tokenizer's own around it; absent: true"),
        Field("return_token_strs", Flag(), "the tokens' names, too"),
    ]
)
DETOKENIZE = by_name(
    [_MODEL, Field("tokens", ListOf(Integer(0, 2**31 - 1)), "token ids", required=True)]
)


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    async def tokenize(request: Request) -> Response:
        given, _ = read_fields(await read_json(request), TOKENIZE, lenient=settings.lenient)
        check_model(engine, given.get("model"))
        special = given.get("add_special_tokens", True)
        ids = await engine.encode("prompt", given["prompt"], special=special)
        found: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": engine.card.max_model_len,
            "tokens": ids,
        }
        if given.get("return_token_strs"):
            assert engine.card.tokenizer is not None
            found["token_strs"] = [engine.card.tokenizer.id_to_token(token) for token in ids]
        return json_response(found)

    async def detokenize(request: Request) -> Response:
        given, _ = read_fields(await read_json(request), DETOKENIZE, lenient=settings.lenient)
        check_model(engine, given.get("model"))
        tokenizer, ids = engine.card.tokenizer, given["tokens"]
        if tokenizer is None:
            raise ApiError(400, "the model folder has no tokenizer.json", param="tokens")
        for index, token in enumerate(ids):
            if token >= engine.card.vocab_size:
                last = engine.card.vocab_size - 1
                raise wrong("tokens", f"tokens[{index}] = {token} is outside 0 to {last}")
        text = await beside(lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return json_response({"prompt": text})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
