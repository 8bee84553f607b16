"""/v1/chat/completions: answers the messages of a chat, in one piece or streamed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.server.chat.chat_answer import ChatAnswer
from gptmanager.server.chat.chat_prompt import (
    MESSAGES,
    OBJECTS,
    TEMPLATE_FIELDS,
    UNKNOWN_FORMAT,
    ChatPrompt,
    ChatPrompts,
)
from gptmanager.server.chat.functions import has_functions, read_functions
from gptmanager.server.chat.reasoning import Reasoning, special_tags
from gptmanager.server.engine.engine import Engine
from gptmanager.server.fields import AsItIs, Field, Flag, Integer, bad_request, by_name
from gptmanager.server.http.body import read_json
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.openai.json_answer import JsonAnswer, answer_head, respond
from gptmanager.server.openai.models import check_model
from gptmanager.server.request_fields import read_request
from gptmanager.server.settings import ServerSettings
from gptmanager.server.text.answer import Answer
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
from gptmanager.server.text.processors import STRUCTURED, Processors
from gptmanager.server.text.sampling import GenerationOptions, check
from gptmanager.server.tool_calls.call_format import random_id
from gptmanager.server.tool_calls.tools import Tools, read_tools

_MAX_TOKENS = NewTokens(1)

logger = logging.getLogger("gptmanager")

FIELDS = by_name(
    [
        Field("messages", MESSAGES, "objects with role and content", required=True),
        Field(
            "max_completion_tokens",
            _MAX_TOKENS,
            "new tokens; absent: as many as fit into the context",
        ),
        Field("max_tokens", _MAX_TOKENS, "the older name of max_completion_tokens"),
        Field("logprobs", Flag(), "return log probabilities of the tokens"),
        Field(
            "top_logprobs",
            Integer(0, MAX_TOP_LOG_PROBS),
            "most likely tokens to return for each token; needs logprobs",
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


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    chats = Chats(engine, settings)
    chats.log_formats()
    return [Route("/v1/chat/completions", chats.handle, methods=["POST"])]


class Chats:
    """The endpoint. ConfigError for an unreadable chat template."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._is_lenient = settings.lenient
        self._settings = settings
        self._texts = TokenTexts(engine.card.tokenizer)
        self._processors = Processors(engine, lenient=settings.lenient)
        self._prompts = ChatPrompts(engine, settings)

    def log_formats(self) -> None:
        """Log how the server finds thoughts and calls, if the model has a chat template."""
        found, form = self._prompts.reasoning, self._prompts.tool_format
        if found is None:
            return
        settings = self._settings
        names = {"--reasoning-parser": settings.reasoning_parser}
        names["--tool-call-parser"] = settings.tool_call_parser
        thoughts, calls = (
            "by the chat template" if given == "auto" else f"by {option}"
            for option, given in names.items()
        )
        logger.info("thoughts in answers: %s, %s", found.value, thoughts)
        if form is None:
            logger.info("calls in answers: none, requests with tools get a 400: %s", UNKNOWN_FORMAT)
        else:
            logger.info("calls in answers: %s, %s", form.name, calls)

    async def handle(self, request: Request) -> Response:
        read = functools.partial(read_request, fields=FIELDS, lenient=self._is_lenient)
        given, warnings = await read_json(request, read)
        given = with_known_names(given)
        check_model(self._engine, given.get("model"))
        if given.get("top_logprobs") and not given.get("logprobs"):
            raise bad_request("top_logprobs", "top_logprobs needs logprobs = true")
        preparing = self._prepare(given, warnings, request.scope[RECORD].id)
        return await respond(request, preparing, warnings, streams=given.get("stream", False))

    async def _prepare(
        self, given: dict[str, Any], warnings: Warnings, request_id: str
    ) -> JsonAnswer:
        card = self._engine.card
        is_deprecated = has_functions(given)
        if is_deprecated:
            tools = read_functions(given.get("functions"), given.get("function_call"))
        else:
            parallel = given.get("parallel_tool_calls", True)
            tools = read_tools(given.get("tools"), given.get("tool_choice"), parallel)
        prompt = await self._prompts.read(given, tools, warnings)
        if tools is not None and prompt.one_call:
            # the template must accept the answer in the next prompt
            tools = replace(tools, parallel=False)
        num_top = given.get("top_logprobs", 0) if given.get("logprobs") else None
        processor = await self._processor(given, warnings, tools, prompt)
        options = GenerationOptions(given, num_top, given.get("prompt_logprobs"), processor)
        check(options, card)
        left = max(1, card.max_model_len - len(prompt.tokens))
        name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        most = given.get(name, left)
        most = self._engine.context_length.clamped(len(prompt.tokens), most, name, warnings)
        self._engine.context_length.check(len(prompt.tokens), most, prompt="messages", most=name)
        form = prompt.tool_format
        tags = prompt.start.reasoning.tags + (() if form is None else form.tags)
        special = special_tags(card.tokenizer, tags) if card.tokenizer and tags else None
        answer = Answer(self._engine, options, [prompt.tokens], [most], special_texts=special)
        messages = [
            ChatAnswer(
                prompt.start.parser(tools, form),
                is_alone=tools is not None and not tools.parallel,
                is_deprecated=is_deprecated,
                new_id=random_id if form is None else form.new_id,
            )
            for _ in answer.outputs
        ]
        texts = self._texts.as_ids() if given.get("return_tokens_as_token_ids") else self._texts
        kind = "chat.completion.chunk" if options.streams else "chat.completion"
        head = answer_head(given, "chatcmpl", kind, card.name, request_id)
        thinks = prompt.start.reasoning is not Reasoning.NONE
        shape = _ChatFormat(given, answer, messages, texts, thinks=thinks)
        return JsonAnswer(given, answer, shape, head)

    async def _processor(
        self, given: Mapping[str, Any], warnings: Warnings, tools: Tools | None, prompt: ChatPrompt
    ) -> Any:
        """Return the logits post-processor; a rule begins after the thought of the answer."""
        form, tokenizer = prompt.tool_format, self._engine.card.tokenizer
        start = None
        if tokenizer is not None and not (form is not None and form.has_thoughts):
            start = functools.partial(prompt.start.grammar_start, tokenizer)
        return await self._processors.of(given, warnings, tools, form, start)


class _ChatFormat:
    """Writes the choices of a chat. `messages`: one for each output. `thinks`: the usage has the
    number of tokens in thoughts.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        answer: Answer,
        messages: list[ChatAnswer],
        texts: TokenTexts,
        *,
        thinks: bool,
    ) -> None:
        self._given = given
        self._thinks = thinks
        self._answer = answer
        self._messages = messages
        self._texts = texts
        self._has_begun = [False] * len(messages)
        self._deltas: list[list[Delta]] = [[] for _ in messages]

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
        """Return the chunks' choices for a delta: first the role, at the end the finish reason."""
        message = self._messages[index]
        deltas = message.push(delta.text)
        is_done = delta.finish_reason is not None
        if is_done:
            deltas += message.flush()
        if not self._has_begun[index]:
            deltas.insert(0, {"role": "assistant", "content": ""})
        if is_done or not deltas:
            deltas.append({})  # carries the finish reason, or log probabilities of held-back text
        # the tokens are sent with the first choice after the role
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

    def usage(self) -> dict[str, Any]:
        usage = self._answer.usage()
        if self._thinks:
            outputs = zip(self._messages, self._answer.outputs, strict=True)
            num = sum(message.num_reasoning_tokens(it.token_starts) for message, it in outputs)
            usage["completion_tokens_details"] = {"reasoning_tokens": num}
        return usage

    def _details(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the fields next to the message or delta of a choice."""
        given, reason = self._given, delta.finish_reason
        fields: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": reason and self._messages[index].finish_reason(reason),
            "stop_reason": reason and self._answer.outputs[index].stop_reason,
        }
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
