"""Texts as tokens and back: /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.memory.checkpoint_files import shown
from gptmanager.server.body import read_json
from gptmanager.server.engine import Engine, beside
from gptmanager.server.errors import ApiError
from gptmanager.server.models import unknown_model
from gptmanager.server.responses import json_response
from gptmanager.server.settings import ServerSettings


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    async def tokenize(request: Request) -> Response:
        body = await read_json(request)
        _check_model(engine, body)
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise ApiError(400, f"prompt = {shown(prompt)} is no text", param="prompt")
        special = _flag(body, "add_special_tokens", True)
        ids = await engine.encode("prompt", prompt, special=special)
        found: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": engine.card.max_model_len,
            "tokens": ids,
        }
        if _flag(body, "return_token_strs", False):
            assert engine.card.tokenizer is not None
            found["token_strs"] = [engine.card.tokenizer.id_to_token(token) for token in ids]
        return json_response(found)

    async def detokenize(request: Request) -> Response:
        body = await read_json(request)
        _check_model(engine, body)
        tokenizer = engine.card.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model folder has no tokenizer.json", param="tokens")
        ids = _ids(body, engine.card.vocab_size)
        text = await beside(lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return json_response({"prompt": text})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _check_model(engine: Engine, body: dict[str, Any]) -> None:
    name = body.get("model")
    if name is not None and name != engine.card.name and name not in engine.adapters:
        raise unknown_model(name)


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} = {shown(value)} is neither true nor false", param=name)
    return value


def _ids(body: dict[str, Any], vocab_size: int) -> list[int]:
    ids = body.get("tokens")
    if not isinstance(ids, list):
        raise ApiError(400, f"tokens = {shown(ids)} is no list of token ids", param="tokens")
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ApiError(
                400,
                f"tokens[{index}] = {shown(token)} is no token id, 0 to {vocab_size - 1}",
                param="tokens",
            )
    return ids
