"""/v1/chat/completions: answers the messages of a chat, in one piece or as a stream."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.server.chat.chat_call import ChatCalls, PreparedChat
from gptmanager.server.chat.chat_prompt import MESSAGES, OBJECTS, TEMPLATE_FIELDS
from gptmanager.server.chat.functions import has_functions, named_as_functions
from gptmanager.server.fields import AsItIs, Field, Flag, Integer, bad_request, by_name
from gptmanager.server.http.body import read_json
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.openai.json_answer import JsonAnswer, answer_head, end_fields, respond
from gptmanager.server.openai.models import check_model
from gptmanager.server.request_fields import read_request
from gptmanager.server.text.generation_fields import (
    IGNORED,
    MAX_TOP_LOG_PROBS,
    NOT_SUPPORTED,
    SAMPLING,
    SERVING,
    NewTokens,
    with_known_names,
)
from gptmanager.server.text.log_probs import TokenTexts, chat_shape, prompt_shape
from gptmanager.server.text.outputs import Delta
from gptmanager.server.text.processors import STRUCTURED

_MAX_TOKENS = NewTokens(1)

FIELDS = by_name(
    [
        Field("messages", MESSAGES, "objects with role and content", required=True),
        Field(
            "max_completion_tokens",
            _MAX_TOKENS,
            "maximum number of new tokens; absent: as many as fit into the context",
        ),
        Field("max_tokens", _MAX_TOKENS, "the older name of max_completion_tokens"),
        Field("logprobs", Flag(), "return log probabilities of the tokens"),
        Field(
            "top_logprobs",
            Integer(0, MAX_TOP_LOG_PROBS),
            "number of most likely tokens to return for each token; needs logprobs",
        ),
        Field("tools", OBJECTS, "functions that may be called"),
        Field("tool_choice", AsItIs(), "none, auto, required, or a function by its name"),
        Field("parallel_tool_calls", Flag(), "false: at most one call"),
        Field("functions", OBJECTS, "deprecated: use tools"),
        Field("function_call", AsItIs(), "deprecated: use tool_choice"),
    ],
    TEMPLATE_FIELDS,
    SAMPLING,
    SERVING,
    STRUCTURED,
    IGNORED,
    NOT_SUPPORTED,
)


def routes(calls: ChatCalls) -> list[BaseRoute]:
    """Return the route of /v1/chat/completions."""
    return [Route("/v1/chat/completions", _Chats(calls).handle, methods=["POST"])]


class _Chats:
    """The endpoint /v1/chat/completions."""

    def __init__(self, calls: ChatCalls) -> None:
        self._calls = calls

    async def handle(self, request: Request) -> Response:
        lenient = self._calls.settings.lenient
        read = functools.partial(read_request, fields=FIELDS, lenient=lenient)
        given, warnings = await read_json(request, read)
        given = with_known_names(given)
        check_model(self._calls.engine, given.get("model"))
        if given.get("top_logprobs") and not given.get("logprobs"):
            raise bad_request("top_logprobs", "top_logprobs needs logprobs = true")
        preparing = self._prepare(given, warnings, request.scope[RECORD].id)
        return await respond(request, preparing, warnings, streams=given.get("stream", False))

    async def _prepare(
        self, given: dict[str, Any], warnings: Warnings, request_id: str
    ) -> JsonAnswer:
        with named_as_functions() if has_functions(given) else contextlib.nullcontext():
            chat = await self._calls.prepare(given, warnings)
        texts = self._calls.texts
        if given.get("return_tokens_as_token_ids"):
            texts = texts.as_ids()
        kind = "chat.completion.chunk" if given.get("stream") else "chat.completion"
        name = self._calls.engine.card.name
        head = answer_head(given, "chatcmpl", kind, name, request_id)
        return JsonAnswer(given, chat.answer, _ChatFormat(given, chat, texts), head)


class _ChatFormat:
    """Writes the choices of a chat; see `AnswerFormat`."""

    def __init__(self, given: Mapping[str, Any], chat: PreparedChat, texts: TokenTexts) -> None:
        self._given = given
        self._answer, self._messages = chat.answer, chat.messages
        self.usage = chat.usage
        self._texts = texts
        self._has_begun = [False] * len(chat.messages)
        self._deltas: list[list[Delta]] = [[] for _ in chat.messages]

    def add(self, index: int, delta: Delta) -> None:
        self._messages[index].push(delta.text)
        self._deltas[index].append(delta)

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, message in enumerate(self._messages):
            message.flush()
            delta = Delta.joined(self._deltas[index])
            fields = await self._answer.shaped(
                functools.partial(self._details, index, delta), len(delta.log_probs)
            )
            if self._given.get("logprobs") and fields["logprobs"] is None:  # clients expect a list
                fields["logprobs"] = chat_shape([], 0, self._texts)
            choices.append({"index": index, "message": message.message(), **fields})
        return {"choices": choices, **await self._answer.shaped(self._prompt_fields)}

    async def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = [
            {"choices": [choice]} for choice in self._choices(index, delta)
        ]
        if not any(self._has_begun):
            chunks[0].update(await self._answer.shaped(self._prompt_fields))
        self._has_begun[index] = True
        return chunks

    def _choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of the chunks for a delta.

        The first chunk of an output has the role, and its last one has the finish reason.
        """
        message = self._messages[index]
        deltas = message.push(delta.text)
        is_done = delta.finish_reason is not None
        if is_done:
            deltas += message.flush()
        if not self._has_begun[index]:
            deltas.insert(0, {"role": "assistant", "content": ""})
        if is_done or not deltas and self._has_details(delta):
            deltas.append({})  # carries the finish reason, or details of held-back text
        # The tokens are sent with the first choice after the role, or with the role if it is alone.
        at = min(len(deltas) - 1, 0 if self._has_begun[index] else 1)
        choices = []
        for position, one in enumerate(deltas):
            has_tokens, is_last = position == at, position == len(deltas) - 1
            own = Delta(
                "",
                delta.token_ids if has_tokens else [],
                delta.log_probs if has_tokens else [],
                delta.finish_reason if is_last else None,
            )
            choices.append({"index": index, "delta": one, **self._details(index, own)})
        return choices

    def _has_details(self, delta: Delta) -> bool:
        """Return whether the client gets more of a delta than its text."""
        options = self._given.get("stream_options") or {}
        names_tokens = self._given.get("return_token_ids", False)
        return bool(delta.log_probs or names_tokens or options.get("continuous_usage_stats"))

    def _details(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the fields of a choice besides its message or delta."""
        given, reason = self._given, delta.finish_reason
        reason = reason and self._messages[index].finish_reason(reason)
        ends = end_fields(reason, self._answer.outputs[index].stop_reason)
        fields: dict[str, Any] = {"logprobs": None, **ends}
        if delta.log_probs:
            fields["logprobs"] = chat_shape(
                delta.log_probs, given.get("top_logprobs", 0), self._texts
            )
        if given.get("return_token_ids"):
            fields["token_ids"] = delta.token_ids
        return fields

    def _prompt_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        (of_prompt,) = self._answer.prompt_log_probs
        if "prompt_logprobs" in self._given and of_prompt is not None:
            num_top = self._given["prompt_logprobs"]
            fields["prompt_logprobs"] = prompt_shape(of_prompt, num_top, self._texts)
        if self._given.get("return_token_ids"):
            (fields["prompt_token_ids"],) = self._answer.prompts
        return fields
